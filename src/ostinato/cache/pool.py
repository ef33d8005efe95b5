"""The block pool: a fixed number of blocks, and which of them are allocated next.

::

    all blocks = unused + evictable + held + private

Unused blocks have no content; the evictable ones belong to cached entries that no request holds.
Both are free to be allocated, unused blocks first. ``shares`` keeps the evictable entries in
eviction policies, and decides who may take whose. The pool counts holders; content is known to
its index alone.
"""

from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence

from ostinato.cache.block import CacheEntry
from ostinato.cache.block_table import BlockTable
from ostinato.cache.eviction import BlockShares, RequestSummary, Victim
from ostinato.cache.observer import Eviction, EvictionCause, Observers
from ostinato.cache.prefix_index import Contents
from ostinato.core.ids import BlockId


class BlockPool:
    """A fixed number of blocks; ``num_allocated`` counts all allocations so far."""

    def __init__(
        self,
        num_blocks: int,
        shares: BlockShares,
        clock: Callable[[], float],
        observers: Observers,
        group: int = 0,
    ) -> None:
        """Make a pool in which every block is unused.

        Observers see evictions, and in group 0 reuse. The clock's seconds never fall.
        """
        self.num_blocks, self.shares, self.now = num_blocks, shares, clock
        self.num_allocated = 0
        self._observers, self._group = observers, group
        self.stale_before = 0  # entries of older epochs are noted when they are released; 0: none
        self._stale: list[CacheEntry] = []
        self._tick = 0
        self._unused = array("i", range(num_blocks - 1, -1, -1))  # allocated from the end on

    @property
    def num_unused(self) -> int:
        """Blocks without content."""
        return len(self._unused)

    @property
    def num_evictable(self) -> int:
        """Cached blocks that no request holds."""
        return sum(policy.num_blocks for policy in self.shares.policies)

    @property
    def num_free(self) -> int:
        """Blocks that could be allocated."""
        return self.num_unused + self.num_evictable

    def num_free_for(self, tenant: bytes) -> int:
        """Blocks that could be allocated to a tenant now."""
        return self.num_unused + self.shares.num_takeable(tenant)

    # --- blocks of tables ---

    def allocate(self, table: BlockTable, num_blocks: int, contents: Contents) -> "array[int]":
        """Allocate private blocks for a table; the caller knows that its tenant may have them."""
        allocated, charge = array("i"), self.shares.charge if self.shares.are_limited else None
        while missing := num_blocks - len(allocated):
            victim, cause = self._next_victim(table.tenant, missing)
            if victim is None:
                blocks = self._unused[: -missing - 1 : -1]
                assert blocks, "more blocks are allocated than num_free_for allows"
                del self._unused[-len(blocks) :]
            else:
                entry, max_blocks = victim
                blocks = self._evict(entry, min(missing, max_blocks), cause, table, contents)
                if charge is not None:
                    charge(entry.identity.owner, -len(blocks))
            self.num_allocated += len(blocks)
            if charge is not None:
                charge(table.tenant, len(blocks))
            allocated.extend(blocks)
        return allocated

    def free(self, blocks: "array[int]", tenant: bytes) -> None:
        """Free private blocks of a tenant, in token order; they are allocated tail first."""
        self._unused.extend(blocks)
        if self.shares.are_limited:
            self.shares.charge(tenant, -len(blocks))

    def evict(self, entry: CacheEntry, cause: EvictionCause, contents: Contents) -> int:
        """Evict all of an evictable leaf for no new content; return how many blocks became free."""
        blocks = self._evict(entry, entry.num_blocks, cause, None, contents)
        self.free(blocks, entry.identity.owner)
        return len(blocks)

    def enforce_quota(self, table: BlockTable, contents: Contents) -> None:
        """Evict blocks of a table's tenant, one by one, while it has more than its quota."""
        while (victim := self.shares.quota_victim(table.tenant, 0)) is not None:
            self.free(self._evict(victim[0], 1, "quota", table, contents), table.tenant)

    def remove(self, belongs: Callable[[CacheEntry], bool], contents: Contents) -> int:
        """Free every evictable block whose entry matches, and forget it; return how many.

        An entry stays that one which does not match builds on (law 8).
        """
        count = self._remove([entry for entry in self.entries() if belongs(entry)], contents)
        for policy in self.shares.policies:
            policy.erase(belongs)
        return count

    def remove_stale(self, contents: Contents) -> None:
        """Free what was released since the last call, is idle and of stale weights.

        Policies may remember it until they need the room: no key of its identity is admitted.
        """
        released, self._stale = self._stale, []
        self._remove([e for e in released if e.num_blocks and not e.ref_count], contents)

    def _remove(self, waiting: list[CacheEntry], contents: Contents) -> int:
        """Evict idle entries, leaves first; return how many blocks became free."""
        count = 0
        while waiting:  # usually once: what was released longest ago is a leaf
            inner: list[CacheEntry] = []
            for entry in waiting:
                if entry.is_leaf:
                    count += self.evict(entry, "removed", contents)
                else:
                    inner.append(entry)
            # A chain that came root first goes in the second round.
            waiting = inner[::-1] if len(inner) < len(waiting) else []
        return count

    def _next_victim(self, tenant: bytes, num_needed: int) -> tuple[Victim | None, EvictionCause]:
        """Choose what to evict for a tenant's next blocks; None if unused ones come first."""
        own = self.shares.quota_victim(tenant, 1) if self.shares.are_limited else None
        if own is not None:
            return own, "quota"
        return None if self._unused else self.shares.victim(tenant, num_needed), "space"

    def _evict(
        self,
        entry: CacheEntry,
        num_blocks: int,
        cause: EvictionCause,
        table: BlockTable | None,
        contents: Contents,
    ) -> "array[int]":
        """Evict the last blocks of an evictable leaf; they are still charged to its owner."""
        self.shares.policy_of(entry.identity.owner).evict(entry, num_blocks)
        removal = contents.evict(entry, num_blocks)
        if on_evict := self._observers.on_evict:
            self._observers.call(on_evict, Eviction(cause, entry, removal, table, self._group))
        return removal.blocks

    # --- entries of indexes ---

    def acquire(self, entries: Sequence[CacheEntry]) -> None:
        """Count one more holder of entries of one sequence."""
        idle = []
        for entry in entries:
            if not entry.ref_count:
                idle.append(entry)
            entry.ref_count += 1
        if not idle:
            return
        self.shares.remove(idle)
        for entry in idle:
            entry.uses += 1
        if (on_reuse := self._observers.on_reuse) and not self._group:
            self._observers.call(on_reuse, idle, self.num_allocated)

    def release(self, entries: Sequence[CacheEntry], summary: RequestSummary | None = None) -> None:
        """Decrement the reference count of each entry, last block first; at zero it becomes idle.

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
            if self.stale_before:
                self._stale += [e for e in idle if e.identity.epoch < self.stale_before]
            self.shares.add(idle, summary)

    def split(self, tail: CacheEntry, head: CacheEntry) -> None:
        """Note that an entry was split; block counts stay."""
        head.idle_tick, head.idle_since_s = tail.idle_tick, tail.idle_since_s
        head.idle_allocated, head.uses = tail.idle_allocated, tail.uses
        if not tail.ref_count:
            self.shares.policy_of(tail.identity.owner).split(tail, head)

    def became_leaf(self, entry: CacheEntry) -> None:
        """Note that nothing builds on an entry any more, or on this copy of it."""
        if not entry.ref_count:
            self.shares.policy_of(entry.identity.owner).became_leaf(entry)

    # --- for pictures and checks ---

    def entries(self) -> Iterator[CacheEntry]:
        """Iterate over all evictable entries, least recently released first."""
        entries = [entry for policy in self.shares.policies for entry in policy]
        return iter(sorted(entries, key=lambda entry: entry.idle_tick))

    def free_order(self) -> Iterator[BlockId]:
        """Iterate over all free blocks in the order in which LRU would allocate them."""
        yield from map(BlockId, reversed(self._unused))
        for entry in self.entries():
            yield from map(BlockId, reversed(entry.blocks))

    def check(self, owned: Sequence[int]) -> None:
        """Assert that counts and lists agree, and that each block is unused or owned, once."""
        self.shares.check(self.num_blocks - self.num_unused)
        for policy in self.shares.policies:
            policy.check()
            assert policy.num_blocks == sum(entry.num_blocks for entry in policy), "miscounted"
            victim = policy.victim()
            assert victim is None or victim[0].is_leaf, "the victim has cached descendants"
        everything, free = sorted([*owned, *self._unused]), list(self.free_order())
        assert everything == list(range(self.num_blocks)), "a block has two owners or none"
        assert len(free) == len(set(free)), f"a block is free twice: {free}"
        assert len(free) == self.num_free, f"{len(free)} free blocks, {self.num_free} counted"

    def check_entries(self, entries: Sequence[CacheEntry], held: Iterable[CacheEntry]) -> None:
        """Assert that all entries have as many holders as counted, and those without are idle."""
        counted = Counter(map(id, held))
        for entry in entries:
            assert entry.ref_count == counted.pop(id(entry), 0), "references are miscounted"
        assert not counted, "an entry is held that is not published"
        idle = {id(entry) for entry in entries if not entry.ref_count}
        assert idle == set(map(id, self.entries())), "idle entries alone are evictable"
