"""SLRU: evicts what was in use once before what was in use again."""

from collections import OrderedDict
from dataclasses import dataclass

from ostinato.cache.block import CacheEntry
from ostinato.eviction.leaf_heap import LeafHeap, LeafState

_PROTECTED_SHARE = 0.8


@dataclass(slots=True)
class SegmentState(LeafState):
    """Note whether an entry is protected."""

    is_protected: bool = False


class SegmentedLru(LeafHeap[SegmentState]):
    """Evict the oldest leaf that was in use once; then the oldest of the protected.

    Entries that were in use again are protected, up to 80 % of the pool; then the one released
    longest ago joins the others again.

    Source: Karedla, Love, Wherry, Caching strategies to improve disk system performance, 1994.
    """

    def __init__(self, num_blocks: int) -> None:
        """Make an empty policy for a pool of so many blocks."""
        super().__init__(SegmentState, num_segments=2)
        self._most_protected = _PROTECTED_SHARE * num_blocks
        self._protected: OrderedDict[CacheEntry, None] = OrderedDict()
        self._num_protected = 0

    def segment(self, entry: CacheEntry) -> int:
        """Say whether an entry is protected."""
        return int(self.state(entry).is_protected)

    def released(self, entry: CacheEntry) -> None:
        """Protect what was in use before, up to 80 % of the pool."""
        self.state(entry).is_protected = entry.uses > 1
        if entry.uses > 1:
            self._protected[entry] = None
            self._num_protected += entry.num_blocks
        while self._num_protected > self._most_protected:
            oldest = next(iter(self._protected))
            self._unprotect(oldest, oldest.num_blocks)
            state = self.state(oldest)
            state.is_protected = False
            if state.place is not None:
                self.offer(oldest)

    def split(self, tail: CacheEntry, head: CacheEntry) -> None:
        """Take the head into its tail's segment; blocks are counted already."""
        super().split(tail, head)
        if tail in self._protected:
            self._protected[head] = None

    def evicted(self, entry: CacheEntry, num_blocks: int) -> None:
        """Count protected blocks."""
        if entry in self._protected and num_blocks < entry.num_blocks:
            self._num_protected -= num_blocks

    def taken(self, entry: CacheEntry) -> None:
        """Count protected blocks."""
        if entry in self._protected:
            self._unprotect(entry, entry.num_blocks)

    def check(self) -> None:
        """Recount protected blocks as well."""
        super().check()
        assert self._num_protected == sum(entry.num_blocks for entry in self._protected)

    def _unprotect(self, entry: CacheEntry, num_blocks: int) -> None:
        del self._protected[entry]
        self._num_protected -= num_blocks
