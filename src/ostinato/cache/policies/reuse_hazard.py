"""Reuse hazard: which leaf will bring the fewest hits for the memory that it takes?

Every entry that is let go of gets a class, made of what is known at that moment:

* how often it was in use;
* how long ago its conversation had its previous turn;
* how long the finished output was;
* how much of the prompt was new, compared to other requests.

``Lives`` learns for each class at which ages blocks are used again, also from blocks that were
evicted too early, and ``HazardTable`` makes an index of it. The leaf with the least index is
evicted. ``Shadow`` knows what LRU would have hit, and says how far to part from it.

::

    cell = class x age bin      cells with evictable leaves, in a heap by index
    └── cohorts, oldest first   let go of at one moment
        └── leaves              newest first: a conversation is evicted from its tail on

Nothing is to be tuned: times are those of people and tools, all else is relative to what the
cache sees. Cost: O(log cells) per eviction, and a fit every 50 requests.
"""

import heapq
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterator

from ostinato.cache.block import CacheEntry
from ostinato.cache.free_queue import FreeQueue
from ostinato.cache.policies.contract import EvictionPolicy, Recall, Turn
from ostinato.cache.policies.hazard_table import NUM_BINS, HazardTable
from ostinato.cache.policies.lives import Cohort, Lives
from ostinato.cache.policies.memory import EvictedMemory, EvictedRun
from ostinato.cache.policies.shadow import Shadow
from ostinato.core.identity import PrefixKey

_USES = (1, 2, 4, 16)
_GAPS_S = (0.0, 20.0, 60.0, 180.0)
_OUTPUT_TOKENS = (50, 200, 500)
_NEW_SHARES = (0.08, 0.3, 1.1)
"""Bounds of the features; new blocks as a share of what requests have on average."""

_SHAPE = (len(_USES) + 1, len(_GAPS_S) + 1, len(_OUTPUT_TOKENS) + 1, len(_NEW_SHARES) + 1)
_CLASSES_PER_USES = _SHAPE[1] * _SHAPE[2] * _SHAPE[3]

_TURNS_PER_FIT = 50
_MEMORY = 8
"""Evicted blocks that are remembered, in pools."""


