"""One queue of free blocks, cached or not, by release, as in the example of vLLM's document."""

from array import array
from collections import deque
from collections.abc import Iterator

from ostinato.cache.pool import FreeBlocks


class ClassicFreeBlocks(FreeBlocks):
    """Unused blocks in order of release.

    ::

        first run           second run
        tick 2: 4 7 5 6     tick 9: 12 11 10 9 8
        ◄── taken from the end: 6 first      then 8
    """

    def __init__(self, num_blocks: int) -> None:
        """Have all blocks of a pool; block 0 is given away first."""
        # The last of a run goes first, so that taking some costs no copy of the rest.
        first = array("i", range(num_blocks - 1, -1, -1))
        self._runs: deque[tuple[int, array[int]]] = deque([(0, first)])
        self._num_blocks = num_blocks

    def __len__(self) -> int:
        """Number of blocks."""
        return self._num_blocks

    def __iter__(self) -> Iterator[tuple[int, int]]:
        """Walk in the order in which they would be given away, each with its release."""
        return ((tick, block) for tick, run in self._runs for block in reversed(run))

    @property
    def first_tick(self) -> int | None:
        """When the next one came back, in pool ticks; None if there is none."""
        return self._runs[0][0] if self._runs else None

    def take(self, most: int) -> "array[int]":
        """Take up to ``most`` blocks of one run, at least one; there are some."""
        run = self._runs[0][1]
        taken = run[-most:]
        del run[-most:]
        if not run:
            self._runs.popleft()
        taken.reverse()
        self._num_blocks -= len(taken)
        return taken

    def give(self, blocks: "array[int]", tick: int) -> None:
        """Take blocks back, in token order, later than all before; the tail is given away first."""
        self._runs.append((tick, blocks[:]))
        self._num_blocks += len(blocks)
