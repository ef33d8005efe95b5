"""The log of segments: appends, commits in groups, and evicts the least valuable segment.

The limit holds by construction: a segment never grows beyond its size, and with each that is begun
an older one is evicted, where else there were no room for a next. What is worth keeping of that is
copied first (``retention``). An eviction frees at least 7 % of a segment where nothing is
leased, and hits cost no write.
"""

import errno
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from math import inf

from ostinato.core.errors import ConfigError
from ostinato.tiers.folder import Folder
from ostinato.tiers.index import ExtentIndex, Record
from ostinato.tiers.port import Buffer, Extent
from ostinato.tiers.record import ALIGNMENT, Lease, Names, encode, lease_slot, parse, record_bytes
from ostinato.tiers.retention import LEAST_SHARE, choose_eviction
from ostinato.tiers.segments import SUFFIX, Segment, UnreadableSegment

MAX_SEGMENT_BYTES = 1 << 30
MIN_SEGMENTS = 4
_NUM_SEGMENTS = 32
_SCAN_THREADS = 8


class LogFull(Exception):
    """What is leased leaves no room."""


@dataclass(frozen=True, slots=True)
class LogLimits:
    """How large a log may grow.

    Attributes:
        limit_bytes: All segments together.
        segment_bytes: Each; 0 chooses a 32nd of the limit, 1 GiB at most.
    """

    limit_bytes: int
    segment_bytes: int = 0

    @property
    def segment(self) -> int:
        """Bytes of a segment."""
        wanted = self.segment_bytes or min(MAX_SEGMENT_BYTES, self.limit_bytes // _NUM_SEGMENTS)
        return wanted // ALIGNMENT * ALIGNMENT

    def check(self) -> None:
        """Raise ConfigError where there is no room for a few segments."""
        if self.segment < 4 * ALIGNMENT or self.limit_bytes < MIN_SEGMENTS * self.segment:
            raise ConfigError(
                f"kv_disk_bytes={self.limit_bytes}: must hold {MIN_SEGMENTS} segments of "
                f"{max(self.segment, 4 * ALIGNMENT)} bytes: raise it, or leave kv_disk out"
            )


class SegmentLog:
    """Segments of one folder, and the index of what they hold. One thread at a time writes."""

    def __init__(
        self,
        folder: Folder,
        limits: LogLimits,
        index: ExtentIndex,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Read what is there, and fill the index.

        Raises:
            ConfigError: The limit is too small, or a newer version wrote the folder.
            OSError: The medium failed.
        """
        limits.check()
        self.limits, self.index = limits, index
        self.written_bytes = self.num_evicted = 0
        self.damage = list[tuple[str, int, int]]()  # file, offset, bytes: found at start
        self._folder, self._clock = folder, clock
        self._staged = list[Record]()
        self.segments = self._open_all()
        self._next = self.segments[-1].sequence if self.segments else 0
        self._active = self.segments[-1] if self.segments else None

    def occupied(self) -> int:
        """Bytes that the files take, the last one as if it were full."""
        size = self.limits.segment
        return sum(max(x.end, size if x is self._active else 0) for x in self.segments)

    def num_bytes(self) -> int:
        """Bytes that the files take."""
        return sum(segment.end for segment in list(self.segments))

    def fit(self) -> None:
        """Evict until the limit holds: after a crash in an eviction, or with a lower limit."""
        while self.segments and self.occupied() + self.limits.segment > self.limits.limit_bytes:
            active = self._active
            room = self.limits.segment - active.end if active else 0
            self._evict(*(self._choice(room) or (self.segments[0], [])))

    def append(
        self, extent: Extent, payload: Buffer, names: Names, key: bytes | None, may_write: float
    ) -> None:
        """Append an extent; no look-up finds it before ``commit``.

        Args:
            extent: Its tokens and place.
            payload: The bytes of its blocks.
            names: Of its tenant.
            key: The tenant's; None in the clear.
            may_write: Bytes, with those that are copied for it: then less is worth copying.

        Raises:
            LogFull: What is leased leaves no room for it.
            OSError: The medium failed; ``abandon`` what is not committed.
        """
        size = record_bytes(extent, sealed=key is not None)
        segment = self._segment_for(size, may_write - size)
        buffers = encode(extent, payload, names, key, segment.seed, segment.durable)
        header = parse(bytes(buffers[0]), segment.seed)
        assert header is not None, "just encoded"
        offset = segment.append(buffers, header.record_bytes)
        self.written_bytes += size
        lease, now_s = header.lease, self.index.time_of_use(self._clock())
        record = Record(
            header, segment, offset, lease, extent.packed, extent.digests, last_use_s=now_s
        )
        self._staged.append(record)

    def commit(self) -> None:
        """Make what was appended durable, then findable."""
        if not self._staged or self._active is None:
            return
        self._active.sync()
        for record in self._staged:
            self._active.records.append(record)
            self.index.add(record)
        self._staged.clear()

    def abandon(self) -> None:
        """Cut off what was appended and not committed; no more is appended behind what stays."""
        active, self._active = self._active, None
        self._staged.clear()
        if active is not None:
            active.cut()
            self._active = active

    def lease(self, records: Iterable[Record], keep_until: float, refresh_s: float) -> None:
        """Set the ends of leases, and how uses move them, durably; OSError if the medium fails."""
        touched = set[Segment]()
        for record in records:
            segment = self._segment_of(record)
            lease = Lease(record.lease.turn + 1, keep_until, refresh_s)
            place, slot = lease_slot(lease, record.header.salt)
            segment.file.write([slot], record.offset + place)
            record.lease = lease
            touched.add(segment)
        for segment in touched:
            segment.file.sync()

    def erase(self, name: bytes) -> tuple[int, int]:
        """Overwrite all records of a tenant's name, old copies included.

        Returns:
            Number of extents that look-ups could find, and bytes overwritten.

        Raises:
            OSError: The medium failed; what was not overwritten stays to be erased.
        """
        num_extents = num_bytes = 0
        for segment in self.segments:
            if segment is not self._active and segment.end > segment.durable:
                segment.cut()
            for record in [x for x in segment.records if name in x.header.names]:
                num_extents += self.index.is_live(record)
                self.index.remove(record)
                record.erased = True
                segment.overwrite(record.offset, record.header.total_bytes)
                segment.records.remove(record)
                num_bytes += record.header.total_bytes
        return num_extents, num_bytes

    def leased_bytes(self) -> int:
        """Bytes of records under a lease."""
        records = [x for segment in list(self.segments) for x in list(segment.records)]
        now_s = self._clock()
        return sum(x.size for x in records if x.keep_until > now_s and self.index.is_live(x))

    def _open_all(self) -> list[Segment]:
        segments = list[Segment]()
        for name in [x for x in self._folder.names() if x.endswith(SUFFIX)]:
            try:
                segments.append(Segment.open(self._folder, name))
            except UnreadableSegment as error:
                if error.damaged_bytes:
                    self.damage.append((name, 0, error.damaged_bytes))
                self._folder.remove(name)
        with ThreadPoolExecutor(_SCAN_THREADS) as threads:
            list(threads.map(Segment.scan, segments))
        self.damage += [(segment.name, *place) for segment in segments for place in segment.damage]
        for record in (record for segment in segments for record in segment.records):
            record.last_use_s = self.index.time_of_use(record.last_use_s)
            self._enter(record)
        return segments

    def _enter(self, record: Record) -> None:
        if record.header.sealed and not record.digests:
            self.index.add_locked(record)
        elif record.digests or record.open(None):
            self.index.add(record)

    def _segment_for(self, size: int, may_copy: float) -> Segment:
        self.fit()  # an eviction may have failed before
        active, whole = self._active, self.limits.segment
        if active is not None and active.end + size <= whole:
            return active
        choice, room = None, whole - ALIGNMENT - size
        is_last = self.occupied() + 2 * whole > self.limits.limit_bytes
        if is_last and (choice := self._choice(room, may_copy)) is None:
            raise LogFull
        self.commit()
        if active is not None and active.end + ALIGNMENT <= whole:
            active.mark()
        self._next += 1
        created = self._active = Segment.create(self._folder, self._next, self._clock())
        self.segments.append(created)
        if choice is not None:
            self._evict(*choice)
        return created

    def _choice(self, room: int, may_copy: float = inf) -> tuple[Segment, list[Record]] | None:
        """Return the older segment to evict, and what to copy of it; None if no leases fit."""
        older = {x: partial(self._live, x) for x in self.segments if x is not self._active}
        most = int(min(room, (1 - LEAST_SHARE) * self.limits.segment, may_copy))
        return choose_eviction(older, room, most, self._clock())

    def _live(self, segment: Segment) -> list[Record]:
        """Return what look-ups can find in a segment, roots first."""
        live = filter(self.index.is_live, segment.records)
        return sorted(live, key=lambda record: record.header.first_block)

    def _evict(self, victim: Segment, kept: list[Record]) -> None:
        """Copy what is worth keeping to the active segment, then remove a segment."""
        self.commit()
        copies = [self._copy(record) for record in kept]
        if copies and self._active is not None:
            self._active.sync()
        for old, new in zip(kept, copies, strict=True):
            self.index.remove(old)
            self._segment_of(new).records.append(new)
            self._enter(new)
        live = self._live(victim)
        for record in live:
            self.index.remove(record)
        self.num_evicted += len(live)
        self.segments.remove(victim)
        if victim is self._active:
            self._active = None
        self._folder.remove(victim.name)

    def _copy(self, record: Record) -> Record:
        """Append a copy of a record to the active segment; neither durable nor findable yet."""
        active, header = self._active, record.header
        assert active is not None, "a segment is open while another is evicted"
        blocks = bytearray(header.record_bytes - header.header_bytes)
        file = self._segment_of(record).file
        if file.read(memoryview(blocks), record.offset + header.header_bytes) < len(blocks):
            raise OSError(errno.EIO, "a segment is shorter than its records")
        fresh = header.bytes_for(active.seed, active.durable, record.lease)
        offset = active.append([fresh, blocks], header.record_bytes)
        self.written_bytes += header.total_bytes
        return replace(record, header=header, segment=active, offset=offset, num_indexed=0)

    @staticmethod
    def _segment_of(record: Record) -> Segment:
        assert isinstance(record.segment, Segment)
        return record.segment
