"""Evicts the leaf with the least rank: the part that most policies share.

Evictable leaves are in a heap by rank. An entry that is held again, evicted or ranked again leaves
a stale place in the heap, which is skipped when it comes up.
"""

import heapq
from collections.abc import Callable, Iterable, Sequence
from copy import copy
from dataclasses import dataclass
from itertools import count
from typing import Generic, TypeVar

from ostinato.cache.block import CacheEntry
from ostinato.cache.eviction import LeastRecentlyUsed, RequestSummary, Victim

Rank = tuple[float, ...]


@dataclass(slots=True)
class LeafState:
    """What a policy notes of an entry."""

    segment: int = 0
    place: int | None = None  # in the segment's heap; None if it is in none


State = TypeVar("State", bound=LeafState)


class LeafHeap(LeastRecentlyUsed, Generic[State]):
    """A policy that ranks leaves; subclasses say how.

    Entries may be divided into segments: each has a heap, and its blocks are counted.
    """

    def __init__(self, new_state: Callable[[], State], num_segments: int = 1) -> None:
        """Make an empty policy.

        Args:
            new_state: Makes what is noted of an entry.
            num_segments: Parts that entries are divided into.
        """
        super().__init__()
        self._new_state = new_state
        self._heaps: list[list[tuple[Rank, int, CacheEntry]]] = [[] for _ in range(num_segments)]
        self.segment_blocks = [0] * num_segments
        self._numbers = count()

    def state(self, entry: CacheEntry) -> State:
        """Return what is noted of an entry."""
        state: State | None = entry.policy_state
        if state is None:
            state = entry.policy_state = self._new_state()
        return state

    # --- what subclasses define ---

    def segment_of(self, entry: CacheEntry) -> int:
        """Return which segment an added entry joins."""
        return 0

    def segments(self) -> Iterable[int]:
        """Return all segments, the one to evict from first."""
        return range(len(self._heaps))

    def rank(self, entry: CacheEntry) -> Rank:
        """Return what an entry is worth, the least goes first: by release unless overridden."""
        return (entry.idle_tick,)

    def added(self, entry: CacheEntry) -> None:
        """Note that an entry was added to its segment, before it is ranked."""

    def removed(self, entry: CacheEntry) -> None:
        """Note that an entry was removed, held again or evicted."""

    def evicted(self, entry: CacheEntry, num_blocks: int) -> None:
        """Note that an entry is about to lose blocks."""

    # --- the policy ---

    def add(self, entries: Sequence[CacheEntry], summary: RequestSummary | None) -> None:
        """Add entries, in O(log n) each."""
        super().add(entries, summary)
        for entry in entries:
            state = self.state(entry)
            state.segment = self.segment_of(entry)
            self.segment_blocks[state.segment] += entry.num_blocks
            self.added(entry)
            if entry.is_leaf:
                self.offer(entry)

    def remove(self, entries: Sequence[CacheEntry]) -> None:
        """Remove entries, in O(1) each."""
        super().remove(entries)
        for entry in entries:
            self._lose(entry, entry.num_blocks)

    def evict(self, entry: CacheEntry, num_blocks: int) -> None:
        """Note what is evicted; if it is all, remove the entry."""
        self.evicted(entry, num_blocks)
        super().evict(entry, num_blocks)
        self._lose(entry, num_blocks)

    def split(self, tail: CacheEntry, head: CacheEntry) -> None:
        """Add the head; it has its tail's past and is no leaf."""
        super().split(tail, head)
        head.policy_state = copy(self.state(tail))
        self.state(head).place = None

    def became_leaf(self, entry: CacheEntry) -> None:
        """Rank an entry that is a leaf from now on."""
        self.offer(entry)

    def move(self, entry: CacheEntry, segment: int) -> None:
        """Move an entry to another segment, without ranking it."""
        state = self.state(entry)
        self.segment_blocks[state.segment] -= entry.num_blocks
        self.segment_blocks[segment] += entry.num_blocks
        state.segment = segment

    def offer(self, entry: CacheEntry) -> None:
        """Rank an entry, or rank it again."""
        state = self.state(entry)
        place = state.place = next(self._numbers)
        heap = self._heaps[state.segment]
        heapq.heappush(heap, (self.rank(entry), place, entry))
        if len(heap) > 64 and len(heap) > 4 * len(self._queue):
            self._drop_stale(heap)

    def erase(self, belongs: Callable[[CacheEntry], bool]) -> None:
        """Drop the stale places, which hold entries that are not cached any more."""
        for heap in self._heaps:
            self._drop_stale(heap)

    def victim(self, num_needed: int = 0) -> Victim | None:
        """Return the leaf of the least rank in the first segment that has one."""
        for segment in self.segments():
            entry = self._least(segment)
            if entry is not None:
                return entry, entry.num_blocks
        return None

    def check(self) -> None:
        """Assert that every leaf is in its heap, and recount blocks."""
        places = [{place for _, place, _ in heap} for heap in self._heaps]
        counted = [0] * len(self._heaps)
        for entry in self:
            state = self.state(entry)
            counted[state.segment] += entry.num_blocks
            assert not entry.is_leaf or state.place in places[state.segment], "a leaf is not ranked"
        assert counted == self.segment_blocks, "the blocks of segments are miscounted"

    def _drop_stale(self, heap: list[tuple[Rank, int, CacheEntry]]) -> None:
        heap[:] = [held for held in heap if held[1] == self.state(held[2]).place]
        heapq.heapify(heap)

    def _least(self, segment: int) -> CacheEntry | None:
        """Return the leaf of the least rank in a segment, in O(log n) amortised."""
        heap = self._heaps[segment]
        while heap:
            _, place, entry = heap[0]
            state = self.state(entry)
            if place == state.place:
                if entry.is_leaf:
                    return entry
                state.place = None  # it was one while another copy of it was cached
            heapq.heappop(heap)
        return None

    def _lose(self, entry: CacheEntry, num_blocks: int) -> None:
        """Count an entry's last blocks no longer; without blocks it is removed."""
        state = self.state(entry)
        self.segment_blocks[state.segment] -= num_blocks
        if num_blocks == entry.num_blocks:
            self.removed(entry)
            state.place = None
