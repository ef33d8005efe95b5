"""``DiskTier``: extents in append-only segments of one folder, on a disk or in host memory.

One thread writes at a time, and readers do not wait for it: the file of an evicted segment is
closed with its last running load. A failing medium never raises: reads miss, and after a failed
write the tier is read-only for a minute, then tries again.
"""

import errno
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from ostinato.core.errors import ConfigError
from ostinato.tiers import port
from ostinato.tiers.disk.health import DiskHealth
from ostinato.tiers.disk.index import ExtentIndex, start_of
from ostinato.tiers.disk.limits import DiskOptions
from ostinato.tiers.disk.segment_log import LogFull, SegmentLog
from ostinato.tiers.disk.segments import Record, Segment
from ostinato.tiers.encryption.sealing import Sealing
from ostinato.tiers.encryption.tenant_keys import KeyFile, folder_secret
from ostinato.tiers.folder import Folder, LocalFolder
from ostinato.tiers.record import ALIGNMENT, record_bytes
from ostinato.tiers.retention import ReuseClass

__all__ = ["DiskOptions", "DiskTier"]

logger = logging.getLogger(__name__)

CLOSED = "closed"
READ_BYTES = 1 << 20
"""Size of a reference, unless one block is larger: it is copied while still in the CPU's cache."""


@dataclass(frozen=True, slots=True)
class _Locator:
    record: Record
    first: int
    key: bytes | None


