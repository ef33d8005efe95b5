"""The block table of one sequence: which blocks it holds.

::

    blocks   7 8 9 | 3 4 | 5
             shared  own   private
             ─── published ──►     (the index's path covers them)

The manager alone changes a table. ``first_published``, ``duplicates`` and ``copy_source`` are of
one step: what ``commit`` settles and ``fail`` takes back.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ostinato.cache.block import CacheEntry
from ostinato.cache.eviction import RequestSummary
from ostinato.core.identity import PrefixKey
from ostinato.core.ids import BlockId


@dataclass(slots=True, eq=False)
class BlockTable:
    """The blocks of one sequence, in token order."""

    key: PrefixKey  # identity, tokens so far, images
    blocks: "array[int]"  # block ids of full attention, shape (num_blocks,)
    tenant: bytes = b""  # whom the blocks are charged to
    table_id: int = -1  # unique for the life of a manager; -1 once it is released
    live_in: Any = None  # the tables that it is one of; None if it is pinned or released
    num_slots: int = 0  # leading tokens that have slots; -1 once it is released
    num_computed: int = 0  # tokens that have hit, or that a committed step has computed
    num_planned: int = 0  # tokens that are computed when the running step has run
    next_full: int = 0  # number of published tokens that fills the next block; low if not known
    num_shared_tokens: int = 0  # tokens that hit in whole blocks at admission
    num_copied_tokens: int = 0  # tokens that were copied at admission
    num_seen_tokens: int = 0  # tokens whose blocks were cached at admission, if more than hit
    hit_entry: CacheEntry | None = None  # the deepest entry that hit
    writes: bool = True  # whether full blocks are published
    path: Any = None  # the index's record of what is held
    num_published: int = 0  # leading blocks that the path covers
    first_published: int | None = None  # first block that this step published
    duplicates: list[tuple[int, BlockId]] = field(default_factory=list)
    """Positions of this step whose content was published before, and the canonical blocks."""
    copy_source: CacheEntry | None = None  # what is copied from, held until the step has run
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
    def private_blocks(self) -> "array[int]":
        """Blocks that no index has, in token order."""
        private = self.blocks[self.num_published :]
        if self.duplicates:
            own = [self.blocks[place] for place, _ in sorted(self.duplicates)]
            private = array("i", own) + private
        return private
