"""ARC: balances space between entries used once and entries used again."""

from collections.abc import Callable
from dataclasses import dataclass

from ostinato.cache.block import CacheEntry
from ostinato.cache.eviction import RequestSummary
from ostinato.core.identity import PrefixKey
from ostinato.eviction.ghost_list import GhostList
from ostinato.eviction.leaf_heap import LeafHeap, LeafState


@dataclass(slots=True)
class ListState(LeafState):
    """What is noted of an entry in a list."""

    is_again: bool = False  # whether that is the list of entries used again


class AdaptiveReplacement(LeafHeap[ListState]):
    """Two LRU lists, for entries used once and used again, with an adaptive target size.

    Content that returns after it was evicted from a list moves the target in that list's favour.

    Source: Megiddo, Modha, ARC: a self-tuning, low overhead replacement cache, FAST 2003.
    """

    def __init__(self, num_blocks: int) -> None:
        """Make an empty policy for a pool of so many blocks."""
        super().__init__(ListState, num_segments=2)
        self._num_blocks = num_blocks
        self._target = 0.0  # blocks that the first list may have
        self._num_once = 0
        self._memories = [GhostList[None](num_blocks) for _ in range(2)]

    def segment(self, entry: CacheEntry) -> int:
        """Return which list an entry is in."""
        return int(self.state(entry).is_again)

    def segments(self) -> tuple[int, int]:
        """Return first the list that is above its target."""
        return (0, 1) if self._num_once > self._target else (1, 0)

    def released(self, entry: CacheEntry) -> None:
        """Put an entry into its list."""
        self.state(entry).is_again = entry.uses > 1
        if entry.uses <= 1:
            self._num_once += entry.num_blocks

    def taken(self, entry: CacheEntry) -> None:
        """Count the first list."""
        if not self.state(entry).is_again:
            self._num_once -= entry.num_blocks

    def evicted(self, entry: CacheEntry, num_blocks: int) -> None:
        """Remember from which list it is evicted."""
        segment = self.segment(entry)
        self._memories[segment].put(entry, num_blocks, None)
        if segment == 0 and num_blocks < entry.num_blocks:
            self._num_once -= num_blocks

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
        for memory in self._memories:
            memory.erase(belongs)

    def check(self) -> None:
        """Recount the first list as well."""
        super().check()
        once = sum(entry.num_blocks for entry in self if not self.state(entry).is_again)
        assert once == self._num_once, "the first list is miscounted"
        for memory in self._memories:
            memory.check()