class DiskTier:
    """A tier in a folder of its own; see ``KVTier`` for the calls.

    Args:
        folder: Its path, whose mode becomes 0700; or another kind of folder.
        options: Settings.
        clock: Wall-clock time of leases and of the daily budget.
        listener: Called when extents are stored and blocks evicted.
        name: ``disk``, or ``host`` if the folder is in memory.

    Raises:
        ConfigError: The limit is too small, another process uses the folder, it holds other
            files, or it cannot be read.
    """

    def __init__(
        self,
        folder: str | Path | Folder,
        options: DiskOptions,
        clock: Callable[[], float] = time.time,
        listener: port.TierListener | None = None,
        name: str = "disk",
    ) -> None:
        self.name = name
        options.check()
        self._folder = LocalFolder(folder) if isinstance(folder, str | Path) else folder
        self._options, self._clock = options, clock
        self._setting = f"kv_disk={self._folder.path!r}" if name == "disk" else "kv_host_bytes"
        self._health = DiskHealth(self._setting)
        self._index, self._listener = ExtentIndex(), listener or port.TierListener()
        self._writing, self._counting = threading.RLock(), threading.Lock()
        self._stores, self._loads = Counter[str](), Counter[str]()
        self._loaded_bytes = 0
        try:
            keys = KeyFile(self._folder) if options.sealed else None
            self._sealing = self._open_sealing(keys)
            self._log = SegmentLog(self._folder, options, self._index, clock)
        except OSError as error:
            self._folder.close()
            raise ConfigError(
                f"{self._setting}: {error.strerror}: make it readable and "
                "writable, or leave kv_disk out"
            ) from error
        except ConfigError:
            self._folder.close()
            raise
        self._warn_of_damage()
        if keys is not None:
            self._warn_of_lost_keys(keys)

    def _warn_of_damage(self) -> None:
        """Warn of damaged durable bytes; a torn end, as a crash leaves it, is normal."""
        damage = [place for place in self._log.damage if place[-1]]
        if not damage:
            return
        name, offset, size = damage[0]
        more = len(damage) - 1
        logger.warning(
            "%s: %s is damaged, %d bytes from byte %d on%s: they are cut off or overwritten, and "
            "computed again when needed; check the disk, unless an erasure was interrupted",
            self._setting, name, size, offset, f", and {more} more places" if more else "",
        )  # fmt: skip

    def _warn_of_lost_keys(self, keys: KeyFile) -> None:
        """Warn of sealed records that no key opens."""
        if lost := self._index.drop_locked(keys.names):
            logger.warning(
                "%s: the file keys has lost the keys of %d tenants: their %d sealed records, %d "
                "bytes, are never read again, and computed again when needed; check the disk, "
                "unless an erasure was interrupted",
                self._setting, len({x.header.names[0] for x in lost}), len(lost),
                sum(x.size for x in lost),
            )  # fmt: skip

    def _open_sealing(self, keys: KeyFile | None) -> Sealing:
        if keys is None:
            return Sealing()
        secret = self._options.secret or folder_secret(self._folder, has_keys=bool(keys.names))
        return Sealing(secret, keys)

    def look_up(self, prefix: port.Prefix, start: int) -> list[port.ExtentRef]:
        """Find stored blocks that continue a prefix, without disk reads; see ``KVTier``."""
        if self._health.state == "off":
            return []
        block, size = start // prefix.namespace.block_size, prefix.namespace.block_bytes
        key, refs = self._key(prefix), list[port.ExtentRef]()
        step = max(1, READ_BYTES // size)
        for match in self._index.all_matches(prefix, block):
            record, first, count = match
            start = start_of(match) * prefix.namespace.block_size
            for skipped in range(0, count, step):
                where, part = _Locator(record, first + skipped, key), min(step, count - skipped)
                refs.append(port.ExtentRef(self.name, start, part, size, where, *record.lease[1:]))
                start += part * prefix.namespace.block_size
        if refs:
            self._index.use(prefix, start // prefix.namespace.block_size, self._clock())
        return refs

    def load(
        self, ref: port.ExtentRef, into: memoryview, num_blocks: int, deadline: float
    ) -> port.LoadResult:
        """Read and verify blocks; see ``KVTier``."""
        assert isinstance(ref.locator, _Locator), "a reference of another tier"
        segment, done, fault = ref.locator.record.segment, 0, None
        while done < min(num_blocks, ref.num_blocks) and fault is None:
            if segment is None:
                fault = port.LoadFault.STALE
            elif time.monotonic() > deadline:
                fault = port.LoadFault.DEADLINE
            else:
                place = into[done * ref.block_bytes : (done + 1) * ref.block_bytes]
                fault = self._read(segment, ref.locator, done, place)
                done += fault is None
        if ref.locator.record.erased:
            done, fault = 0, port.LoadFault.STALE
        self._count_load(ref.locator, done, fault, done * ref.block_bytes)
        return port.LoadResult(done, fault)

    def store(self, extents: Sequence[tuple[port.Extent, port.Buffer]]) -> list[port.StoreResult]:
        """Store extents as one group; see ``KVTier``."""
        with self._writing:
            ends = {id(x.prefix): (x.prefix, x.end_block) for x, _ in extents}
            used_s = 0.0
            for prefix, end in ends.values():  # keep what they continue
                used_s = self._index.use(prefix, end, self._clock())
            if not self._health.may_write():
                results = [port.StoreResult(self._health.state)] * len(extents)
            else:
                results = self._store_group(extents, used_s)
            self._stores.update(results)
            self._report(extents, results)
            return results

    def _report(
        self,
        extents: Sequence[tuple[port.Extent, port.Buffer]],
        results: Sequence[port.StoreResult],
    ) -> None:
        self._listener.on_removed(self.name, self._index.pop_removed())
        for (extent, _), result in zip(extents, results, strict=True):
            if result in (port.StoreResult.STORED, port.StoreResult.PRESENT):
                self._listener.on_stored(self.name, extent)

    def lease(self, prefix: port.Prefix, keep_until: float, refresh_s: float = 0.0) -> int:
        """Set the lease of the stored blocks of a prefix; see ``KVTier``."""
        with self._writing:
            self._key(prefix)
            matches = self._index.last_matches(prefix)
            if not self._health.may_write():
                return 0
            try:
                self._log.lease([record for record, _, _ in matches], keep_until, refresh_s)
            except OSError as error:
                self._health.write_failed(error)
                return 0
            return sum(count for *_, count in matches) * prefix.namespace.block_size

    def use(self, prefix: port.Prefix, reuse: ReuseClass) -> None:
        """Record which request used a prefix last; see ``KVTier``."""
        self._index.use(prefix, prefix.num_blocks, self._clock(), reuse)

    def erase(self, salt: bytes) -> list[port.TierReceipt]:
        """Hide a tenant's records, destroy its keys and overwrite the records; see ``KVTier``.

        Segments without other records are removed. Stores go on between two segments.
        """
        counts, is_complete = Counter[str](), True
        with self._writing:
            num_extents, segments = self._log.hide(self._sealing.name(salt))
        steps: list[tuple[str, Callable[[], int]]] = [
            ("keys", partial(self._sealing.destroy, salt)),
            *(("bytes", partial(self._log.void, segment)) for segment in segments),
            *(("bytes", partial(self._log.overwrite, segment)) for segment in segments),
            *(("bytes", partial(self._log.free, segment)) for segment in segments),
        ]
        for what, step in steps:
            try:
                with self._writing:
                    if self._health.reason == CLOSED:
                        raise OSError(errno.EBADF, CLOSED)
                    counts[what] += step()
            except OSError as error:
                is_complete = False
                self._health.write_failed(error)
        where, num_bytes = self._folder.path, counts["bytes"]
        return [
            port.TierReceipt(self.name, where, num_extents, num_bytes, counts["keys"], is_complete)
        ]

    def stats(self) -> list[port.TierStats]:
        """State and counts; see ``KVTier``. Does not wait for a running store."""
        return [
            port.TierStats(
                tier=self.name,
                where=self._folder.path,
                state=self._health.state,
                reason=self._health.reason,
                num_extents=self._index.num_records(),
                num_blocks=len(self._index),
                num_bytes=self._log.num_bytes(),
                limit_bytes=self._options.limit_bytes,
                leased_bytes=self._log.leased_bytes(),
                written_bytes=self._log.written_bytes,
                loaded_bytes=self._loaded_bytes,
                stores=dict(self._stores),
                loads=dict(self._loads),
                num_evicted=self._log.num_evicted,
                num_damaged=len(self._log.damage),
            )
        ]

    def close(self) -> None:
        """Wait for a running store, then unlock the folder."""
        with self._writing:
            self._health.turn_off(CLOSED)
            self._folder.close()

    def _key(self, prefix: port.Prefix) -> bytes | None:
        """Return the tenant's key, and open its records that were read without it."""
        key = self._sealing.key(prefix, create=False)
        if key is not None:
            self._index.unlock(self._sealing.name(prefix.tenant), key)
        return key

    def _read(
        self, segment: Segment, where: _Locator, index: int, into: memoryview
    ) -> port.LoadFault | None:
        try:
            block = where.first + index
            fault = where.record.read_block(segment.file, block, where.key, into)
        except OSError as error:
            self._health.read_failed(error, segment.name, len(self._log.segments))
            return port.LoadFault.IO
        self._health.read_succeeded()
        return fault

    def _count_load(
        self, where: _Locator, done: int, fault: port.LoadFault | None, size: int
    ) -> None:
        if fault in (port.LoadFault.SHORT, port.LoadFault.CHECKSUM, port.LoadFault.IO):
            self._index.remove(where.record, where.first + done)
        with self._counting:
            self._loads[fault or "ok"] += 1
            self._loaded_bytes += size

    def _store_group(
        self, extents: Sequence[tuple[port.Extent, port.Buffer]], used_s: float
    ) -> list[port.StoreResult]:
        results = list[port.StoreResult]()
        try:
            for extent, payload in extents:
                results.append(self._stage(extent, payload, used_s))
            self._log.commit()
        except OSError as error:
            self._log.rollback()
            self._health.write_failed(error)
            refused = port.StoreResult(self._health.state)
            done = [x if x is not port.StoreResult.STORED else refused for x in results]
            return done + [refused] * (len(extents) - len(done))
        self._health.write_succeeded()
        return results

    def _stage(self, extent: port.Extent, payload: port.Buffer, used_s: float) -> port.StoreResult:
        """Append the blocks of an extent that are not stored yet."""
        assert len(payload) == extent.payload_bytes, "a payload is all of its extent's blocks"
        key = self._key(extent.prefix)
        present = self._index.matches(extent.prefix, extent.first_block, extent.end_block)
        if skipped := sum(count for *_, count in present):
            shorter = [x for x, *_ in present if x.keep_until < extent.keep_until]
            self._log.lease(shorter, extent.keep_until, extent.refresh_s)
            if skipped >= extent.num_blocks:
                return port.StoreResult.PRESENT
            size = extent.prefix.namespace.block_bytes
            payload = memoryview(payload)[skipped * size :]
            first, count = extent.first_block + skipped, extent.num_blocks - skipped
            extent = replace(extent, first_block=first, num_blocks=count)
        size = record_bytes(extent, sealed=self._sealing.on)
        if size > self._log.max_segment_bytes - ALIGNMENT:
            return port.StoreResult.TOO_LARGE
        if not self._log.budget.allows(size):
            return port.StoreResult.BUDGET
        if self._sealing.on and key is None:
            key = self._sealing.key(extent.prefix, create=True)
            if key is None:  # another secret wrapped it
                return port.StoreResult.READ_ONLY
        try:
            self._log.append(extent, payload, self._sealing.names(extent.prefix), key, used_s)
        except LogFull:
            return port.StoreResult.FULL
        return port.StoreResult.STORED
