"""Writes prefixes to tiers: those used twice, leased ones, and what may soon be evicted.

::

    second use ─┐
    lease ──────┼─► queue ──► copied out, a few MiB a step ──► checksummed and written
    pressure ───┘             (between steps)                  (thread)
    shutdown ──► all leaves, the most used first, as far as the disk holds them

Blocks are marked when they are copied out, so that a prefix that many share is written once.

Rules:

1. The engine never waits for a medium: what does not fit the staging memory is copied out later.
2. Copying and writing take at most ``SHARE`` of the processors' time while requests run.
3. Nothing is pinned or counted for it: the cache behaves the same with and without tiers.
"""

import logging
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for_futures
from dataclasses import dataclass, replace
from itertools import dropwhile, pairwise
from math import inf
from typing import Literal

from ostinato.cache.block_table import BlockTable
from ostinato.cache.manager import CacheManager
from ostinato.cache.observer import CacheObserver, Eviction
from ostinato.cache.prefix_index import PrefixMatch, Removal
from ostinato.core.identity import Identity, PrefixKey
from ostinato.core.request import RequestContext
from ostinato.engine.tiers.events import TierEvents
from ostinato.engine.tiers.groups import TierGroup
from ostinato.engine.tiers.open_tiers import OpenTiers
from ostinato.engine.tiers.prefixes import NamespaceOf, cached_paths, prefix_of
from ostinato.engine.tiers.threads import TierThreads
from ostinato.tiers.port import Extent, StoreResult, TierStats
from ostinato.tiers.retention import ReuseClass, remember_for_tier, reuse_class

logger = logging.getLogger("ostinato")

EXTENT_BYTES = 15 << 19
"""A record on the medium: long enough for full speed, short enough for a core's cache."""

EXTENT_BLOCKS = 64
"""Blocks of a record at most, if they are small."""

STAGING_BYTES = 32 << 20
"""Memory for copies that are being written."""

SHARE = 0.0125
"""Of the processors' time, for storing while requests run."""

MAX_CREDIT_S = 0.1
"""Processor time that may be accumulated for it."""

FILL_SHARE = 0.75
"""Of the smallest disk, for everything that is cached: more would evict what was written first."""

MAX_WAITING = 4096
"""Prefixes that wait to be written; of more, the oldest are not written."""

LOW_UNUSED = 0.125
"""Share of unused blocks below which what ended requests leave is written as well."""

GRACE_S = 1.0
"""How long closing waits for each thread that is in the middle of a call."""

PAUSES_S = {
    StoreResult.BUDGET: 60.0,
    StoreResult.FULL: 10.0,
    StoreResult.READ_ONLY: 10.0,
    StoreResult.OFF: 10.0,
    StoreResult.IO: 10.0,
    StoreResult.BUSY: 0.1,
}
"""For how long nothing is copied out after a refusal."""


@dataclass(frozen=True, slots=True)
class _Pending:
    """A prefix that is to be written."""

    key: PrefixKey  # the sequence
    num_tokens: int  # its first tokens, in whole blocks
    keep_until: float = 0.0  # wall-clock end of its lease; 0 without one
    refresh_s: float = 0.0  # how long each use keeps it from then on; 0 if uses do not move the end
    group: int = 0  # the group of layers whose turn it is
    first_block: int = 0  # of its blocks, those before are written, or of a public prefix