class ReuseHazard(EvictionPolicy):
    """Evict the leaf with the fewest expected hits per block-second."""

    remembers = True
    joins = False

    def __init__(self, num_blocks: int, clock: Callable[[], float]) -> None:
        """Start without experience: as LRU, until it has seen what comes back.

        Args:
            num_blocks: Size of the pool.
            clock: Seconds that never fall.
        """
        self._clock = clock
        self._table = HazardTable(_SHAPE)
        self._lives = Lives(self._table)
        self._shadow = Shadow(num_blocks, self._lives)
        self._memory = EvictedMemory(_MEMORY * num_blocks, self._dropped)
        self._queue = FreeQueue()
        num_cells = self._table.num_classes * NUM_BINS
        self._cells: list[OrderedDict[Cohort, None] | None] = [None] * num_cells
        self._heap: list[tuple[float, int]] = []
        self._turn: Turn | None = None
        self._kinds = 0  # the running turn's class, uses left out
        self._num_turns = 0
        self._num_turn_blocks = 0
        self._blocks_per_turn, self._new_per_turn = _Mean(), _Mean()

    @property
    def num_remembered_blocks(self) -> int:
        """Evicted blocks whose return would be noticed."""
        return self._memory.num_blocks

    @property
    def follows_lru(self) -> bool:
        """Whether LRU names the victims for now."""
        return self._shadow.follows_lru

    # --- what comes and goes ---

    def add(self, entry: CacheEntry, turn: Turn | None) -> None:
        """Begin a life; without a turn, of the class that the entry had."""
        if turn is not None and turn is not self._turn:
            self._next_turn(turn)
        now_s = entry.idle_since_s
        self._advance(now_s)
        if turn is not None:
            kind = bisect_left(_USES, entry.uses) * _CLASSES_PER_USES + self._kinds
        else:
            kind = 0 if entry.note is None else entry.note.kind
        cohort = self._lives.begin(kind, now_s, self._num_turns)
        num_blocks = entry.num_blocks
        cohort.num_begun += num_blocks
        cohort.num_open += num_blocks
        self._shadow.open(cohort.moment, num_blocks)
        self._num_turn_blocks += num_blocks
        entry.note = cohort
        self._queue.append(entry)
        if entry.is_leaf:
            self._offer(entry)

    def remove(self, entry: CacheEntry) -> None:
        """End a life: the entry is used again."""
        self._advance(self._clock())
        cohort: Cohort = entry.note
        self._shadow.reused(cohort.moment, entry.num_blocks, cached=True)
        self._end(cohort, entry.num_blocks, cached=True)
        self._withdraw(entry)
        self._queue.remove(entry)

    def evict(self, entry: CacheEntry, num_blocks: int) -> None:
        """Let lives go on in memory."""
        if num_blocks == entry.num_blocks:
            self._withdraw(entry)
            self._queue.remove(entry)
        self._shadow.evicted(entry.note.moment, num_blocks)
        self._memory.put(entry, num_blocks, entry.note)

    def split(self, tail: CacheEntry, head: CacheEntry) -> None:
        """Take the head; it has the same past and is no leaf."""
        head.note = tail.note
        self._queue.insert_after(tail, head)

    def expose(self, entry: CacheEntry) -> None:
        """Take an entry among the leaves."""
        self._offer(entry)

    def recall(self, key: PrefixKey, first: int, most: int, block_size: int) -> Recall:
        """End lives of blocks that were evicted and are published anew."""
        run = self._memory.take(key, first, most, block_size)
        if run is None:
            return Recall(most)
        self._advance(self._clock())
        cohort: Cohort = run.note
        self._shadow.reused(cohort.moment, run.num_blocks, cached=False)
        self._end(cohort, run.num_blocks, cached=False)
        return Recall(run.num_blocks, run.uses, run.idle_since_s)

    def forget(self, belongs: Callable[[CacheEntry], bool]) -> None:
        """Remember nothing of what belongs to something."""
        self._memory.forget(belongs)

    # --- who goes next ---

    def victim(self) -> CacheEntry | None:
        """Name the leaf with the least index, or LRU's while that does better."""
        if self._queue.head is None or self._shadow.follows_lru:
            return self._queue.head
        self._advance(self._clock())
        while self._heap:
            cohorts = self._cells[self._heap[0][1]]
            if not cohorts:
                self._cells[heapq.heappop(self._heap)[1]] = None
                continue
            entry = next(reversed(next(iter(cohorts)).leaves))
            if entry.is_leaf:
                return entry
            self._withdraw(entry)  # it was one while another copy of it was cached
        return self._queue.head

    def __iter__(self) -> Iterator[CacheEntry]:
        """Walk in order of release."""
        return iter(self._queue)

    def check(self) -> None:
        """Assert that every evictable leaf is offered, and recount lives."""
        self._queue.check()
        self._memory.check()
        self._shadow.check()
        offered = 0
        for entry in self._queue:
            cohort: Cohort = entry.note
            offered += entry in cohort.leaves
            assert not entry.is_leaf or entry in cohort.leaves, "a leaf is not offered"
        listed = sum(len(cohort.leaves) for cell in self._cells for cohort in cell or ())
        assert offered == listed, "leaves of nobody's"
        heaped = {cell for _, cell in self._heap}
        assert heaped == {i for i, cell in enumerate(self._cells) if cell is not None}
        open_lives: dict[Cohort, int] = {}
        lives = [(entry.note, entry.num_blocks) for entry in self._queue]
        lives += [(run.note, run.num_blocks) for run in self._memory.runs()]
        for cohort, num_blocks in lives:
            open_lives[cohort] = open_lives.get(cohort, 0) + num_blocks
        assert all(cohort.num_open == count for cohort, count in open_lives.items())

    # --- small print ---

    def _next_turn(self, turn: Turn) -> None:
        """Begin with the entries that another request lets go of."""
        self._shadow.judge(self._blocks_per_turn.value)
        if self._turn is not None:
            self._blocks_per_turn.add(self._num_turn_blocks)
            self._num_turns += 1
            if self._num_turns % _TURNS_PER_FIT == 0:
                self._table.fit()
                self._reorder()
        self._turn, self._num_turn_blocks = turn, 0
        self._new_per_turn.add(turn.num_new_blocks)
        share = turn.num_new_blocks / max(1e-9, self._new_per_turn.value)
        kinds = 0 if turn.gap_s is None else bisect_right(_GAPS_S, turn.gap_s)
        kinds = kinds * _SHAPE[2] + bisect_right(_OUTPUT_TOKENS, turn.num_output_tokens)
        self._kinds = kinds * _SHAPE[3] + bisect_right(_NEW_SHARES, share)

    def _end(self, cohort: Cohort, num_blocks: int, *, cached: bool) -> None:
        cohort.num_open -= num_blocks
        cohort.num_reused += num_blocks
        self._shadow.close(cohort.moment, num_blocks, cached=cached)

    def _dropped(self, run: EvictedRun) -> None:
        """Stop waiting for a life's end; it counts for as long as it was watched."""
        cohort: Cohort = run.note
        cohort.num_open -= run.num_blocks
        self._shadow.close(cohort.moment, run.num_blocks, cached=False)

    def _advance(self, now_s: float) -> None:
        self._lives.advance(now_s)
        for cohort, left in self._lives.moved:
            cell = self._cells[left]
            if cell is not None and cohort in cell:
                del cell[cohort]
                self._list(cohort)
        self._lives.moved.clear()

    def _offer(self, entry: CacheEntry) -> None:
        cohort: Cohort = entry.note
        if not cohort.leaves:
            self._list(cohort)
        cohort.leaves[entry] = None

    def _withdraw(self, entry: CacheEntry) -> None:
        cohort: Cohort = entry.note
        if entry in cohort.leaves:
            del cohort.leaves[entry]
            cell = self._cells[cohort.cell]
            if not cohort.leaves and cell is not None:
                del cell[cohort]

    def _list(self, cohort: Cohort) -> None:
        """Put a cohort last in its cell, and the cell into the heap."""
        place = cohort.cell
        cell = self._cells[place]
        if cell is None:
            cell = self._cells[place] = OrderedDict()
            heapq.heappush(self._heap, (self._table.index[place], place))
        cell[cohort] = None

    def _reorder(self) -> None:
        """Rebuild the heap from the cells in it, for the index has changed."""
        self._heap = [(self._table.index[place], place) for _, place in self._heap]
        heapq.heapify(self._heap)


class _Mean:
    """A mean in which the last hundred values count most."""

    def __init__(self) -> None:
        self._sum = self._weight = 0.0

    def add(self, value: float) -> None:
        self._sum = 0.99 * self._sum + value
        self._weight = 0.99 * self._weight + 1.0

    @property
    def value(self) -> float:
        return self._sum / self._weight if self._weight else 0.0
