"""ARC: balances space between entries used once and entries used again."""

from collections.abc import Callable

from benchmarks.policies.leaf_heap import LeafHeap, LeafState
from ostinato.cache.block import CacheEntry
from ostinato.cache.eviction import RequestSummary
from ostinato.core.identity import PrefixKey
from ostinato.eviction.learned_policy import GhostList


class AdaptiveReplacement(LeafHeap[LeafState]):
    """Two LRU lists, for entries used once and used again, with an adaptive target size.

    Content that returns after it was evicted from a list moves the target in that list's favour.

    Source: Megiddo, Modha, ARC: a self-tuning, low overhead replacement cache, FAST 2003.
    """

    def __init__(self, num_blocks: int) -> None:
        """Make an empty policy for a pool of so many blocks."""
        super().__init__(LeafState, num_segments=2)
        self._num_blocks = num_blocks
        self._target = 0.0  # blocks that the first list may have
        self._memories = [GhostList[None](num_blocks) for _ in range(2)]

    def segment_of(self, entry: CacheEntry) -> int:
        """Return which list an entry joins."""
        return int(entry.uses > 1)

    def segments(self) -> tuple[int, int]:
        """Return first the list that is above its target."""
        return (0, 1) if self.segment_blocks[0] > self._target else (1, 0)

    def evicted(self, entry: CacheEntry, num_blocks: int) -> None:
        """Remember from which list it is evicted."""
        self._memories[self.state(entry).segment].put(entry, num_blocks, None)

    def recall(
        self, key: PrefixKey, first: int, most: int, block_size: int, summary: RequestSummary | None
    ) -> tuple[int, int]:
        """Move the target towards the list that lost what returns."""
        once, again = (max(1, memory.num_blocks) for memory in self._memories)
        for segment, step in ((0, max(1.0, again / once)), (1, -max(1.0, once / again))):
            run = self._memories[segment].take(key, first, most, block_size)
            if run is not None:
                moved = self._target + step * run.num_blocks
                self._target = min(float(self._num_blocks), max(0.0, moved))
                return 1, run.num_blocks
        return 0, most

    def erase(self, belongs: Callable[[CacheEntry], bool]) -> None:
        """Erase what is remembered of entries that match."""
        super().erase(belongs)
        for memory in self._memories:
            memory.erase(belongs)

    def check(self) -> None:
        """Check what is remembered as well."""
        super().check()
        for memory in self._memories:
            memory.check()