class TierStores(CacheObserver):
    """Prefixes that wait to be written, and the writer."""

    def __init__(self, block_size: int) -> None:
        """Observe a cache; call ``open`` before its first request."""
        self.results: dict[StoreResult, int] = {}  # extents that were written or refused
        self.num_left_out = 0  # prefixes that were not written because too many waited
        self.copied_bytes, self.copy_s = 0, 0.0  # out of the pool, in the engine's thread
        self.write_s = 0.0  # processor time of checksums and writing
        self.tier_stats: tuple[TierStats, ...] = ()  # as last seen by the writer
        self.events = TierEvents()
        self._size = block_size
        self._waiting: deque[_Pending] = deque()
        self._marked = defaultdict[int, set[int]](set)
        # By the number of their pool: blocks that are stored or being written.
        self._used: deque[tuple[PrefixKey, int, ReuseClass]] = deque(maxlen=MAX_WAITING)
        self._prompts: deque[tuple[PrefixKey, int]] = deque(maxlen=MAX_WAITING)
        # Where prompts ended: windows are written before these as well as before cached ends.
        self._running: Future[None] | None = None
        self._credit_s = MAX_CREDIT_S
        self._pressure: Literal["none", "new", "known"] = "none"
        self._paused_until_s = 0.0
        self._fill_bytes = self._max_tokens = inf
        self._is_open = self._is_refreshing = self._is_reporting = self._has_images = False

    def open(
        self,
        opened: OpenTiers,
        manager: CacheManager,
        namespace_of: NamespaceOf,
        is_erased: Callable[[Identity], bool],
    ) -> None:
        """Start to write the content of the pool's blocks to a tier, unless it is being erased."""
        self._is_erased = is_erased
        self._tier, self._groups, self._manager = opened.tier, opened.groups, manager
        self._namespace_of = namespace_of
        width = self._groups.bytes_per_block
        self._longest = min(EXTENT_BYTES, opened.max_extent_bytes)
        num_bytes = max(STAGING_BYTES, self._longest, self._groups.largest_block_bytes)
        self._staging = self._groups.groups[0].copies.new_buffer(num_bytes)
        self._writer = TierThreads("ostinato-tier-write")
        self._is_open = True
        seen = self._tier.stats()
        self.fastest = seen[0].tier  # looked up first
        self.outlives_process = any(stats.tier != "host" for stats in seen)
        limit = max(stats.limit_bytes for stats in seen)
        remember_for_tier(manager.pool.shares.policies, limit // width)
        lasting = [x.limit_bytes for x in seen if x.tier != "host" and x.limit_bytes]
        if smallest := min(lasting or [x.limit_bytes for x in seen]):
            self._fill_bytes = int(FILL_SHARE * smallest)
            self._max_tokens = self._groups.longest_prefix(self._fill_bytes)
        self.refresh_stats()

    # --- events of the cache ---

    def on_admit(self, table: BlockTable, context: RequestContext) -> None:
        """A prefix is used a second time."""
        num_blocks = table.num_shared_tokens // self._size
        self._has_images |= bool(table.key.images)
        if num_blocks and table.writes and not self._is_written(table, num_blocks):
            self._queue(_Pending(table.key, table.num_shared_tokens))

    def on_release(
        self, table: BlockTable, num_tokens: int, num_findable: int, sealed: bool
    ) -> None:
        """The blocks of an ended request may be evicted before a second use."""
        pool, whole = self._manager.pool, num_findable // self._size
        if whole:
            policy = pool.shares.policy_of(table.tenant)
            used = table.key, whole * self._size, reuse_class(policy, table.summary)
            self._used.append(used)
        prompt_end = num_tokens - table.summary.num_output_tokens - 1  # the last is computed
        prompt_end -= prompt_end % self._size
        if 0 < prompt_end < whole * self._size and self._is_open and self._groups.sparse:
            self._prompts.append((table.key, prompt_end))
        if pool.num_unused >= LOW_UNUSED * pool.num_blocks:
            self._pressure = "none"
        elif self._pressure == "none":
            self._pressure = "new"  # everything that is cached is to be written
        elif whole and table.writes and table.blocks[whole - 1] not in self._marked[0]:
            self._queue(_Pending(table.key, whole * self._size))

    def on_evict(self, eviction: Eviction) -> None:
        """Blocks get other content."""
        self._marked[eviction.group].difference_update(eviction.removal.blocks)

    def on_retract(self, table: BlockTable, removal: Removal, group: int = 0) -> None:
        """Blocks were not computed."""
        self._marked[group].difference_update(removal.blocks)

    def on_clear(self, everything: bool) -> None:
        """Waiting prefixes are gone, or were removed on purpose."""
        self._waiting.clear()
        self._used.clear()
        self._prompts.clear()
        if everything:
            self._marked.clear()
            self.events.clear()

    def mark(self, key: PrefixKey, start: int, stop: int) -> None:
        """Note that cached tokens of a sequence were loaded, and need not be written."""
        match = self._manager.match(key, stop)
        self._marked[0].update(match.blocks[start // self._size :])
        for group in self._groups.sparse if match.num_tokens == stop else ():
            kept = self._groups.kept(group, self._manager, key, match)
            needed = group.needed(stop, start)
            self._marked[group.number].update(block for place, block in kept if place in needed)

    def _is_written(self, table: BlockTable, num_blocks: int) -> bool:
        """Whether tiers have all that a hit of a table's first blocks needs, or get it now."""
        if table.blocks[num_blocks - 1] not in self._marked[0]:
            return False
        for group in self._groups.sparse if self._is_open else ():
            match = self._manager.match(table.key, num_blocks * self._size)
            kept = self._groups.kept(group, self._manager, table.key, match)
            if not self._marked[group.number].issuperset(block for _, block in kept):
                return False
        return True

    def _queue(self, pending: _Pending) -> None:
        if not self._is_open:
            return
        if pending.num_tokens > self._max_tokens:  # its tail would evict its beginning
            pending = replace(pending, num_tokens=int(self._max_tokens))
        if len(self._waiting) >= MAX_WAITING:
            self._waiting.popleft()
            self.num_left_out += 1
        self._waiting.append(pending)

    # --- calls of the engine ---

    @property
    def num_waiting(self) -> int:
        """Prefixes that wait to be written."""
        return len(self._waiting)

    def lease(self, key: PrefixKey, num_tokens: int, keep_until: float, refresh_s: float) -> None:
        """Write a leased prefix before all others, with the end of its lease."""
        self.set_lease_end(key, num_tokens, keep_until, refresh_s)
        self._waiting.appendleft(_Pending(key, num_tokens, keep_until, refresh_s))

    def set_lease_end(
        self, key: PrefixKey, num_tokens: int, keep_until: float, refresh_s: float = 0.0
    ) -> None:
        """Set the end of the lease of a written prefix; 0 ends it."""
        for group in self._groups.groups:
            prefix = prefix_of(key, num_tokens, group, self._namespace_of)
            self._writer.submit(_logged, self._tier.lease, prefix, keep_until, refresh_s)

    def refresh_stats(self) -> None:
        """Have the writer read the tiers' counts: a medium may be slow to answer."""
        if not self._is_refreshing:
            self._is_refreshing = True
            self._writer.submit(_logged, self._read_stats)

    def add_credit(self, busy_s: float, num_threads: int) -> None:
        """Add a step's share of processor time for storing."""
        self._credit_s = min(MAX_CREDIT_S, self._credit_s + busy_s * num_threads * SHARE)

    def pump(self, is_idle: bool = False) -> bool:
        """Copy a prefix out, if the writer is free; returns whether there is more to do.

        While no request runs (``is_idle``), rule 2 does not apply.
        """
        if self._running is not None and not self._running.done():
            return True
        self._running = None
        if self._used and not self._is_reporting:
            self._is_reporting = True
            self._writer.submit(_logged, self._report_uses)
        if self._pressure == "new":
            self._pressure = "known"
            self.queue_everything()
        may_copy = is_idle or self._credit_s > 0
        if not self._waiting or not may_copy or time.monotonic() < self._paused_until_s:
            return False
        pending = self._waiting.popleft()
        identity = pending.key.identity
        if identity.epoch == self._manager.epoch and not self._is_erased(identity):
            self._copy_out(pending)
        return True

    def wait(self, seconds: float) -> None:
        """Wait for the writer, while there is nothing else to do."""
        if self._running is not None:
            wait_for_futures([self._running], seconds)

    def flush(self, seconds: float) -> None:
        """Write all waiting prefixes, for ``seconds`` at most."""
        end_s = time.monotonic() + seconds
        while time.monotonic() < end_s and self.pump(is_idle=True):
            self.wait(end_s - time.monotonic())
        self.wait_until_written(max(GRACE_S, end_s - time.monotonic()))
        self._warn_of_unwritten()
        self._waiting.clear()

    def _warn_of_unwritten(self) -> None:
        """Log how many blocks are neither written nor being written."""
        blocks = set[int]()
        for one in self._waiting:
            blocks.update(self._manager.match(one.key, one.num_tokens).blocks)
        is_running = self._running is not None and not self._running.done()
        if num_left := len(blocks - self._marked[0]):
            states = [f"{x.tier} is {x.state}" for x in self.tier_stats if x.state != "on"]
            logger.warning(
                "%d cached blocks of %d tokens are not written to the tiers%s: %s",
                num_left, self._size, ", nor what is being written" if is_running else "",
                ", ".join(states) or "the time was over",
            )  # fmt: skip
        elif is_running:
            logger.warning("what is being written to the tiers takes too long, and is left out")

    def wait_until_written(self, seconds: float | None = None) -> None:
        """Wait until the writer has nothing left to do."""
        wait_for_futures([self._writer.submit(bool)], seconds)

    def erase(self, tenant: bytes) -> Future[None]:
        """Write nothing more of a tenant; the result is there when nothing is being written."""
        waiting = [one for one in self._waiting if not one.key.identity.belongs_to(tenant)]
        used = [one for one in self._used if not one[0].identity.belongs_to(tenant)]
        prompts = [one for one in self._prompts if not one[0].identity.belongs_to(tenant)]
        self._waiting, self._used = deque(waiting), deque(used, MAX_WAITING)
        self._prompts = deque(prompts, MAX_WAITING)
        self._running = self._writer.submit(self._wipe)
        return self._running

    def _wipe(self) -> None:
        self._staging[:] = bytes(len(self._staging))

    def queue_everything(self) -> None:
        """Queue what is cached, the most used and the last used first, as far as tiers hold it."""
        paths = cached_paths(self._manager, self._has_images, self._groups, self._fill_bytes)
        paths = paths[: MAX_WAITING - len(self._waiting)]
        for key in paths:
            self._queue(_Pending(key, len(key)))
        prompts, match = list(self._prompts), self._manager.match
        self._prompts.clear()
        queued = set[int]()
        for key in paths if prompts else ():
            queued.update(match(key, len(key)).blocks)
        num_free = MAX_WAITING - len(self._waiting)
        for key, num_tokens in prompts[-num_free:] if num_free else ():
            if not queued.isdisjoint(match(key, num_tokens).blocks[-1:]):
                self._queue(_Pending(key, num_tokens))

    def close(self, seconds: float) -> None:
        """End the thread, unless it hangs for so long."""
        self.wait_until_written(seconds)
        self._writer.close(seconds)

    # --- copying and writing ---

    def _read_stats(self) -> None:
        self._is_refreshing = False
        self.tier_stats = tuple(self._tier.stats())

    def _report_uses(self) -> None:
        """Report to the tiers what requests used, in the writer's thread: it takes digests."""
        self._is_reporting = False
        used, self._used = self._used, deque(maxlen=MAX_WAITING)
        for key, num_tokens, reuse in used:
            for group in self._groups.groups:
                self._tier.use(prefix_of(key, num_tokens, group, self._namespace_of), reuse)

    def _copy_out(self, pending: _Pending) -> None:
        """Copy as much of a prefix as fits the staging memory, and queue it for the writer."""
        begun_s = time.perf_counter()
        match = self._manager.match(pending.key, pending.num_tokens)
        if not self._groups.groups[0].is_full:  # they have no bytes, and list prefixes
            self._marked[0].update(match.blocks)
        unwritten = self._unwritten(pending, match)
        while not unwritten:
            pending = replace(pending, group=pending.group + 1, first_block=0)
            if pending.group >= len(self._groups.groups):
                return
            unwritten = self._unwritten(pending, match)
        group = self._groups.groups[pending.group]
        width = group.copies.block_bytes
        chosen = unwritten[: max(1, len(self._staging) // width)]
        if len(chosen) < len(unwritten):
            self._waiting.appendleft(replace(pending, first_block=chosen[-1][0] + 1))
        elif pending.group + 1 < len(self._groups.groups):
            self._waiting.appendleft(replace(pending, group=pending.group + 1, first_block=0))
        prefix = prefix_of(pending.key, len(match.blocks) * self._size, group, self._namespace_of)
        every = max(1, min(EXTENT_BLOCKS, self._longest // width))
        extents = [
            prefix.extent(one, other - one, pending.keep_until, pending.refresh_s)
            for first, last in _runs([place for place, _ in chosen])
            for one, other in pairwise(cuts(first, last, every))
        ]
        blocks = [block for _, block in chosen]
        payload = self._staging[: len(blocks) * width]
        group.copies.export_blocks(blocks, payload)
        self._marked[group.number].update(blocks)
        took_s = time.perf_counter() - begun_s
        self.copied_bytes, self.copy_s = self.copied_bytes + len(payload), self.copy_s + took_s
        self._credit_s -= took_s
        self._running = self._writer.submit(self._write, extents, payload, group, blocks)

    def _unwritten(self, pending: _Pending, match: PrefixMatch) -> list[tuple[int, int]]:
        """List place and block of what a group has yet to write of a matched prefix."""
        group = self._groups.groups[pending.group]
        marked = self._marked[group.number]
        num_public = pending.key.identity.num_public_tokens
        first = max(pending.first_block, num_public // group.unit)
        kept = self._groups.kept(group, self._manager, pending.key, match)
        kept = [one for one in kept if one[0] >= first]
        if pending.keep_until:
            return kept
        if group.is_full:
            return list(dropwhile(lambda one: one[1] in marked, kept))
        return [one for one in kept if one[1] not in marked]

    def _write(
        self, extents: list[Extent], payload: memoryview, copied: TierGroup, blocks: list[int]
    ) -> None:
        """Write a group of extents, in the writer's thread."""
        begun_s, group, start = time.thread_time(), [], 0
        for extent in extents:
            group.append((extent, payload[start : start + extent.payload_bytes]))
            start += extent.payload_bytes
        try:
            results = self._tier.store(group)
        except Exception:
            logger.exception("a store to the tiers failed")
            results = [StoreResult.IO] * len(group)
        for result in results:
            self.results[result] = self.results.get(result, 0) + 1
            if (pause_s := PAUSES_S.get(result)) is not None:
                self._paused_until_s = time.monotonic() + pause_s
                self._marked[copied.number].difference_update(blocks)
        took_s = time.thread_time() - begun_s
        self.write_s += took_s
        self._credit_s -= took_s
        if not {StoreResult.STORED, StoreResult.PRESENT}.issuperset(results):
            self._read_stats()  # the tier may be read-only now


def cuts(first: int, last: int, every: int) -> list[int]:
    """Return where a run of blocks is cut: at both ends, and at multiples of ``every``."""
    return [first, *range((first // every + 1) * every, last, every), last]


def _runs(places: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Cut ascending places into runs without a gap, each with its first and its end."""
    first = 0
    for index in range(1, len(places) + 1):
        if index == len(places) or places[index] != places[index - 1] + 1:
            yield places[first], places[index - 1] + 1
            first = index


def _logged(call: Callable[..., object], *args: object) -> None:
    try:
        call(*args)
    except Exception:
        logger.exception("a call of the tiers failed")
