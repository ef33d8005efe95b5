"""The block table of one sequence: which blocks it holds.

::

    blocks   7 8 9 | 3 4 | 5
             shared  own   private
             ─── published ──►     (the index's path covers them)

The manager alone changes a table. ``first_published`` and ``duplicates`` live from plan to commit:
they are what a failed step has to take back.
"""

from array import array
from dataclasses import dataclass, field
from typing import Any

from ostinato.cache.eviction import RequestSummary
from ostinato.core.identity import PrefixKey
from ostinato.core.ids import BlockId


@dataclass(slots=True, eq=False)
class BlockTable:
    """The blocks of one sequence, in token order.

    Attributes:
        key: The sequence: identity, tokens so far, images.
        blocks: Block ids, shape (num_blocks,).
        num_shared_tokens: Tokens that hit in whole blocks at admission.
        num_copied_tokens: Tokens that were copied at admission.
        writes: Whether full blocks are published.
        table_id: Its number, unique for the life of a manager; -1 once it is released.
        num_planned: Tokens that are computed when the step that was planned last has run.
        path: The index's record of what is held; None with prefix caching off.
        num_published: Leading blocks that the path covers.
        tail_path: Holds the source of a copy until the step has run.
        first_published: First block that this step published; None if it published none.
        summary: What the eviction policy will learn of it.
        duplicates: Positions whose content was published before, and the canonical block.
        num_slots: Leading tokens that have slots; -1 once it is released.
        needs_settling: Whether the step that has run left something to do.
    """

    key: PrefixKey
    blocks: "array[int]"
    num_shared_tokens: int = 0
    num_copied_tokens: int = 0
    writes: bool = True
    table_id: int = -1
    num_planned: int = 0
    path: Any = None
    num_published: int = 0
    tail_path: Any = None
    first_published: int | None = None
    summary: RequestSummary = field(default_factory=RequestSummary)
    duplicates: list[tuple[int, BlockId]] = field(default_factory=list)
    num_slots: int = 0
    needs_settling: bool = False

    @property
    def num_cached_tokens(self) -> int:
        """Tokens that need not be computed, as of admission."""
        return self.num_shared_tokens + self.num_copied_tokens

    @property
    def tenant(self) -> bytes:
        """Whose blocks they are."""
        return self.key.identity.owner

    @property
    def groups(self) -> "tuple[array[int], ...]":
        """One row of block ids per group of layers."""
        return (self.blocks,)

    @property
    def private_blocks(self) -> "array[int]":
        """Blocks that no index has, in token order."""
        if not self.duplicates:
            return self.blocks[self.num_published :]
        duplicates = {position for position, _ in self.duplicates}
        own = [self.blocks[i] for i in sorted(duplicates)]
        return array("i", own) + self.blocks[self.num_published :]
