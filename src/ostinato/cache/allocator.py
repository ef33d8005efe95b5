"""How are blocks taken for somebody, and taken back from whoever kept too many?

One per group of layers; the order in which blocks are taken is the pool's.
"""

from array import array
from collections.abc import Callable
from typing import Protocol

from ostinato.cache.block import CacheEntry
from ostinato.cache.journal import Journal
from ostinato.cache.pool import BlockPool
from ostinato.cache.prefix_index import Forgotten
from ostinato.core.identity import Identity


class Evicts(Protocol):
    """Whoever can forget cached content: an index, or a window group."""

    def evict(self, entry: CacheEntry, most: int) -> Forgotten:
        """Forget up to ``most`` blocks of an evictable leaf."""


class Allocator:
    """Takes free blocks of one group, evicting what they hold."""

    def __init__(self, pool: BlockPool, index: Evicts, journal: Journal, group: int) -> None:
        """Serve one group."""
        self.pool = pool
        self._index = index
        self._journal = journal
        self._group = group

    def num_free_for(self, tenant: bytes) -> int:
        """Blocks that a tenant could be given now."""
        return self.pool.num_free_for(self.pool.accounts.of(tenant))

    def take(self, identity: Identity, num_blocks: int) -> "array[int]":
        """Take blocks for an identity's tenant; the caller knows that enough are free for it.

        Returns:
            Ids, private to the caller.
        """
        plain = self.pool.take_plainly(num_blocks)
        if plain is not None:
            return plain
        account, blocks = self.pool.accounts.of(identity.owner), array("i")
        while len(blocks) < num_blocks:
            most = num_blocks - len(blocks)
            victim = self.pool.next_victim(account, most)
            if victim is None:
                taken = self.pool.take_scratch(most)
            else:
                takeable = min(most, self.pool.num_takeable(victim, account))
                taken = self._evict(victim, takeable)
            self.pool.charge(account, len(taken))
            blocks.extend(taken)
        return blocks

    def give_back(self, tenant: bytes, blocks: "array[int]") -> None:
        """Make a tenant's private blocks scratch."""
        self.pool.give_scratch(blocks, self.pool.accounts.of(tenant))

    def trim(self, tenant: bytes) -> None:
        """Evict a tenant's own blocks while it keeps more than its quota."""
        account = self.pool.accounts.of(tenant)
        while account.num_over_quota and (victim := account.policy.victim()) is not None:
            self._scrap(self._evict(victim, account.num_over_quota), victim)

    def forget(self, belongs: Callable[[CacheEntry], bool]) -> int:
        """Make every evictable block scratch whose entry belongs to something.

        Returns:
            The number of blocks.
        """
        count = 0
        waiting = [entry for entry in self.pool.entries() if belongs(entry)]
        while waiting:  # once, as a rule: what was released longest ago is a leaf
            inner: list[CacheEntry] = []
            for entry in waiting:
                if entry.is_leaf:
                    count += self._forget(entry)
                else:
                    inner.append(entry)
            assert len(inner) < len(waiting), "what is forgotten has descendants that are not"
            waiting = inner[::-1]  # a chain that came root first goes in the second round
        self.pool.past.forget(belongs)
        return count

    def _forget(self, entry: CacheEntry) -> int:
        count, num_blocks = 0, entry.num_blocks
        while count < num_blocks:
            evicted = self._index.evict(entry, num_blocks - count)
            self._journal.forgotten(self.pool, entry, evicted, self._group)
            self._scrap(evicted.blocks, entry)
            count += len(evicted.blocks)
        return count

    def _evict(self, victim: CacheEntry, most: int) -> "array[int]":
        evicted = self._index.evict(victim, most)
        self._journal.evicted(self.pool, victim, evicted, self._group)
        return evicted.blocks

    def _scrap(self, blocks: "array[int]", entry: CacheEntry) -> None:
        """Make evicted blocks scratch: they are charged to nobody any more."""
        account = self.pool.accounts.of(entry.identity.owner)
        account.num_charged += len(blocks)  # give_scratch takes them off again
        self.pool.give_scratch(blocks, account)
