"""S3-FIFO: evicts what came through a small queue without being used again."""

import heapq
from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.policies.leaf_heap import LeafHeap, LeafState, Rank
from ostinato.cache.block import CacheEntry
from ostinato.cache.eviction import RequestSummary, Victim
from ostinato.core.identity import PrefixKey
from ostinato.eviction.learned_policy import GhostList

_SMALL_SHARE = 0.1
_MAX_USES = 3

_Waiting = tuple[int, int, CacheEntry]


@dataclass(slots=True)
class QueueState(LeafState):
    """What is noted of an entry in a queue."""

    turn: int = 0  # when it joined its queue, from 1 on; 0 before the first time
    queue_place: int | None = None  # None if it is held
    seen: int = 0  # its uses when it joined


class S3Fifo(LeafHeap[QueueState]):
    """A small queue of new entries, a main queue, and a memory of what the small one evicted.

    New content joins the small queue, recently evicted content the main one. An entry keeps its
    place however often it is used; at the head, it moves to the end of the main queue if it was
    used or is no leaf. If inner entries stayed, the small queue would be too long for ever, and new
    content would be evicted at once; and from the main queue whole conversations would be evicted
    at once, since what is before a tail would reach the head after it.

    Source: Yang, Zhang, Qiu, Yue, Vigfusson, FIFO queues are all you need for cache eviction,
    SOSP 2023.
    """

    def __init__(self, num_blocks: int) -> None:
        """Make an empty policy for a pool of so many blocks."""
        super().__init__(QueueState, num_segments=2)
        self._most_small = _SMALL_SHARE * num_blocks
        # By turn, leaves or not: of the small queue (segment 0) and of the main one.
        self._waiting: tuple[list[_Waiting], list[_Waiting]] = ([], [])
        self._turns = 0
        self._memory = GhostList[None](num_blocks)

    def rank(self, entry: CacheEntry) -> Rank:
        """Rank by place in the queue."""
        return (self.state(entry).turn,)

    @property
    def _is_small_full(self) -> bool:
        return self.segment_blocks[0] > self._most_small

    def segment_of(self, entry: CacheEntry) -> int:
        """Return which queue an entry joins: the one that it was in before, if any."""
        state = self.state(entry)
        return state.segment if state.turn else int(entry.uses > 1)

    def added(self, entry: CacheEntry) -> None:
        """Put an entry into its queue, at its place if it was in one before."""
        state = self.state(entry)
        if state.turn:
            self._enqueue(entry)
        else:
            state.seen = entry.uses
            self._append(entry)

    def split(self, tail: CacheEntry, head: CacheEntry) -> None:
        """Add the head; its place is that of its tail."""
        super().split(tail, head)
        self._enqueue(head)

    def removed(self, entry: CacheEntry) -> None:
        """Take an entry out of its queue."""
        self.state(entry).queue_place = None

    def evicted(self, entry: CacheEntry, num_blocks: int) -> None:
        """Remember what is evicted from the small queue."""
        if self.state(entry).segment == 0:
            self._memory.put(entry, num_blocks, None)

    def recall(
        self, key: PrefixKey, first: int, most: int, block_size: int, summary: RequestSummary | None
    ) -> tuple[int, int]:
        """Return what was evicted of the new: it joins the main queue."""
        run = self._memory.take(key, first, most, block_size)
        return (0, most) if run is None else (1, run.num_blocks)

    def erase(self, belongs: Callable[[CacheEntry], bool]) -> None:
        """Erase what is remembered of entries that match."""
        super().erase(belongs)
        self._memory.erase(belongs)
        for waiting in self._waiting:
            self._drop_left(waiting)

    def segments(self) -> tuple[int, int]:
        """Return the small queue first while it is too long."""
        return (0, 1) if self._is_small_full else (1, 0)

    def victim(self, num_needed: int = 0) -> Victim | None:
        """Move used leaves to the end of the main queue until one at the head was not used."""
        while True:
            self._promote_inner()
            victim = super().victim()
            if victim is None:
                return None
            entry, _ = victim
            state = self.state(entry)
            if state.segment == 1:
                self._reinsert_inner(state.turn)
            if entry.uses <= state.seen:
                return victim
            self._move_to_main(entry)
            self.offer(entry)

    def check(self) -> None:
        """Assert that every entry is in its queue as well."""
        super().check()
        self._memory.check()
        places = [{place for _, place, _ in waiting} for waiting in self._waiting]
        for entry in self:
            state = self.state(entry)
            assert state.queue_place in places[state.segment], "an entry is in no queue"

    def _append(self, entry: CacheEntry) -> None:
        """Put an entry at the end of its queue."""
        self._turns += 1
        self.state(entry).turn = self._turns
        self._enqueue(entry)

    def _enqueue(self, entry: CacheEntry) -> None:
        """Put an entry at its place in its queue."""
        state = self.state(entry)
        place = state.queue_place = next(self._numbers)
        waiting = self._waiting[state.segment]
        heapq.heappush(waiting, (state.turn, place, entry))
        if len(waiting) > 64 and len(waiting) > 4 * len(self._queue):
            self._drop_left(waiting)

    def _drop_left(self, waiting: list[_Waiting]) -> None:
        """Drop the places of entries that have left their queue."""
        waiting[:] = [held for held in waiting if held[1] == self.state(held[2]).queue_place]
        heapq.heapify(waiting)

    def _move_to_main(self, entry: CacheEntry) -> None:
        """Move an entry to the end of the main queue; once there, that takes one use off."""
        state = self.state(entry)
        if state.segment == 0:
            self.move(entry, 1)
            state.seen = entry.uses
        elif entry.uses > state.seen:
            state.seen = max(state.seen + 1, entry.uses - _MAX_USES)
        self._append(entry)

    def _promote_inner(self) -> None:
        """Promote inner entries at the head of the small queue, in O(log n) amortised."""
        small = self._waiting[0]
        while small and self._is_small_full:
            _, place, entry = small[0]
            if place == self.state(entry).queue_place:
                if entry.is_leaf:
                    return
                self._move_to_main(entry)
            heapq.heappop(small)

    def _reinsert_inner(self, turn: int) -> None:
        """Move inner entries of the main queue that joined before a turn to its end.

        Cost: O(log n) for each.
        """
        main = self._waiting[1]
        while main and main[0][0] < turn:
            _, place, entry = heapq.heappop(main)
            if place == self.state(entry).queue_place:
                self._move_to_main(entry)
