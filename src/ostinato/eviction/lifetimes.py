"""Counts how long it takes until blocks are used again, and what LRU would have of them.

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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from math import inf

from ostinato.cache.block import CacheEntry
from ostinato.eviction.hazard_table import EDGES_S, NUM_BINS, HazardTable

QUANTUM_S = 0.5
"""The first bin's width: a turn that releases blocks for longer has several batches."""

_TICK_S = QUANTUM_S / 10
"""How late a cohort may grow older, so that one pass over all bins serves many requests."""

SHARE = 0.002
"""What may be lost at most while nothing is proven, as a share of the blocks looked up."""

UTMOST_SHARE = 0.02
"""What may be lost at most, whatever was proven."""

_MAX_TIMES = 6.0
"""How many times credit and share the budget is at most."""

_CAUTION = 3.0
"""By how much the risk that was seen is multiplied."""

DOUBT_BLOCKS = 30.0
"""Lost blocks that are assumed before any were seen."""

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


class LruShadow:
    """What LRU would have cached, and how far a policy may diverge from it.

    Lives that have not ended, newest first, are the blocks in LRU's order, those that were evicted
    included. So the blocks that LRU would hold are the newest of them, as many as are evictable
    here: a sum, kept up to date with one pointer, and no second cache. It is exact where requests
    are served one by one::

        oldest ───────────────► edge ──► newest       batches, one for each turn
        ...... | evicted by LRU | k of n | held by LRU

    The *divergence* is what LRU would hold and the policy has evicted: hits that may be lost, each
    of them once, for then the block is cached again. The *credit* is the hits that LRU would not
    have had less those that it alone would have had, in blocks. Of ``credit + share * blocks looked
    up - divergence`` three things are true:

    * a hit that is lost takes one from the credit, and one from the divergence: it stays the same;
    * it rises when the policy has a hit of its own, when LRU evicts what the policy has evicted,
    and with what is looked up; * it falls by one when the policy evicts what LRU holds, and by
    nothing else.

    So a policy that evicts what LRU holds only while this is positive is never behind LRU by more
    than that share of what was looked up, on any traffic. There is always something else to evict:
    both caches have the same size, so for each block that only LRU holds, the policy holds one that
    LRU does not. LRU holds no descendant of it, so at least one such block is a leaf. The bound is
    tight: a policy that diverges further can lose all of it on the next requests.

    The share is 0.2 % at first. The part of the divergence that was lost so far estimates the risk
    of diverging further: where it is small, the budget is a multiple. Then 0.2 % is the expected
    loss, and the worst case for any traffic is 2 %. A deficit against LRU is subtracted twice from
    such a budget.
    """

    def __init__(self, lives: LifetimeStats, aged: Callable[[ReleaseBatch], None]) -> None:
        """Start level, as LRU.

        Args:
            lives: Whose batches to read.
            aged: Called with each batch of which LRU holds nothing any more.
        """
        self.credit = 0  # blocks that hit here and would have missed under LRU, less the opposite
        self.num_looked_up = 0  # blocks that were asked for
        self._lives = lives
        self._aged = aged
        self._edge: ReleaseBatch | None = None  # the oldest batch of which LRU would hold something
        self._num_at_edge = 0  # how much of it
        self._num_recent = 0  # what LRU would hold besides
        self._divergence = 0  # what of the latter is not cached
        self.is_trimmed = True  # to as many blocks as are evictable here: once between two requests
        self._num_lost = self._num_diverged = 0

    @property
    def divergence(self) -> int:
        """Blocks that LRU would hold and that are not cached."""
        if self._edge is None:
            return 0
        return self._divergence + max(0, self._num_at_edge - self._edge.num_cached)

    @property
    def num_held_by_lru(self) -> int:
        """Blocks that LRU would hold."""
        return self._num_recent + self._num_at_edge

    def budget(self) -> int:
        """Return how many more blocks may be evicted that LRU holds; negative if too many are."""
        credit, looked_up = self.credit, self.num_looked_up
        sure = credit + SHARE * looked_up
        risk = (self._num_lost + DOUBT_BLOCKS) / (self._num_diverged + DOUBT_BLOCKS)
        times = min(_MAX_TIMES, 1.0 / (_CAUTION * risk))
        if times > 1.0:
            proven = times * (SHARE * looked_up + (credit if credit > 0 else 2 * credit))
            sure = max(sure, min(proven, credit + UTMOST_SHARE * looked_up))
        return int(sure) - self.divergence

    def num_free(self, batch: ReleaseBatch) -> int:
        """Return how many cached blocks of a batch LRU does not hold."""
        if not batch.is_recent:
            return batch.num_cached
        if batch is self._edge:
            return max(0, batch.num_cached - self._num_at_edge)
        return 0

    def open(self, batch: ReleaseBatch, num_blocks: int) -> None:
        """Note that lives of cached blocks began."""
        batch.num_open += num_blocks
        batch.num_cached += num_blocks
        self.is_trimmed = False
        if self._edge is None:
            self._edge = batch
        if batch is self._edge:
            self._num_at_edge += num_blocks
        else:
            self._num_recent += num_blocks

    def evicted(self, batch: ReleaseBatch, num_blocks: int) -> None:
        """Note that blocks are no longer cached; their lives continue."""
        batch.num_cached -= num_blocks
        if batch.is_recent and batch is not self._edge:
            self._divergence += num_blocks
            self._num_diverged += num_blocks

    def close(self, batch: ReleaseBatch, num_blocks: int, *, cached: bool, requested: bool) -> None:
        """Note that lives ended, or are no longer remembered.

        Blocks that a request asked for count for or against LRU; those of one request come root
        first.
        """
        at_edge = batch is self._edge
        if requested:
            lru_hits = num_blocks if batch.is_recent else 0
            if at_edge:  # LRU evicts tails first
                lru_hits = min(num_blocks, self._num_at_edge)
                self._num_at_edge -= lru_hits
            self._num_lost += 0 if cached else lru_hits
            self.credit += (num_blocks if cached else 0) - lru_hits
        batch.num_open -= num_blocks
        batch.num_cached -= num_blocks if cached else 0
        if at_edge:
            self._num_at_edge = min(self._num_at_edge, batch.num_open)
        elif batch.is_recent:
            self._num_recent -= num_blocks
            self._divergence -= 0 if cached else num_blocks
        if not batch.num_open and batch.newer is not None:
            if at_edge:
                self._pass(batch)
            batch.unlink()

    def trim(self, num_blocks: int) -> None:
        """Evict from LRU what is beyond ``num_blocks`` blocks, in O(1) amortised."""
        self.is_trimmed = True
        edge = self._edge
        excess = self._num_recent + self._num_at_edge - num_blocks
        while edge is not None and (excess > 0 or not self._num_at_edge):
            num_trimmed = min(max(0, excess), self._num_at_edge)
            self._num_at_edge -= num_trimmed
            excess -= num_trimmed
            if self._num_at_edge or edge.newer is None:
                return
            edge = self._pass(edge)

    def _pass(self, edge: ReleaseBatch) -> ReleaseBatch:
        """Advance to the next batch: LRU holds nothing of this one any more."""
        newer = edge.newer
        assert newer is not None, "the caller looked"
        edge.is_recent = False
        self._aged(edge)
        self._edge = newer
        self._num_recent -= newer.num_open
        self._divergence -= newer.num_open - newer.num_cached
        self._num_at_edge = newer.num_open
        return newer

    def check(self) -> None:
        """Recount from the batches."""
        batch, num_recent, divergence = self._lives.newest, 0, 0
        while batch is not None:
            assert 0 <= batch.num_cached <= batch.num_open, "more lives ended than began"
            if batch.is_recent and batch is not self._edge:
                num_recent += batch.num_open
                divergence += batch.num_open - batch.num_cached
            batch = batch.older
        assert num_recent == self._num_recent, "LRU's blocks are miscounted"
        assert divergence == self._divergence, "what LRU would hold besides is miscounted"
        assert self._edge is None or self._num_at_edge <= self._edge.num_open
