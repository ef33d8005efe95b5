"""Block tables: which blocks a sequence holds, and which tables are live.

::

    blocks   7 8 9 | 3 4 | 5
             shared  own   private
             ─── published ──►     (the index's path covers them)

The manager alone changes a table. ``first_published``, ``duplicates`` and ``copy_source`` are of
one step: what ``commit`` settles and ``fail`` takes back.

Of the live tables it is known which are in the running step, and which calls they rule out. A table
is numbered when it becomes live or is pinned, and loses its number when it is released. A refused
call leaves everything unchanged.
"""

import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import index
from sys import maxsize
from threading import get_ident
from typing import Any

from ostinato.cache.block import CacheEntry
from ostinato.cache.eviction import RequestSummary
from ostinato.core.errors import ReleasedTable, StepInProgress, TableOverrun, WrongThread
from ostinato.core.identity import PrefixKey
from ostinato.core.ids import BlockId


@dataclass(slots=True, eq=False)
class BlockTable:
    """The blocks of one sequence, in token order."""

    key: PrefixKey  # identity, tokens so far, images
    blocks: "array[int]"  # block ids of full attention, shape (num_blocks,)
    tenant: bytes = b""  # whom the blocks are charged to
    table_id: int = 0  # unique for the life of a manager, from 1 on
    live_in: Any = None  # the tables that it is one of; None if it is pinned or released
    num_slots: int = 0  # leading tokens that have slots; none once it is released
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
    state_slot: int | None = None  # where its running state is kept; None without states

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


class LiveTables:
    """The tables of one cache, by number.

    Attributes:
        live: Those that sequences hold.
        pinned: Those that are held for no sequence.
        step: Those that ``commit`` settles, and whether they were forked. One that has found
            another's new blocks comes after it.
        owner: The thread whose tables are live, or that changed the cache last.
    """

    def __init__(self) -> None:
        """Begin without a table, for the thread that is running."""
        self.live: dict[int, BlockTable] = {}
        self.pinned: dict[int, BlockTable] = {}
        self.step: dict[BlockTable, bool] = {}
        self.owner = get_ident()
        self._last_number = self._last_of_step = 0

    def add(self, table: BlockTable, is_pinned: bool = False) -> None:
        """Number a table that holds its blocks."""
        self._last_number += 1
        table.table_id = self._last_number
        (self.pinned if is_pinned else self.live)[table.table_id] = table
        table.live_in = None if is_pinned else self

    def remove(self, table: BlockTable) -> None:
        """Remove a table that has released its blocks."""
        del (self.live if table.table_id in self.live else self.pinned)[table.table_id]
        self.step.pop(table, None)
        table.num_slots, table.live_in = 0, None

    @property
    def decodes(self) -> list[BlockTable]:
        """Tables of the running step that have nothing to settle: they fill no block."""
        tables = [table for table in self.live.values() if table.num_planned > table.num_computed]
        return [table for table in tables if table not in self.step]

    @property
    def unplanned(self) -> list[BlockTable]:
        """Live tables that were admitted since the last step ended and are not in this one."""
        tables: list[BlockTable] = []
        for number in reversed(self.live):
            if number <= self._last_of_step:
                break
            tables.append(self.live[number])
        return [table for table in tables if table not in self.step and table not in self.decodes]

    def end_step(self) -> dict[BlockTable, bool]:
        """Begin another step; return the tables of this one."""
        step, self.step = self.step, {}
        self._last_of_step = self._last_number
        return step

    @property
    def is_publishing(self) -> bool:
        """Whether blocks are findable that are not computed; windows publish known ones anew."""
        return any(t.first_published is not None or t.duplicates for t in self.step)

    def check_thread(self) -> None:
        """Raise WrongThread while tables of another thread that has not ended are live."""
        if (thread := get_ident()) != self.owner:
            if self.live and self.owner in sys._current_frames():
                raise WrongThread(
                    f"the cache belongs to the thread that its {len(self.live)} live tables "
                    "were admitted by: release them, or give each thread a cache of its own"
                )
            self.owner = thread

    def check_live(self, table: BlockTable) -> None:
        """Raise ReleasedTable if a table is not live here, WrongThread if another thread calls."""
        if table.live_in is not self:
            raise ReleasedTable(
                "the table is not live in this cache: it was released, its step failed (which "
                "releases its tables), or another cache admitted it; admit the sequence again"
            )
        if self.owner != get_ident():
            self.check_thread()

    def check_pinned(self, table: BlockTable) -> None:
        """Raise ReleasedTable if a table is not pinned, or not here."""
        if self.pinned.get(table.table_id) is not table:
            raise ReleasedTable("the table is not pinned in this cache, or not any more")

    def check_range(
        self, table: BlockTable, num_tokens: int, verb: str, minimum: int, maximum: int = maxsize
    ) -> None:
        """Raise TableOverrun outside a range, or what ``check_live`` raises."""
        if table.live_in is not self or self.owner != get_ident():
            self.check_live(table)
        maximum = min(maximum, table.num_slots, len(table.key.tokens))
        if not minimum <= index(num_tokens) <= maximum:
            raise TableOverrun(
                f"{verb} {num_tokens} tokens: {table.num_planned} of the table's tokens have hit "
                f"or were published, it has {table.num_slots} slots and {len(table.key.tokens)} "
                f"tokens; {verb} {minimum} to {maximum}, or append tokens and grow the table first"
            )

    def check_publish(self, table: BlockTable, num_tokens: int) -> None:
        """Raise StepInProgress if others have joined the step since a table published in it.

        Each could hold what the other published: then no order is left to take a failed step back.
        """
        self.check_range(table, num_tokens, "publish", table.num_planned)
        if (
            table.num_planned > table.num_computed
            and table in self.step
            and table is not next(reversed(self.step))
        ):
            raise StepInProgress(
                "the table has published in this step, and other tables have joined it since: "
                "commit the step before the table publishes more"
            )

    def check_release(self, table: BlockTable, num_tokens: int) -> None:
        """Raise TableOverrun if fewer tokens are planned, StepInProgress in the running step."""
        self.check_range(table, num_tokens, "release", 0, table.num_planned)
        if table in self.step or table.num_planned > table.num_computed:
            raise StepInProgress(
                "the table is in the running step, and its blocks are not computed or copied yet: "
                "commit the step first, or fail it, which releases its tables"
            )

    def check_between_steps(self) -> None:
        """Raise StepInProgress while blocks are published and not computed."""
        if self.is_publishing:
            raise StepInProgress("a step is under way: commit or fail it first")
