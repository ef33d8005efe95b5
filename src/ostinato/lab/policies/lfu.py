"""LFU: evicts what was in use least often."""

from ostinato.cache.block import CacheEntry
from ostinato.eviction.leaf_heap import LeafHeap, LeafState, Rank


class LeastFrequentlyUsed(LeafHeap[LeafState]):
    """Evict the leaf that was in use least often since it was published, the oldest of equals."""

    def __init__(self) -> None:
        """Make an empty policy."""
        super().__init__(LeafState)

    def rank(self, entry: CacheEntry) -> Rank:
        """Rank by use, then by release."""
        return (entry.uses, entry.idle_tick)
