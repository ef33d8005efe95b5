"""Which slots are copied in this step?

A prompt that leaves a cached block in its middle copies the first slots of it, and a fork those
of its parent's last block; both before or after the writes of the step that they are planned in.
A copy of what is itself a copy of this step reads the first source::

    slots of block 7    a b c d          cached
    copied to block 9   a b c .          in this step
    copied to block 12  a b . .          from 7, not from 9
"""

from collections.abc import Sequence

from ostinato.cache.block_table import BlockTable
from ostinato.cache.prefix_index import PrefixMatch
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

    def of_tail(self, table: BlockTable, match: PrefixMatch) -> tuple[CopyRun, ...]:
        """Plan the copies of a block that a prompt leaves in its middle, in every group.

        Args:
            table: The prompt's, with a block of its own for what is copied.
            match: What it holds, and the tail.
        """
        assert match.tail is not None
        place, count = len(match.blocks), match.tail.num_tokens
        runs = tuple(self._plan(0, match.tail.block, BlockId(table.blocks[place]), count))
        for group, source in enumerate(match.window_tails, 1):
            target = BlockId(table.groups[group][place])
            runs += tuple(self._plan(group, source.block, target, count))
        return runs

    def of_fork(
        self, parent: BlockTable, child: BlockTable, firsts: Sequence[int], num_tokens: int
    ) -> tuple[CopyRun, ...]:
        """Plan the copies of what a fork does not share.

        Args:
            parent: Whose blocks are copied.
            child: Who gets them.
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
