"""Counts how long it takes until blocks are used again.

A *life* begins when a block is released and ends when it is used again, cached or not. Lives of
one class that one turn began make a *cohort*, which grows older bin by bin. Blocks of one turn
live and end together, so each cohort is one observation, however many blocks it has: shares are
counted. For each class and bin, ``HazardTable`` holds the shares of lives that reached the
bin's end or were reused in it, and of those that were reused::

    cohort of class c, 30 blocks     bin 0     bin 1     bin 2
    lives that entered the bin       30        30        18
    reused in it                     0         12        3        hazard 0, 0.40, 0.17
    counted                          1, 0      1, 0.4    0.6, 0.1

Lives of evicted blocks continue for as long as they are remembered, so that a policy which evicts
a class at once still learns that it was wrong.

The heap finds the cohort whose blocks are worth least. A cell is a class and an age bin, and has
one index. It lists its cohorts with evictable leaves, oldest first; cells with cohorts are in a
heap by index. A cell that has become empty is removed when it is at the top of the heap.
"""

import heapq
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import inf

from ostinato.cache.block import CacheEntry
from ostinato.eviction.hazard_table import EDGES_S, NUM_BINS, HazardTable

QUANTUM_S = 0.5
"""The first bin's width: a turn that releases blocks for longer has several batches."""

_TICK_S = QUANTUM_S / 10
"""How late a cohort may grow older, so that one pass over all bins serves many requests."""

NO_LEAVES: OrderedDict[CacheEntry, None] = OrderedDict()
"""Shared by all cohorts without a leaf so far, which are most."""


@dataclass(slots=True, eq=False, repr=False)
class ReleaseBatch:
    """What one turn released within one quantum; batches are linked in order of time."""

    born_s: float  # when the first of it was released
    older: "ReleaseBatch | None"
    newer: "ReleaseBatch | None" = None
    num_open: int = 0  # lives that began then and have not ended
    num_cached: int = 0  # those of them whose blocks are cached
    is_recent: bool = True  # whether LRU would have it cached, as ``LruShadow`` says
    cohorts: "dict[int, Cohort]" = field(default_factory=dict)  # by feature class

    def __post_init__(self) -> None:
        """Append the batch to the list."""
        if self.older is not None:
            self.older.newer = self

    def unlink(self) -> None:
        """Remove a batch without lives from the list; it is not the newest."""
        if self.older is not None:
            self.older.newer = self.newer
        if self.newer is not None:
            self.newer.older = self.older
        self.older = self.newer = None


class Cohort:
    """Lives of one class that began in one batch."""

    __slots__ = ("batch", "cell", "feature_class", "leaves", "num_begun", "num_open", "num_reused")

    def __init__(self, feature_class: int, batch: ReleaseBatch) -> None:
        """Begin without a life."""
        self.feature_class = feature_class
        self.batch = batch
        self.cell = feature_class * NUM_BINS  # class and running age bin as one number
        self.num_begun = 0
        self.num_open = 0  # lives that have not ended
        self.num_reused = 0  # lives that ended in the running bin
        # Evictable leaves among the entries, in the order in which they became leaves.
        self.leaves: OrderedDict[CacheEntry, None] = NO_LEAVES


class LifetimeStats:
    """All cohorts, and what they showed."""

    def __init__(self, table: HazardTable) -> None:
        """Start without a life; lives are counted in the table."""
        self.newest: ReleaseBatch | None = None
        self.due_s = inf  # when the next cohort grows into another bin
        # Cohorts with leaves that grew into another bin, with the cell they left.
        self.moved: list[tuple[Cohort, int]] = []
        self._table = table
        self._by_bin: list[deque[Cohort]] = [deque() for _ in range(NUM_BINS)]
        self._turn = 0

    def begin(self, feature_class: int, now_s: float, turn: int = 0) -> Cohort:
        """Return the cohort of lives of a class that a turn begins; the caller counts them."""
        batch = self.newest
        if batch is None or turn != self._turn or now_s - batch.born_s >= QUANTUM_S:
            self._turn = turn
            batch = self.newest = ReleaseBatch(now_s, batch)
        cohort = batch.cohorts.get(feature_class)
        if cohort is None:
            cohort = batch.cohorts[feature_class] = Cohort(feature_class, batch)
            self._by_bin[0].append(cohort)
            if (due_s := batch.born_s + EDGES_S[1]) < self.due_s:
                self.due_s = due_s
        return cohort

    def advance(self, now_s: float) -> None:
        """Let cohorts grow older; O(1) amortised per cohort and bin."""
        if now_s < self.due_s:
            return
        self.due_s = inf
        for place in range(NUM_BINS - 1):
            queue, age_s = self._by_bin[place], EDGES_S[place + 1]
            while queue and (due_s := queue[0].batch.born_s + age_s) <= now_s:
                self._outlive(queue.popleft(), self._by_bin[place + 1])
            if queue and due_s < self.due_s:
                self.due_s = due_s
        self.due_s = max(self.due_s, now_s + _TICK_S)

    def _outlive(self, cohort: Cohort, older: "deque[Cohort]") -> None:
        """Count the bin that a cohort has outlived."""
        left, num_open, begun = cohort.cell, cohort.num_open, cohort.num_begun or 1
        if cohort.num_reused:
            self._table.lives[left] += (num_open + cohort.num_reused) / begun
            self._table.reused[left] += cohort.num_reused / begun
            cohort.num_reused = 0
        else:
            self._table.lives[left] += num_open / begun
        cohort.cell = left + 1
        if num_open:
            older.append(cohort)
            if cohort.leaves:
                self.moved.append((cohort, left))


class VictimHeap:
    """Cohorts by the index of their cell."""

    def __init__(self, index: Sequence[float]) -> None:
        """Start empty.

        Args:
            index: Of each cell, as it is now; ``reorder`` when it has changed.
        """
        self._index = index
        self._cells: dict[int, OrderedDict[Cohort, None]] = {}
        self._heap: list[tuple[float, int]] = []

    def __iter__(self) -> Iterator[Cohort]:
        """Walk all cohorts."""
        return (cohort for cell in self._cells.values() for cohort in cell)

    def add(self, cohort: Cohort) -> None:
        """Put a cohort last in its cell, in O(log cells)."""
        place = cohort.cell
        cell = self._cells.get(place)
        if cell is None:
            cell = self._cells[place] = OrderedDict()
            heapq.heappush(self._heap, (self._index[place], place))
        cell[cohort] = None

    def discard(self, cohort: Cohort, place: int) -> None:
        """Take a cohort out of a cell, if it is there, in O(1)."""
        cell = self._cells.get(place)
        if cell is not None:
            cell.pop(cohort, None)

    def first(self) -> tuple[float, Cohort] | None:
        """Name the least index, and the oldest cohort of it, in O(log cells) amortised."""
        while self._heap:
            index, place = self._heap[0]
            cell = self._cells[place]
            if cell:
                return index, next(iter(cell))
            heapq.heappop(self._heap)
            del self._cells[place]
        return None

    def reorder(self) -> None:
        """Rebuild the heap, for the index has changed."""
        self._heap[:] = [(self._index[place], place) for place in self._cells]
        heapq.heapify(self._heap)

    def check(self) -> None:
        """Assert that each cell is in the heap once, and each cohort in its cell."""
        assert sorted(place for _, place in self._heap) == sorted(self._cells)
        for place, cell in self._cells.items():
            assert all(cohort.cell == place for cohort in cell), "a cohort is in another cell"
            assert all(cohort.leaves for cohort in cell), "a cohort without leaves waits"
