"""The block table of one sequence: which blocks it holds, and the copies on write of a step.

::

    blocks   7 8 9 | 3 4 | 5
             shared  own   private
             ─── published ──►     (the index's path covers them)

The manager alone changes a table. ``first_published`` and ``duplicates``
live from plan to commit: they are what a failed step has to take back.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ostinato.cache.block import CacheEntry
from ostinato.cache.eviction import RequestSummary
from ostinato.core.identity import PrefixKey
from ostinato.core.ids import BlockId, SlotId
from ostinato.core.plan import CopyRun, StateCopy


@dataclass(slots=True, eq=False)
class BlockTable:
    """The blocks of one sequence, in token order."""

    key: PrefixKey  # identity, tokens so far, images
    blocks: "array[int]"  # block ids of full attention, shape (num_blocks,)
    tenant: bytes = b""  # whom the blocks are charged to
    table_id: int = -1  # unique for the life of a manager; -1 once it is released
    num_slots: int = 0  # leading tokens that have slots; -1 once it is released
    num_planned: int = 0  # tokens that are computed when the step planned last has run
    num_shared_tokens: int = 0  # tokens that hit in whole blocks at admission
    num_copied_tokens: int = 0  # tokens that were copied at admission
    num_seen_tokens: int = 0  # tokens whose blocks were cached at admission, if more than hit
    found: CacheEntry | None = None  # the deepest entry that hit
    writes: bool = True  # whether full blocks are published
    path: Any = None  # the index's record of what is held
    num_published: int = 0  # leading blocks that the path covers
    first_published: int | None = None  # first block that this step published
    duplicates: list[tuple[int, BlockId]] = field(default_factory=list)
    """Positions of this step whose content was published before, and the canonical blocks."""
    copy_source: CacheEntry | None = None  # what is copied from, held until the step has run
    is_forked: bool = False  # whether this step copies its blocks, or to them, for a fork
    needs_settling: bool = False  # whether ``commit`` has something to do
    summary: RequestSummary = field(default_factory=RequestSummary)
    """What the eviction policy learns of the request, and may keep: it has no entry."""
    groups: "tuple[array[int], ...]" = ()  # block ids per group of layers that has rows
    held: Sequence[Any] = ()  # what is held in each group beside full attention
    state_slot: int = -1  # where its running state is kept; -1 without states

    @property
    def num_cached_tokens(self) -> int:
        """Tokens that need not be computed, as of admission."""
        return self.num_shared_tokens + self.num_copied_tokens

    @property
    def publishes(self) -> bool:
        """Whether the running step publishes blocks of it, of known or new content."""
        return self.first_published is not None or bool(self.duplicates)

    @property
    def private_blocks(self) -> "array[int]":
        """Blocks that no index has, in token order."""
        private = self.blocks[self.num_published :]
        if self.duplicates:
            own = [self.blocks[place] for place, _ in sorted(self.duplicates)]
            private = array("i", own) + private
        return private


class StepCopies:
    """What is copied in the running step: slots on write, by group and target block, and states.

    A prompt that shares the beginning of a cached block copies its first slots, and a fork those
    of its parent's last block. A copy of what is itself a copy of this step reads the first source:

        slots of block 7    a b c d          cached
        copied to block 9   a b c .          in this step
        copied to block 12  a b . .          from 7, not from 9

    Attributes:
        state_loads: Copies of states before the step.
        state_saves: Copies of states after it.
    """

    def __init__(self, block_size: int) -> None:
        """Start without a copy."""
        self._block_size = block_size
        self._runs: dict[tuple[int, int], tuple[CopyRun, ...]] = {}
        self.state_loads: list[StateCopy] = []
        self.state_saves: list[StateCopy] = []

    def clear(self) -> None:
        """Note that the step has ended."""
        for copies in (self._runs, self.state_loads, self.state_saves):
            copies.clear()

    def release(self, table: BlockTable) -> None:
        """Note that a table is released within the step: its blocks may be used otherwise."""
        for group, blocks in enumerate(table.groups if self._runs else ()):
            for block in blocks:
                self._runs.pop((group, block), None)

    def of_fork(
        self, parent: BlockTable, child: BlockTable, firsts: Sequence[int], num_tokens: int
    ) -> tuple[CopyRun, ...]:
        """Plan the copies of what a fork does not share: from ``firsts`` on, group by group."""
        runs: tuple[CopyRun, ...] = ()
        pairs = zip(child.groups, parent.groups, firsts, strict=False)  # states have no rows
        for group, (mine, theirs, first) in enumerate(pairs):
            for place in range(first, len(mine)):
                used = min(self._block_size, num_tokens - place * self._block_size)
                runs += self.of_block(group, BlockId(theirs[place]), BlockId(mine[place]), used)
        return runs

    def of_block(
        self, group: int, source: BlockId, target: BlockId, num_tokens: int
    ) -> tuple[CopyRun, ...]:
        """Plan the copy of a block's first slots, around slots that are copies themselves."""
        runs, done = [], 0
        first, target_slot = source * self._block_size, target * self._block_size
        for earlier in self._runs.get((group, source), ()):
            size = min(earlier.num_tokens, num_tokens - done)
            if size > 0:
                runs.append(CopyRun(earlier.source, SlotId(target_slot + done), size, group))
                done += size
        if done < num_tokens:
            slots = SlotId(first + done), SlotId(target_slot + done)
            runs.append(CopyRun(*slots, num_tokens - done, group))
        self._runs[group, target] = tuple(runs)
        return tuple(runs)
