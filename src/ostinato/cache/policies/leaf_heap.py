"""How is the leaf with the least rank found? The part that most policies share.

Evictable leaves wait in a heap by rank. What is held again, evicted or ranked anew leaves its
old place in the heap behind; such places are skipped when they come up.
"""

import heapq
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

from ostinato.cache.block import CacheEntry
from ostinato.cache.free_queue import FreeQueue
from ostinato.cache.policies.contract import EvictionPolicy, Recall, Turn
from ostinato.core.identity import PrefixKey

Rank = tuple[float, ...]


class LeafHeap(EvictionPolicy):
    """A policy that ranks leaves; who derives from it says how.

    Policies with segments have a heap for each. What is noted of an entry are ``facts``; one of
    them is its place in a heap, if it is there.
    """

    remembers = False
    joins = False

    def __init__(self, num_segments: int = 1) -> None:
        """Make an empty policy."""
        self._queue = FreeQueue()
        self._heaps: list[list[tuple[Rank, int, CacheEntry]]] = [[] for _ in range(num_segments)]
        self._numbers = count()

    def segment(self, entry: CacheEntry) -> int:
        """Say which segment an entry is in."""
        return 0

    def rank(self, entry: CacheEntry) -> Rank:
        """Say what an entry is worth, the least goes first: by release unless said otherwise."""
        return (entry.idle_tick,)

    def released(self, entry: CacheEntry) -> None:
        """Note that an entry comes, before it is ranked."""

    def taken(self, entry: CacheEntry) -> None:
        """Note that an entry goes, held again or evicted."""

    def evicted(self, entry: CacheEntry, num_blocks: int) -> None:
        """Note that an entry loses blocks."""

    def add(self, entry: CacheEntry, turn: Turn | None) -> None:
        """Take an entry, in O(log n)."""
        self.released(entry)
        self._queue.append(entry)
        if entry.is_leaf:
            self.offer(entry)

    def remove(self, entry: CacheEntry) -> None:
        """Let go of an entry, in O(1)."""
        self._queue.remove(entry)
        self.taken(entry)
        facts(entry).pop("place", None)

    def evict(self, entry: CacheEntry, num_blocks: int) -> None:
        """Note what goes; if it is all, let go of the entry."""
        self.evicted(entry, num_blocks)
        if num_blocks == entry.num_blocks:
            self.remove(entry)

    def split(self, tail: CacheEntry, head: CacheEntry) -> None:
        """Take the head; it has its tail's past and is no leaf."""
        self._queue.insert_after(tail, head)
        head.note = {name: fact for name, fact in facts(tail).items() if name != "place"}

    def expose(self, entry: CacheEntry) -> None:
        """Rank an entry that is a leaf from now on."""
        self.offer(entry)

    def offer(self, entry: CacheEntry) -> None:
        """Rank an entry, or rank it anew."""
        place = facts(entry)["place"] = next(self._numbers)
        number = self.segment(entry)
        heap = self._heaps[number]
        heapq.heappush(heap, (self.rank(entry), place, entry))
        if len(heap) > 64 and len(heap) > 4 * len(self._queue):
            heap = [held for held in heap if held[1] == facts(held[2]).get("place")]
            heapq.heapify(heap)
            self._heaps[number] = heap

    def least(self, segment: int) -> CacheEntry | None:
        """Name the leaf of the least rank in a segment, in O(log n) amortised."""
        heap = self._heaps[segment]
        while heap:
            _, place, entry = heap[0]
            if place == facts(entry).get("place"):
                if entry.is_leaf:
                    return entry
                facts(entry).pop("place")  # it was one while another copy of it was cached
            heapq.heappop(heap)
        return None

    def look_up(self, key: PrefixKey, first: int, last: int, block_size: int, turn: Turn) -> None:
        """Learn nothing."""

    def recall(
        self, key: PrefixKey, first: int, most: int, block_size: int, turn: Turn | None
    ) -> Recall:
        """Remember nothing."""
        return Recall(most)

    def forget(self, belongs: Callable[[CacheEntry], bool]) -> None:
        """Have nothing to forget."""

    def victim(self, num_wanted: int = 0) -> CacheEntry | None:
        """Name the leaf of the least rank in the first segment that has one."""
        for segment in range(len(self._heaps)):
            entry = self.least(segment)
            if entry is not None:
                return entry
        return None

    def takeable(self, victim: CacheEntry) -> int:
        """Let all of it go."""
        return victim.num_blocks

    def __iter__(self) -> Iterator[CacheEntry]:
        """Walk in order of release."""
        return iter(self._queue)

    def check(self) -> None:
        """Assert the links, and that every leaf is in the heap once."""
        self._queue.check()
        places = {place for heap in self._heaps for _, place, _ in heap}
        for entry in self._queue:
            place = facts(entry).get("place")
            assert not entry.is_leaf or place in places, "a leaf is not offered"


def facts(entry: CacheEntry) -> dict[str, Any]:
    """Return what the policy noted of an entry."""
    if entry.note is None:
        entry.note = {}
    noted: dict[str, Any] = entry.note
    return noted
