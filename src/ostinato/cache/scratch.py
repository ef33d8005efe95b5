"""Which empty block is given away next?

Blocks come back in runs, and go in pieces of runs::

    first run           second run
    tick 9: 4 7 5 6     tick 2: 12 11 10 9 8
    ◄── taken from the end: 6 first      then 8

``scratch_first`` gives away first what came back last; ``classic`` what came back first.
"""

from array import array
from collections import deque
from collections.abc import Iterator

from ostinato.core.ids import BlockId


class ScratchRuns:
    """Blocks that are free and without content, by the moment of their release.

    Attributes:
        num_blocks: How many there are.
    """

    __slots__ = ("_is_fifo", "_runs", "num_blocks")

    def __init__(self, num_blocks: int, is_fifo: bool) -> None:
        """Have all blocks of a pool, block 0 first.

        Args:
            num_blocks: Of the pool.
            is_fifo: Whether runs are given away in the order in which they came back.
        """
        self.num_blocks = num_blocks
        self._is_fifo = is_fifo
        # The last of a run goes first, so that taking some costs no copy of the rest.
        first = array("i", range(num_blocks - 1, -1, -1))
        self._runs: deque[tuple[int, array[int]]] = deque([(0, first)])

    @property
    def first_tick(self) -> int:
        """When the block came back that is given away next; there is one."""
        return self._runs[0][0]

    def __iter__(self) -> Iterator[tuple[int, BlockId]]:
        """Walk in the order in which they would be given away, each with its release."""
        return ((tick, BlockId(block)) for tick, run in self._runs for block in reversed(run))

    def take(self, most: int) -> "array[int]":
        """Take up to ``most`` blocks, at least one; there are some."""
        run = self._runs[0][1]
        if len(run) <= most:
            self._runs.popleft()
            taken = run[:]
        else:
            taken = run[-most:]
            del run[-most:]
        taken.reverse()
        self.num_blocks -= len(taken)
        return taken

    def give(self, blocks: "array[int]", tick: int) -> None:
        """Take blocks back.

        Args:
            blocks: Ids in token order; they are given away tail first.
            tick: When, later than all that came back before.
        """
        run = (tick, blocks[:])
        if self._is_fifo:
            self._runs.append(run)
        else:
            self._runs.appendleft(run)
        self.num_blocks += len(blocks)
