"""Which blocks does one sequence hold?

::

    blocks   7 8 9 | 3 4 | 5
             shared  own   private
             ─── published ──►     (the index's path covers them)

The table is owned by its sequence; the manager alone changes it. ``first_adopted`` and
``duplicates`` live from plan to commit: they are what a failed step has to take back.
"""

from array import array
from dataclasses import dataclass, field
from typing import Any

from ostinato.cache.policies.contract import Turn
from ostinato.cache.visit import Visit
from ostinato.cache.window_content import WindowTable
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
        windows: What is held in each window group.
        num_planned: Tokens that are computed when the step that was planned last has run.
        writes: Whether full blocks are published.
        path: The index's note of what is held; None with prefix caching off.
        num_published: Leading blocks that the path covers.
        tail_path: Holds the source of a copy until the step has run.
        first_adopted: First block that this step published; None if it published none.
        turn: What the eviction policy will learn of it.
        duplicates: Positions whose content was published before, and the canonical block.
        visit: What the chronicle notes of it; None if it notes nothing.
    """

    key: PrefixKey
    blocks: "array[int]"
    num_shared_tokens: int = 0
    num_copied_tokens: int = 0
    windows: list[WindowTable] = field(default_factory=list)
    num_planned: int = 0
    writes: bool = True
    path: Any = None
    num_published: int = 0
    tail_path: Any = None
    first_adopted: int | None = None
    turn: Turn = field(default_factory=Turn)
    duplicates: list[tuple[int, BlockId]] = field(default_factory=list)
    visit: Visit | None = None

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
        """One block table per group of layers: full attention, then each window."""
        if not self.windows:
            return (self.blocks,)
        return (self.blocks, *(window.blocks for window in self.windows))

    @property
    def private_blocks(self) -> "array[int]":
        """Blocks that no index has, in token order."""
        if not self.duplicates:
            return self.blocks[self.num_published :]
        duplicates = {position for position, _ in self.duplicates}
        own = [self.blocks[i] for i in sorted(duplicates)]
        return array("i", own) + self.blocks[self.num_published :]
