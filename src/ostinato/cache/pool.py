"""The block pool: a fixed number of blocks, and which of them are given away next.

::

    all blocks = unused + evictable + held + private

Unused blocks have no content; cached entries that no request holds are in the eviction policy;
both are free to be given away, unused blocks first. ``shares`` says who may take from whom. The
pool counts; what content is, its index knows.
"""

from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from ostinato.cache.block import CacheEntry
from ostinato.cache.block_table import BlockTable
from ostinato.cache.eviction import BlockShares, RequestSummary
from ostinato.cache.observer import CacheObserver, Eviction, EvictionCause
from ostinato.cache.prefix_index import CachedRun, Removal
from ostinato.core.ids import BlockId


class Contents(Protocol):
    """What knows the content of the pool's blocks: an index, or a window group."""

    def evict(self, entry: CacheEntry, most: int) -> Removal:
        """Remove up to ``most`` blocks of an evictable leaf."""

    def runs(self) -> Iterator[CachedRun]:
        """Walk everything published; for inspection."""


class BlockPool:
    """A fixed number of blocks.

    Attributes:
        num_blocks: All blocks.
        shares: Keeps the evictable ones.
        num_allocated: Blocks given away so far.
        now: The clock.
    """

    def __init__(
        self,
        num_blocks: int,
        shares: BlockShares,
        clock: Callable[[], float],
        observers: Sequence[CacheObserver],
        group: int = 0,
    ) -> None:
        """Make a pool in which every block is unused.

        Observers are told of evictions, and in group 0 of reuse. The clock's seconds never fall.
        """
        self.num_blocks = num_blocks
        self.shares = shares
        self.num_allocated = 0
        self.now = clock
        self._observers = observers
        self._group = group
        self._tick = 0
        self._unused = array("i", range(num_blocks - 1, -1, -1))  # given away from the end on

    @property
    def num_unused(self) -> int:
        """Blocks without content."""
        return len(self._unused)

    @property
    def num_evictable(self) -> int:
        """Cached blocks that no request holds."""
        return self.shares.num_evictable

    @property
    def num_free(self) -> int:
        """Blocks that could be given away."""
        return self.num_unused + self.num_evictable

    def num_free_for(self, tenant: bytes) -> int:
        """Blocks that a tenant could be given now."""
        return self.num_unused + self.shares.num_takeable(tenant)

    # --- blocks of tables ---

    def take(self, table: BlockTable, num_blocks: int, contents: Contents) -> "array[int]":
        """Take private blocks for a table; the caller knows that enough are free for its tenant."""
        tenant, taken = table.tenant, array("i")
        while len(taken) < num_blocks:
            most = num_blocks - len(taken)
            victim, cause = self._next_victim(tenant, most)
            if victim is None:
                blocks = self._unused[: -most - 1 : -1]
                assert blocks, "more is taken than num_free_for tells"
                del self._unused[-len(blocks) :]
            else:
                most = min(most, self.shares.takeable(victim, tenant))
                blocks = self._evict(victim, most, cause, table, contents)
            self.num_allocated += len(blocks)
            self.shares.charge(tenant, len(blocks))
            taken.extend(blocks)
        return taken

    def free(self, blocks: "array[int]", tenant: bytes | None) -> None:
        """Free private blocks, in token order; they are given away tail first.

        The tenant is the one they were charged to; None if they are charged no more.
        """
        self._unused.extend(blocks)
        if tenant is not None:
            self.shares.charge(tenant, -len(blocks))

    def evict(
        self, entry: CacheEntry, cause: EvictionCause, table: BlockTable | None, contents: Contents
    ) -> int:
        """Evict all of an evictable leaf for no new content; return how many blocks became free."""
        count = entry.num_blocks
        while entry.num_blocks:
            self.free(self._evict(entry, entry.num_blocks, cause, table, contents), None)
        return count

    def enforce_quota(self, table: BlockTable, contents: Contents) -> None:
        """Evict a tenant's own blocks while it keeps more than its quota."""
        while (victim := self.shares.quota_victim(table.tenant, 0)) is not None:
            self.free(self._evict(victim, 1, "quota", table, contents), None)

    def remove(self, belongs: Callable[[CacheEntry], bool], contents: Contents) -> int:
        """Free every evictable block whose entry matches, and forget it; return how many."""
        count, waiting = 0, [entry for entry in self.entries() if belongs(entry)]
        while waiting:  # once, as a rule: what was released longest ago is a leaf
            inner: list[CacheEntry] = []
            for entry in waiting:
                if entry.is_leaf:
                    count += self.evict(entry, "removed", None, contents)
                else:
                    inner.append(entry)
            assert len(inner) < len(waiting), "what is removed has descendants that are not"
            waiting = inner[::-1]  # a chain that came root first goes in the second round
        for policy in self.shares.policies():
            policy.forget(belongs)
        return count

    def _next_victim(
        self, tenant: bytes, num_wanted: int
    ) -> tuple[CacheEntry | None, EvictionCause]:
        """Choose the entry to evict for a tenant's next blocks; None if unused ones come first."""
        own = self.shares.quota_victim(tenant, 1) if self.shares.are_limited else None
        if own is not None:
            return own, "quota"
        return None if self._unused else self.shares.victim(tenant, num_wanted), "space"

    def _evict(
        self,
        entry: CacheEntry,
        most: int,
        cause: EvictionCause,
        table: BlockTable | None,
        contents: Contents,
    ) -> "array[int]":
        removal = contents.evict(entry, most)
        if self._observers:
            eviction = Eviction(cause, entry, removal, table, self._group)
            for observer in self._observers:
                observer.on_evict(eviction)
        return removal.blocks

    # --- what indexes tell of their entries ---

    def hold(self, entries: Sequence[CacheEntry]) -> None:
        """Count one more holder of entries of one sequence."""
        idle = [entry for entry in entries if not entry.ref_count]
        for entry in entries:
            entry.ref_count += 1
        if not idle:
            return
        self.shares.remove(idle)
        for entry in idle:
            entry.uses += 1
        for observer in () if self._group else self._observers:
            observer.on_reuse(idle, self.num_allocated)

    def release(self, entries: Sequence[CacheEntry], summary: RequestSummary | None = None) -> None:
        """Count one holder less of entries of one sequence, tail first; without any they are idle.

        The summary is of the request that held them; None if it was no request.
        """
        idle = []
        for entry in entries:
            count = entry.ref_count = entry.ref_count - 1
            assert count >= 0, "released more often than acquired"
            if not count:
                idle.append(entry)
        if idle:
            now_s, moment, tick = self.now(), self.num_allocated, self._tick
            for entry in idle:
                tick += 1
                entry.idle_tick, entry.idle_since_s, entry.idle_allocated = tick, now_s, moment
            self._tick = tick
            self.shares.add(idle, summary)

    def split(self, tail: CacheEntry, head: CacheEntry) -> None:
        """Note that an entry was split; block counts stay."""
        head.idle_tick, head.idle_since_s = tail.idle_tick, tail.idle_since_s
        head.idle_allocated, head.uses = tail.idle_allocated, tail.uses
        if not tail.ref_count:
            self.shares.policy_of(tail.identity.owner).split(tail, head)

    def shrink(self, entry: CacheEntry, num_blocks: int) -> None:
        """Note that an evictable entry is about to lose its last blocks."""
        self.shares.shrink(entry, num_blocks)
        self.shares.charge(entry.identity.owner, -num_blocks)

    def expose(self, entry: CacheEntry) -> None:
        """Note that nothing builds on an entry any more, or on this copy of it."""
        if not entry.ref_count:
            self.shares.policy_of(entry.identity.owner).expose(entry)

    # --- for pictures and checks ---

    def entries(self) -> Iterator[CacheEntry]:
        """Walk all evictable entries, those released longest ago first."""
        entries = [entry for policy in self.shares.policies() for entry in policy]
        return iter(sorted(entries, key=lambda entry: entry.idle_tick))

    def free_order(self) -> Iterator[BlockId]:
        """Walk all free blocks in the order in which they would be given away under LRU."""
        yield from map(BlockId, reversed(self._unused))
        for entry in self.entries():
            yield from map(BlockId, reversed(entry.blocks))

    def check(self, owned: Sequence[int]) -> None:
        """Assert that counts and lists agree, and that each block is unused or owned, once."""
        self.shares.check(self.num_blocks - self.num_unused)
        everything, free = sorted([*owned, *self._unused]), list(self.free_order())
        assert everything == list(range(self.num_blocks)), "a block has two owners or none"
        assert len(free) == len(set(free)), f"a block is free twice: {free}"
        assert len(free) == self.num_free, f"{len(free)} free blocks, {self.num_free} counted"
