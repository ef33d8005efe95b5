"""Finds the cohort whose blocks are worth least.

A cell is a class and an age bin, and has one index. It lists its cohorts with evictable leaves,
oldest first; cells with cohorts are in a heap by index. A cell that has become empty is removed
when it is at the top of the heap.
"""

import heapq
from collections import OrderedDict
from collections.abc import Iterator, Sequence

from ostinato.eviction.lifetimes import Cohort


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
