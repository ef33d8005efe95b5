"""Which tables are live, which are in the running step, and which calls they rule out.

A table is numbered when it becomes live or is pinned, and loses its number when it is released.
A refused call leaves everything unchanged.
"""

import sys
from operator import index
from sys import maxsize
from threading import get_ident

from ostinato.cache.block_table import BlockTable
from ostinato.core.errors import ReleasedTable, StepInProgress, TableOverrun, WrongThread


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
        table.table_id, table.num_slots, table.live_in = -1, -1, None

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
