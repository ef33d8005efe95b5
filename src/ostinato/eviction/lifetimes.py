"""Counts how long blocks wait until they are used again.

A *life* begins when a block is released and ends when it is used again, cached or not. Lives of
one class that one turn began make a *cohort*, which grows older bin by bin. Blocks of one turn
live and end together, so each cohort is one observation, however many blocks it has: shares are
counted. For each class and bin, ``HazardTable`` holds the shares of lives that reached the
bin's end or were reused in it, and of those that were reused::

    cohort of class c, 30 blocks     bin 0     bin 1     bin 2
    lives that entered the bin       30        30        18
    reused in it                     0         12        3        hazard 0, 0.40, 0.17
    counted                          1, 0      1, 0.4    0.6, 0.1

Lives of evicted blocks go on for as long as they are remembered, so that a policy which evicts
a class at once still learns that it was wrong.
"""

from collections import OrderedDict, deque
from math import inf

from ostinato.cache.block import CacheEntry
from ostinato.eviction.hazard_table import EDGES_S, NUM_BINS, HazardTable

QUANTUM_S = 0.5
"""The first bin's width: a turn that releases blocks for longer has several batches."""

_TICK_S = QUANTUM_S / 10
"""How late a cohort may grow older, so that a look at all bins serves those of many requests."""

NO_LEAVES: OrderedDict[CacheEntry, None] = OrderedDict()
"""What most cohorts have, until their first leaf."""


class ReleaseBatch:
    """What one turn released within one quantum.

    Attributes:
        born_s: When the first of it was.
        num_open: LifetimeStats that began then and have not ended.
        num_cached: Those of them whose blocks are cached.
        is_recent: Whether LRU would have it cached, as ``LruShadow`` says.
        older: The batch before it.
        newer: The batch after it.
    """

    __slots__ = ("born_s", "cohorts", "is_recent", "newer", "num_cached", "num_open", "older")

    def __init__(self, born_s: float, older: "ReleaseBatch | None") -> None:
        """Note a batch after all others."""
        self.born_s = born_s
        self.num_open = self.num_cached = 0
        self.is_recent = True
        self.older = older
        self.newer: ReleaseBatch | None = None
        self.cohorts: dict[int, Cohort] = {}
        if older is not None:
            older.newer = self

    def unlink(self) -> None:
        """Take a batch without lives out of the chain; it is not the newest."""
        if self.older is not None:
            self.older.newer = self.newer
        if self.newer is not None:
            self.newer.older = self.older
        self.older = self.newer = None


class Cohort:
    """Lives of one class that began in one batch.

    Attributes:
        feature_class: The class.
        batch: The batch in which they began.
        cell: Class and running age bin as one number.
        num_begun: LifetimeStats that began.
        num_open: LifetimeStats that have not ended.
        num_reused: LifetimeStats that ended in the running bin.
        leaves: Evictable leaves among the entries, in the order in which they became leaves.
    """

    __slots__ = ("batch", "cell", "feature_class", "leaves", "num_begun", "num_open", "num_reused")

    def __init__(self, feature_class: int, batch: ReleaseBatch) -> None:
        """Begin without a life."""
        self.feature_class = feature_class
        self.batch = batch
        self.cell = feature_class * NUM_BINS
        self.num_begun = self.num_open = self.num_reused = 0
        self.leaves: OrderedDict[CacheEntry, None] = NO_LEAVES


class LifetimeStats:
    """All cohorts, and what they showed.

    Attributes:
        table: Hazards by class and bin.
        newest: The last batch; None before the first.
        due_s: When the next cohort grows into another bin.
        moved: Cohorts with leaves that grew into another bin, with the cell they left.
    """

    def __init__(self, table: HazardTable) -> None:
        """Start without a life."""
        self.table = table
        self.newest: ReleaseBatch | None = None
        self.moved: list[tuple[Cohort, int]] = []
        self._by_bin: list[deque[Cohort]] = [deque() for _ in range(NUM_BINS)]
        self.due_s = inf
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
        """Count a bin that a cohort has come to the end of."""
        left, num_open, begun = cohort.cell, cohort.num_open, cohort.num_begun or 1
        if cohort.num_reused:
            self.table.lives[left] += (num_open + cohort.num_reused) / begun
            self.table.reused[left] += cohort.num_reused / begun
            cohort.num_reused = 0
        else:
            self.table.lives[left] += num_open / begun
        cohort.cell = left + 1
        if num_open:
            older.append(cohort)
            if cohort.leaves:
                self.moved.append((cohort, left))
