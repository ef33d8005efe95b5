"""LFU: which entry was in use least often?"""

from ostinato.cache.block import CacheEntry
from ostinato.cache.policies.leaf_heap import LeafHeap, Rank


class LeastFrequentlyUsed(LeafHeap):
    """Evict the leaf that was in use least often since it was published, the oldest of equals."""

    def rank(self, entry: CacheEntry) -> Rank:
        """Rank by use, then by release."""
        return (entry.uses, entry.idle_tick)
