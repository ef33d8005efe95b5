"""Copy-on-write: the slots that are copied in the running step.

A prompt that shares the beginning of a cached block copies its first slots, and a fork those
of its parent's last block; both before or after the writes of the step that they are planned in.
A copy of what is itself a copy of this step reads the first source::

    slots of block 7    a b c d          cached
    copied to block 9   a b c .          in this step
    copied to block 12  a b . .          from 7, not from 9
"""

from collections.abc import Sequence

from ostinato.cache.block_table import BlockTable
from ostinato.core.ids import BlockId, SlotId
from ostinato.core.plan import CopyRun


class StepCopies:
    """The copies of the running step, by group and target block."""

    def __init__(self, block_size: int) -> None:
        """Start without a copy."""
        self._block_size = block_size
        self._runs: dict[tuple[int, int], list[CopyRun]] = {}

    def clear(self) -> None:
        """Note that the step has ended."""
        self._runs.clear()

    def of_tail(
        self, group: int, source: BlockId, target: BlockId, num_tokens: int
    ) -> tuple[CopyRun, ...]:
        """Plan the copy of the first slots of a cached block, in one group."""
        return tuple(self._plan(group, source, target, num_tokens))

    def of_fork(
        self, parent: BlockTable, child: BlockTable, firsts: Sequence[int], num_tokens: int
    ) -> tuple[CopyRun, ...]:
        """Plan the copies of what a fork does not share.

        Args:
            parent: Whose blocks are copied.
            child: Whose blocks are written.
            firsts: The first block that is not shared, group by group.
            num_tokens: Tokens that both continue.
        """
        runs: list[CopyRun] = []
        pairs = zip(child.groups, parent.groups, firsts, strict=True)
        for group, (mine, theirs, first) in enumerate(pairs):
            for place in range(first, len(mine)):
                used = min(self._block_size, num_tokens - place * self._block_size)
                runs += self._plan(group, BlockId(theirs[place]), BlockId(mine[place]), used)
        return tuple(runs)

    def _plan(self, group: int, source: BlockId, target: BlockId, num_tokens: int) -> list[CopyRun]:
        """Plan the copy of a block's first slots, around slots that are copies themselves."""
        runs, done = [], 0
        first, target_slot = source * self._block_size, target * self._block_size
        for earlier in self._runs.get((group, source), ()) if self._runs else ():
            size = min(earlier.num_tokens, num_tokens - done)
            if size > 0:
                runs.append(CopyRun(earlier.source, SlotId(target_slot + done), size, group))
                done += size
        if done < num_tokens:
            slots = SlotId(first + done), SlotId(target_slot + done)
            runs.append(CopyRun(*slots, num_tokens - done, group))
        self._runs[group, target] = runs
        return runs
