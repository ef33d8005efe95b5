"""Which tables are live, and which calls are refused for it, before anything changes.

A table is numbered when it becomes live or is pinned, and loses its number when it is released.
"""

from threading import get_ident

from ostinato.cache.block_table import BlockTable
from ostinato.core.errors import ReleasedTable, StepInProgress, TableOverrun, WrongThread


class LiveTables:
    """The tables of one cache, by number.

    Attributes:
        live: Those that sequences hold.
        pinned: Those that are held for no sequence.
    """

    def __init__(self) -> None:
        """Begin without a table, for the thread that is running."""
        self.live: dict[int, BlockTable] = {}
        self.pinned: dict[int, BlockTable] = {}
        self._last_number = 0
        self._thread = get_ident()

    def enter(self, table: BlockTable, num_planned: int, is_pinned: bool = False) -> None:
        """Number a table, of which so many tokens are planned."""
        self._last_number += 1
        table.table_id, table.num_planned = self._last_number, num_planned
        (self.pinned if is_pinned else self.live)[table.table_id] = table

    def leave(self, table: BlockTable) -> None:
        """Take a table out that has released its blocks."""
        del (self.live if table.table_id in self.live else self.pinned)[table.table_id]
        table.table_id = table.num_slots = -1

    def check_thread(self) -> None:
        """Raise WrongThread while another thread's tables are live."""
        thread = get_ident()
        if thread != self._thread:
            if self.live:
                raise WrongThread(
                    f"the cache belongs to the thread that its {len(self.live)} live tables "
                    "were admitted by: release them, or give each thread a cache of its own"
                )
            self._thread = thread

    def check_live(self, table: BlockTable) -> None:
        """Raise ReleasedTable if a table is not live, or not here."""
        if self.live.get(table.table_id) is not table:
            raise ReleasedTable(
                "the table is not live in this cache: it was released, its step failed (which "
                "releases its tables), or another cache admitted it; admit the sequence again"
            )

    def check_pinned(self, table: BlockTable) -> None:
        """Raise ReleasedTable if a table is not pinned, or not here."""
        if self.pinned.get(table.table_id) is not table:
            raise ReleasedTable("the table is not pinned in this cache, or not any more")

    def check_range(self, table: BlockTable, num_tokens: int, verb: str) -> None:
        """Raise TableOverrun, or what ``check_live`` raises."""
        self.check_live(table)
        if num_tokens > min(table.num_slots, len(table.key.tokens)):
            raise TableOverrun(
                f"{verb} {num_tokens} tokens: the table has {table.num_slots} slots and its "
                f"sequence {len(table.key.tokens)} tokens; append tokens and grow the table first"
            )

    def check_publish(self, table: BlockTable, num_tokens: int) -> None:
        """Raise what ``check_range`` raises, or StepInProgress for more tokens after a fork."""
        self.check_range(table, num_tokens, "publish")
        if table.is_forked and num_tokens > table.num_planned:
            raise StepInProgress(
                "a table and its fork publish no more before the copies between them have run: "
                "commit the step first"
            )

    def check_planned(self, table: BlockTable, num_tokens: int, verb: str) -> None:
        """Raise TableOverrun if fewer tokens are planned, or what ``check_range`` raises."""
        self.check_range(table, num_tokens, verb)
        if num_tokens > table.num_planned:
            raise TableOverrun(
                f"{verb} {num_tokens} tokens: {table.num_planned} of the table's tokens have hit "
                f"or were planned by publish; {verb} what is computed"
            )

    def check_committed(self, table: BlockTable) -> None:
        """Raise StepInProgress if a table has published in the running step, or was forked."""
        if table.publishes or table.is_forked:
            raise StepInProgress(
                "a table cannot be released between publish or fork and commit: its blocks are not "
                "computed or copied; commit the step, or fail it, which releases its tables"
            )

    def check_failed(self, failed: list[BlockTable]) -> None:
        """Raise if these are not all live tables that have published in the step, each once."""
        for table in failed:
            self.check_live(table)
        given = {table.table_id for table in failed}
        if len(given) < len(failed):
            raise ReleasedTable("a table is listed twice: a step fails each of its tables once")
        if not self._publishing <= given:
            raise StepInProgress("a table that published in this step is missing: fail all of them")

    def check_between_steps(self) -> None:
        """Raise StepInProgress while blocks are published and not computed."""
        if self._publishing:
            raise StepInProgress("a step is under way: commit or fail it first")

    @property
    def _publishing(self) -> set[int]:
        """The numbers of tables that have published blocks in the running step."""
        return {number for number, t in self.live.items() if t.publishes}
