"""Takes blocks of one pool for a table, evicting what they hold; one per group of layers."""

from array import array
from collections.abc import Callable, Iterable
from typing import Protocol

from ostinato.cache.block import CacheEntry
from ostinato.cache.block_table import BlockTable
from ostinato.cache.observer import Eviction, Observers
from ostinato.cache.pool import BlockPool
from ostinato.cache.prefix_index import Removal


class Evicts(Protocol):
    """What holds cached content: an index, or a window group."""

    def evict(self, entry: CacheEntry, most: int) -> Removal:
        """Remove up to ``most`` blocks of an evictable leaf."""


class Allocator:
    """Allocates, evicts and frees the blocks of one group."""

    def __init__(self, pool: BlockPool, index: Evicts, observers: Observers, group: int) -> None:
        """Serve one group."""
        self.pool = pool
        self._index = index
        self._on_evict = observers.on_evict
        self._group = group

    def take(self, table: BlockTable, num_blocks: int) -> "array[int]":
        """Take blocks for a table; the caller knows that enough are free for its tenant.

        Returns:
            Ids, private to the caller.
        """
        pool, tenant = self.pool, table.tenant
        taken = pool.take_free(num_blocks, tenant)
        if taken is not None:
            return taken
        blocks = array("i")
        while len(blocks) < num_blocks:
            most = num_blocks - len(blocks)
            victim, is_own = pool.next_victim(tenant, most)
            if victim is None:
                taken = pool.take_some(most)
            else:
                takeable = min(most, pool.shares.takeable(victim, tenant))
                taken = self._evict(victim, takeable, "quota" if is_own else "space", table)
            pool.charge(tenant, len(taken))
            blocks.extend(taken)
        return blocks

    def enforce_quota(self, table: BlockTable) -> None:
        """Evict a tenant's own blocks while it keeps more than its quota."""
        shares, tenant = self.pool.shares, table.tenant
        while excess := shares.num_over_quota(tenant):
            victim = shares.policy_of(tenant).victim()
            if victim is None:
                return
            self.pool.free(self._evict(victim, excess, "quota", table), None)

    def evict(self, entries: Iterable[CacheEntry], table: BlockTable) -> None:
        """Evict entries, descendants first, because what they build on has gone."""
        for entry in entries:
            self.pool.free(self._evict(entry, entry.num_blocks, "space", table), None)

    def remove(self, belongs: Callable[[CacheEntry], bool]) -> int:
        """Free every evictable block whose entry matches; return how many."""
        count = 0
        waiting = [entry for entry in self.pool.entries() if belongs(entry)]
        while waiting:  # once, as a rule: what was released longest ago is a leaf
            inner: list[CacheEntry] = []
            for entry in waiting:
                if not entry.is_leaf:
                    inner.append(entry)
                    continue
                while entry.num_blocks:
                    blocks = self._evict(entry, entry.num_blocks, "removed", None)
                    self.pool.free(blocks, None)
                    count += len(blocks)
            assert len(inner) < len(waiting), "what is removed has descendants that are not"
            waiting = inner[::-1]  # a chain that came root first goes in the second round
        for policy in self.pool.shares.policies():
            policy.forget(belongs)
        return count

    def _evict(
        self, entry: CacheEntry, most: int, cause: str, table: BlockTable | None
    ) -> "array[int]":
        removal = self._index.evict(entry, most)
        if self._on_evict:
            eviction = Eviction(cause, entry, removal, table, self._group)  # type: ignore[arg-type]
            for notify in self._on_evict:
                notify(eviction)
        return removal.blocks
