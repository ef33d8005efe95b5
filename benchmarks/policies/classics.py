"""LFU, SLRU and cost-aware."""

from collections import OrderedDict
from dataclasses import dataclass

from benchmarks.policies.leaf_heap import LeafHeap, LeafState, Rank
from ostinato.cache.block import CacheEntry


class LeastFrequentlyUsed(LeafHeap[LeafState]):
    """Evict the leaf that was in use least often since it was published, the oldest of equals."""

    def __init__(self) -> None:
        """Make an empty policy."""
        super().__init__(LeafState)

    def rank(self, entry: CacheEntry) -> Rank:
        """Rank by use, then by release."""
        return (entry.uses, entry.idle_tick)


_PROTECTED_SHARE = 0.8


class SegmentedLru(LeafHeap[LeafState]):
    """Evict the oldest leaf that was in use once; then the oldest of the protected.

    Entries that were in use again are protected, up to 80 % of the pool; then the one released
    longest ago joins the others again.

    Source: Karedla, Love, Wherry, Caching strategies to improve disk system performance, 1994.
    """

    def __init__(self, num_blocks: int) -> None:
        """Make an empty policy for a pool of so many blocks."""
        super().__init__(LeafState, num_segments=2)
        self._most_protected = _PROTECTED_SHARE * num_blocks
        self._protected: OrderedDict[CacheEntry, None] = OrderedDict()  # segment 1

    def segment_of(self, entry: CacheEntry) -> int:
        """Return whether an entry is protected: if it was used again."""
        return int(entry.uses > 1)

    def added(self, entry: CacheEntry) -> None:
        """Protect up to 80 % of the pool."""
        if entry.uses > 1:
            self._protected[entry] = None
        while self.segment_blocks[1] > self._most_protected:
            oldest, _ = self._protected.popitem(last=False)
            self.move(oldest, 0)
            if self.state(oldest).place is not None:
                self.offer(oldest)

    def split(self, tail: CacheEntry, head: CacheEntry) -> None:
        """Take the head into its tail's segment; blocks are counted already."""
        super().split(tail, head)
        if tail in self._protected:
            self._protected[head] = None

    def removed(self, entry: CacheEntry) -> None:
        """Take an entry out of the protected ones."""
        self._protected.pop(entry, None)


_ATTENTION_PER_BLOCK = 0.01
"""Share of a block's cost that each block before it adds by attention: with 512-token blocks
of a 70B model, attention doubles the cost of a block at 50,000 tokens."""


@dataclass(slots=True)
class CostState(LeafState):
    """Note the age at which an entry was released."""

    age: float = 0.0


class CostAware(LeafHeap[CostState]):
    """Greedy-dual: evict the leaf with the least ``age + uses * cost``.

    The cost of a block grows with its depth, for its tokens attend to all before it. The age
    rises to the rank of what was evicted last, so that what was dear once does not stay for ever.

    Source: GreedyDual-Size with Frequency, Cherkasova, HPL-98-69.
    """

    def __init__(self) -> None:
        """Make an empty policy of age 0."""
        super().__init__(CostState)
        self._age = 0.0

    def added(self, entry: CacheEntry) -> None:
        """Note the age of its release."""
        self.state(entry).age = self._age

    def rank(self, entry: CacheEntry) -> Rank:
        """Rank by age, use and cost, then by release."""
        cost = 1.0 + _ATTENTION_PER_BLOCK * entry.run_from(entry.num_blocks)[0]
        return (self.state(entry).age + entry.uses * cost, entry.idle_tick)

    def evicted(self, entry: CacheEntry, num_blocks: int) -> None:
        """Let the age rise."""
        self._age = max(self._age, self.rank(entry)[0])
