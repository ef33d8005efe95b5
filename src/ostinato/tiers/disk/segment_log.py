"""The log of segments: appends, commits in groups, and evicts the least valuable segment.

The limit always holds: a segment never exceeds its size, and when a new one would leave no room for
the next, an older one is evicted. Its records worth keeping are copied first (``retention``). An
eviction frees at least 7 % of a segment unless it is leased, and hits cost no write.
"""

import errno
import logging
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from math import inf

from ostinato.tiers.disk.index import ExtentIndex
from ostinato.tiers.disk.limits import DAY_S, DailyBudget, DiskOptions, allocated
from ostinato.tiers.disk.segments import SUFFIX, Record, Segment, UnreadableSegment
from ostinato.tiers.folder import Folder
from ostinato.tiers.port import Buffer, Extent
from ostinato.tiers.record import (
    ALIGNMENT,
    Names,
    RecordHeader,
    RecordLease,
    encode,
    lease_slot,
    parse,
    record_bytes,
)
from ostinato.tiers.retention import MIN_SHARE, Rank, choose_eviction

logger = logging.getLogger(__name__)

_SCAN_THREADS = 8


class LogFull(Exception):
    """Leased records leave no room."""


class SegmentLog:
    """Segments of one folder, and the index of what they hold. One thread at a time writes."""

    def __init__(
        self,
        folder: Folder,
        options: DiskOptions,
        index: ExtentIndex,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Read the segments of the folder, fill the index, and enforce the limit.

        Raises:
            ConfigError: A newer version wrote the folder.
            OSError: The medium failed.
        """
        self.index, self.max_segment_bytes = index, options.max_segment_bytes
        self.written_bytes = self.num_evicted = 0
        self.damage = list[
            tuple[str, int, int]
        ]()  # file, offset, bytes: found at start, or unreadable
        self._folder, self._clock, self._limit_bytes = folder, clock, options.limit_bytes
        self._staged = list[Record]()
        self.segments = self._open_all()
        self._next = self.segments[-1].sequence if self.segments else 0
        self._active = self.segments[-1] if self.segments else None
        today = sum(x.end for x in self.segments if x.created > clock() - DAY_S)
        self.budget = DailyBudget(options.bytes_per_day, clock, today)
        self._enforce_limit()

    def occupied(self) -> int:
        """Return the bytes that all files take, counting the active one as full."""
        size = self.max_segment_bytes
        return sum(allocated(max(x.end, size * (x is self._active))) for x in self.segments)

    def num_bytes(self) -> int:
        """Return the bytes of all files."""
        return sum(segment.end for segment in list(self.segments))

    def append(
        self, extent: Extent, payload: Buffer, names: Names, key: bytes | None, used_s: float
    ) -> None:
        """Append an extent; look-ups find it after ``commit``.

        Args:
            extent: Its tokens and position.
            payload: The bytes of its blocks.
            names: Names of its tenant.
            key: The tenant's key; None in the clear.
            used_s: Time of the use with which it is stored.

        Raises:
            LogFull: Leased records leave no room for it.
            OSError: The medium failed; call ``rollback``.
        """
        size = record_bytes(extent, sealed=key is not None)
        segment = self._segment_for(size, self.budget.left() - size)
        buffers = encode(extent, payload, names, key, segment.seed, segment.durable)
        header = parse(bytes(buffers[0]), segment.seed)
        assert header is not None, "just encoded"
        offset = self._write(segment, buffers, header)
        record = Record(
            header, segment, offset, header.lease, extent.packed, extent.digests,
            parent=extent.parent, last_use_s=used_s,
        )  # fmt: skip
        self._staged.append(record)

    def commit(self) -> None:
        """Make the appended records durable, then findable."""
        if not self._staged or self._active is None:
            return
        self._active.sync()
        for record in self._staged:
            self._active.records.append(record)
            self.index.add(record)
        self._staged.clear()

    def rollback(self) -> None:
        """Cut off uncommitted records; if that fails, the segment takes no more."""
        self._staged.clear()
        try:
            if self._active is not None:
                self._active.cut()
        except OSError as error:
            logger.debug("the end of a segment could not be cut off: %s", error)
            self._active = None

    def lease(self, records: Iterable[Record], keep_until: float, refresh_s: float) -> None:
        """Set leases durably; OSError if the medium fails."""
        touched = set[Segment]()
        for record in records:
            lease = RecordLease(record.lease.turn + 1, keep_until, refresh_s)
            place, slot = lease_slot(lease, record.header.salt)
            assert record.segment is not None, "an evicted record is not findable"
            record.segment.file.write([slot], record.offset + place)
            record.lease = lease
            touched.add(record.segment)
        for segment in touched:
            segment.file.sync()

    def hide(self, name: bytes) -> tuple[int, list[Segment]]:
        """Make all records of a tenant's name unfindable, old copies included.

        Returns:
            Number of extents that look-ups could find, and the segments to be overwritten.
        """
        num_extents, segments = 0, list[Segment]()
        for segment in self.segments:
            records = [x for x in segment.records if name in x.header.names]
            for record in records:
                num_extents += self.index.is_live(record)
                self.index.remove(record)
                record.erased = True
            if records or (segment is not self._active and segment.end > segment.durable):
                segments.append(segment)
        return num_extents, segments

    def void(self, segment: Segment) -> int:
        """Destroy the headers of a segment's hidden records, and what a failed store has left."""
        if segment in self.segments and segment is not self._active:
            segment.cut()
        if hidden := [x.offset for x in segment.records if x.erased]:
            segment.void(hidden)
        return 0

    def overwrite(self, segment: Segment) -> int:
        """Overwrite a segment's hidden records, unless it is evicted; returns their bytes."""
        if hidden := [x for x in segment.records if x.erased]:
            segment.overwrite([(x.offset, x.size) for x in hidden])
            segment.records = [x for x in segment.records if not x.erased]
        return sum(x.size for x in hidden)

    def free(self, segment: Segment) -> int:
        """Remove a segment that has no records left; the active one is cut instead."""
        if segment in self.segments and not segment.records:
            if segment is self._active:
                segment.clear()
            else:
                self._remove(segment)
        return 0

    def leased_bytes(self) -> int:
        """Bytes of records under a lease."""
        records = [x for segment in list(self.segments) for x in list(segment.records)]
        now_s = self._clock()
        return sum(x.size for x in records if x.keep_until > now_s and self.index.is_live(x))

    def _open_all(self) -> list[Segment]:
        names = [name for name in self._folder.names() if name.endswith(SUFFIX)]
        with ThreadPoolExecutor(_SCAN_THREADS) as threads:
            results = list(threads.map(self._open, names))
        segments = [result for result in results if isinstance(result, Segment)]
        for name, error in zip(names, results, strict=True):
            if isinstance(error, UnreadableSegment):
                if error.damaged_bytes:
                    self.damage.append((name, 0, error.damaged_bytes))
                self._folder.remove(name)
            elif isinstance(error, OSError):
                if not segments:
                    raise error
                self._warn_unreadable(name, error)
                self.damage.append((name, 0, 0))
                self._folder.remove(name)
        self.damage += [(segment.name, *place) for segment in segments for place in segment.damage]
        for record in (record for segment in segments for record in segment.records):
            record.last_use_s = self.index.time_of_use(record.last_use_s)
            self._enter(record)
        return segments

    def _open(self, name: str) -> Segment | UnreadableSegment | OSError:
        """Open a segment and read its headers."""
        try:
            segment = Segment.open(self._folder, name)
            segment.scan()
        except (UnreadableSegment, OSError) as error:
            return error
        return segment

    def _warn_unreadable(self, name: str, error: OSError) -> None:
        """Warn of a segment once."""
        if all(name != known for known, *_ in self.damage):
            logger.warning(
                "%s/%s cannot be read: %s: what it holds is dropped, and computed again when "
                "needed; check the disk",
                self._folder.path, name, error.strerror or error,
            )  # fmt: skip

    def _enter(self, record: Record) -> None:
        if record.header.sealed and not record.digests:
            self.index.add_locked(record)
        elif record.digests or record.open(None):
            self.index.add(record)

    def _enforce_limit(self) -> None:
        """Evict until the limit holds: after a failed eviction, or with a lower limit."""
        while self.segments and self.occupied() + self.max_segment_bytes > self._limit_bytes:
            active = self._active
            room = self.max_segment_bytes - active.end if active else 0
            self._evict(*(self._choice(room) or (self.segments[0], [])))

    def _segment_for(self, size: int, may_copy: float) -> Segment:
        self._enforce_limit()
        active, whole = self._active, self.max_segment_bytes
        if active is not None and active.end + size <= whole:
            return active
        choice, room = None, whole - ALIGNMENT - size
        is_last = self.occupied() + 2 * whole > self._limit_bytes
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
        """Return the segment to evict, and what to copy of it; None if no segment's leases fit."""
        older = {x: partial(self._live, x) for x in self.segments if x is not self._active}
        max_copied = int(min(room, (1 - MIN_SHARE) * self.max_segment_bytes, may_copy))
        now_s, known = self._clock(), dict[Record, Rank]()
        rank = partial(self.index.rank, now_s=now_s, known=known)
        return choose_eviction(older, room, max_copied, now_s, rank)

    def _live(self, segment: Segment) -> list[Record]:
        """Return the records of a segment that look-ups can find, roots first."""
        live = filter(self.index.is_live, segment.records)
        return sorted(live, key=lambda record: record.header.first_block)

    def _evict(self, victim: Segment, kept: list[Record]) -> None:
        """Copy records to the active segment, then remove their segment."""
        self.commit()
        try:
            self.overwrite(victim)
        except OSError as error:
            logger.warning("%s is removed before it was overwritten: %s", victim.name, error)
        copies = [(x, self._copy(x, content)) for x in kept if (content := self._content(x))]
        if copies and self._active is not None:
            self._active.sync()
            for old, new in copies:
                self.index.remove(old)
                self._active.records.append(new)
                self._enter(new)
        live = self._live(victim)
        for record in live:
            self.index.remove(record)
        self.num_evicted += len(live)
        self._remove(victim)

    def _remove(self, segment: Segment) -> None:
        self._folder.remove(segment.name)
        self.segments.remove(segment)
        if segment is self._active:
            self._active = None
        segment.close()

    def _content(self, record: Record) -> bytearray | None:
        """Read the blocks of a record that is to be copied; None if the medium cannot."""
        header, segment = record.header, record.segment
        assert segment is not None, "a segment is evicted once"
        content = bytearray(header.record_bytes - header.header_bytes)
        try:
            size = segment.file.read(memoryview(content), record.offset + header.header_bytes)
            if size < len(content):
                raise OSError(errno.EIO, "it is shorter than its records")
        except OSError as error:
            self._warn_unreadable(segment.name, error)
            self.damage.append((segment.name, record.offset, record.size))
            return None
        return content

    def _copy(self, record: Record, blocks: bytearray) -> Record:
        """Append a copy of a record to the active segment; neither durable nor findable yet."""
        active, header = self._active, record.header
        assert active is not None, "a segment is open while another is evicted"
        fresh = header.copy_for(active.seed, active.durable, record.lease)
        offset = self._write(active, [fresh, blocks], header)
        return replace(record, segment=active, offset=offset, num_indexed=0)

    def _write(self, segment: Segment, buffers: list[Buffer], header: RecordHeader) -> int:
        """Append a record to a segment; returns its offset there."""
        offset = segment.append(buffers, header.record_bytes)
        self.written_bytes += header.total_bytes
        self.budget.spend(header.total_bytes)
        return offset
