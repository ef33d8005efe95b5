"""Cost-aware: evicts what is the cheapest to compute again, for as often as it is used."""

from dataclasses import dataclass

from ostinato.cache.block import CacheEntry
from ostinato.eviction.leaf_heap import LeafHeap, LeafState, Rank

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

    def released(self, entry: CacheEntry) -> None:
        """Note the age of its release."""
        self.state(entry).age = self._age

    def rank(self, entry: CacheEntry) -> Rank:
        """Rank by age, use and cost, then by release."""
        cost = 1.0 + _ATTENTION_PER_BLOCK * entry.run_from(entry.num_blocks)[0]
        return (self.state(entry).age + entry.uses * cost, entry.idle_tick)

    def evicted(self, entry: CacheEntry, num_blocks: int) -> None:
        """Let the age rise."""
        self._age = max(self._age, self.rank(entry)[0])
