"""The cache manager: admission, growth, publication and release of block tables.

A sequence's blocks go through it like this::

    match ─► admit ─► grow ─► publish ─► (forward pass) ─► commit ─► … ─► release
                                              └─ raised ──► fail

Rules:

1. ``match`` changes nothing. ``admit``, ``grow`` and ``fork`` either do all or nothing (law 6).
2. ``publish`` makes a block findable before the forward pass that fills it: a request that finds
   it is planned later in the same step or after it (law 5). ``fail`` takes that back.
3. At most ``num_tokens - 1`` tokens of a prompt hit (law 4).
4. Free + held + private = all blocks; without live tables and pins free = all (law 9).
5. Calls in a wrong order are refused before anything changes. One thread at a time: another one
   may go on when no table is live.
"""

import time
from array import array
from collections.abc import Callable, Iterable
from dataclasses import replace
from threading import get_ident

from ostinato.cache.block import CacheEntry
from ostinato.cache.block_shares import BlockShares
from ostinato.cache.block_table import BlockTable
from ostinato.cache.eviction import LeastRecentlyUsed
from ostinato.cache.layer_group import shorten
from ostinato.cache.observer import CacheObserver, Observers
from ostinato.cache.pool import BlockPool, FreeBlocks
from ostinato.cache.prefix_index import PrefixMatch
from ostinato.cache.radix_index import RadixIndex
from ostinato.cache.table_blocks import MakeIndex, MakeLayerGroups, TableBlocks
from ostinato.core.config import CacheConfig
from ostinato.core.errors import (
    PromptTooLong,
    ReleasedTable,
    StaleMatch,
    StepInProgress,
    TableOverrun,
    WrongThread,
)
from ostinato.core.identity import PrefixKey
from ostinato.core.plan import CopyRun
from ostinato.core.request import RequestContext

_UNKNOWN = RequestContext()


class CacheManager(TableBlocks):
    """Which request holds which blocks, and what is found where.

    All that is given a table raises ``ReleasedTable`` if that is not a live table of this cache,
    and ``TableOverrun`` if it has fewer slots, or its sequence fewer tokens, than are asked for.

    Attributes:
        epoch: Raised with each update of the weights; part of every new identity.
    """

    def __init__(
        self,
        config: CacheConfig,
        clock: Callable[[], float] = time.monotonic,
        shares: BlockShares | None = None,
        make_index: MakeIndex = RadixIndex,
        observers: Iterable[CacheObserver] = (),
        may_publish: Callable[[PrefixKey, int], bool] = lambda key, num_hit: True,
        epoch: int = 0,
        make_unused: Callable[[int], FreeBlocks] = FreeBlocks,
        make_groups: MakeLayerGroups = lambda observers, copies: (),
    ) -> None:
        """Make an empty cache.

        Args:
            config: Sizes and order.
            clock: Seconds that never fall; for ages.
            shares: Who may take whose blocks; all from all, under LRU, by default.
            make_index: Makes the prefix index.
            observers: Are told of what happens.
            may_publish: Whether a sequence that begins with a public prefix and hit so many
                tokens may publish what it computes.
            epoch: Of the weights.
            make_unused: Makes so many blocks without content.
            make_groups: Makes the groups of layers beside full attention, if there are any.
        """
        told = Observers(observers)
        shares = BlockShares(LeastRecentlyUsed()) if shares is None else shares
        pool = BlockPool(make_unused(config.num_blocks), shares, clock, told)
        super().__init__(config, pool, make_index, make_groups, told)
        self.epoch = epoch
        self._may_publish = may_publish
        self._weights: bytes | None = None
        self._tables: dict[int, BlockTable] = {}
        self._pinned: dict[int, BlockTable] = {}
        self._num_tables = 0
        self._thread = get_ident()

    @property
    def num_live_tables(self) -> int:
        """Sequences that hold blocks."""
        return len(self._tables)

    @property
    def live_tables(self) -> list[BlockTable]:
        """What sequences hold; what is pinned for no sequence is not among them."""
        return list(self._tables.values())

    @property
    def pinned_tables(self) -> list[BlockTable]:
        """What is held for no sequence."""
        return list(self._pinned.values())

    # --- one sequence ---

    def match(self, key: PrefixKey) -> PrefixMatch:
        """Find the longest cached prefix of all but the last token of a prompt; no effects."""
        if not self.config.enable_prefix_caching:
            return self.no_match()
        return self.match_first(key, len(key.tokens) - 1)

    def match_first(self, key: PrefixKey, num_tokens: int) -> PrefixMatch:
        """Find the longest cached prefix among a sequence's first tokens; no effects."""
        match = self.index.match(key, num_tokens)
        return shorten(match, key, self.layer_groups) if self.layer_groups else match

    def no_match(self) -> PrefixMatch:
        """Return the match of a request that does not read the cache."""
        return PrefixMatch(self.block_size)

    def admit(
        self,
        key: PrefixKey,
        match: PrefixMatch,
        writes: bool = True,
        preempted: bool = False,
        most_new: int | None = None,
        context: RequestContext = _UNKNOWN,
    ) -> tuple[BlockTable, tuple[CopyRun, ...]] | None:
        """Hold what matched and allocate a prompt's blocks.

        Args:
            key: The sequence; every token so far gets a slot for full attention.
            match: What ``match`` just returned for it.
            writes: Whether its full blocks will be published.
            preempted: Whether its prompt was admitted before; counted apart.
            most_new: New tokens that get slots in sliding windows now; None is all of them.
            context: What observers may want to know of its request.

        Returns:
            The block table, and the slots to copy in this step; None if not even one new
            token fits now, and then nothing has changed. A copy is given up if only its source
            stands in the way.

        Raises:
            PromptTooLong: It would not fit an empty cache.
            StaleMatch: The match is of another key or cache, or the index has changed since.
            WrongThread: Another thread's tables are live.
        """
        self._check_thread()
        self._check_match(key, match)
        num_tokens, hit = len(key.tokens), match.num_tokens
        wanted = num_tokens if most_new is None else min(num_tokens, hit + most_new)
        room = self._room_to_admit(key, match, wanted)
        if room <= hit and match.tail is not None:
            match = replace(match, tail=None, group_tails=())
            hit = match.num_tokens
            room = self._room_to_admit(key, match, wanted)
        if room <= hit:
            self._check_fits(num_tokens)
            return None
        if self.config.enable_prefix_caching:
            table = self._hold(key, match)
            table.writes = writes and (
                key.identity.public_prefix is None or self._may_publish(key, hit)
            )
        else:
            match = self.no_match()
            table = self._make_table(key, array("i"), self._hold_groups(key, match))
            table.writes = False
        self._enter(table, hit)
        for notify in self.observers.on_admit:
            notify(table, context, preempted)
        self._take(table, num_tokens, room)
        return table, self._copies_of_tail(table, match) if match.tail is not None else ()

    def growable(self, table: BlockTable, num_tokens: int) -> int:
        """Return how many tokens ``grow`` could give slots to, at most ``num_tokens``."""
        if num_tokens <= table.num_slots:
            return num_tokens
        self._check_table(table)
        return self._room_to_grow(table, num_tokens)

    def grow(self, table: BlockTable, num_tokens: int) -> bool:
        """Give a table slots for its first tokens; False, with no effect, if they do not fit."""
        if num_tokens > table.num_slots:
            if self.growable(table, num_tokens) < num_tokens:
                return False
            self._take(table, num_tokens, num_tokens)
        return True

    def publish(self, table: BlockTable, num_tokens: int) -> None:
        """Make the full blocks among the first tokens findable, before they are computed.

        Args:
            table: Whose blocks.
            num_tokens: Tokens that will have been computed after this step.
        """
        last = num_tokens // self.block_size
        if num_tokens > table.num_slots or (last > table.num_published and table.writes):
            self._check_table(table)
            self._check_range(table, num_tokens, "publish")
            self._publish(table, num_tokens)
        table.num_planned = num_tokens

    def commit(self, tables: Iterable[BlockTable]) -> None:
        """Note that the step that these tables took part in has run."""
        self.copies.clear()
        for table in tables:
            # Most decodes have nothing to settle, and there is one per sequence and step.
            if table.needs_settling:
                self._check_table(table)
                self._settle(table)
        self._end_step()

    def fail(self, tables: Iterable[BlockTable]) -> None:
        """Take back what a failed step published, and release all its tables.

        Args:
            tables: Every table of the step, once, in the order of the plan.

        Raises:
            StepInProgress: A table that published in this step is missing.
        """
        failed = list(tables)
        self._check_failed(failed)
        self.copies.clear()
        for table in failed:
            self._release_tail(table)
        for table in reversed(failed):  # what found a block is planned after its publisher
            self._retract(table)
            self._leave(table, table.num_published * self.block_size, False)
        self._end_step()

    def release(self, table: BlockTable, num_tokens: int, num_output_tokens: int = 0) -> None:
        """Release a table: published blocks stay findable, the others become free.

        Args:
            table: Whose blocks; not to be used any more.
            num_tokens: Its tokens that are computed; a partial last block may be published.
            num_output_tokens: Tokens that were generated, for the eviction policy.

        Raises:
            StepInProgress: It has published in this step: ``commit`` or ``fail`` comes first.
        """
        self._check_table(table)
        self._check_range(table, num_tokens, "release")
        if table.first_published is not None:
            raise StepInProgress(
                "a table cannot be released between publish and commit: its blocks are findable "
                "and not computed; commit the step, or fail it, which releases its tables"
            )
        table.summary.num_output_tokens = num_output_tokens
        self._release_tail(table)
        self._leave(table, num_tokens, self._publish_partial(table, num_tokens))
        self.settle()

    def fork(
        self, table: BlockTable, num_tokens: int
    ) -> tuple[BlockTable, tuple[CopyRun, ...]] | None:
        """Make a table for a second continuation of the same tokens (``n > 1``).

        Published blocks are shared; private ones are copied, in this step, after its writes.

        Args:
            table: The parent's; its tokens are computed in this step or before.
            num_tokens: Tokens that both continue.

        Returns:
            The child's table and the slots to copy; None, with no effect, if it does not fit.
        """
        self._check_table(table)
        self._check_range(table, num_tokens, "fork")
        needed = self.blocks_for(num_tokens)
        shared = min(table.num_published, num_tokens // self.block_size)
        missing = [needed - shared]
        missing += [group.num_to_fork(held, needed) for group, held in self._pairs(table)]
        pairs = zip(self.pools, missing, strict=True)
        if any(count > pool.num_free_for(table.tenant) for pool, count in pairs):
            return None
        child = self._fork(table, shared)
        self._enter(child, num_tokens)
        for notify in self.observers.on_fork:
            notify(table, child)
        self._take(child, num_tokens, num_tokens)
        firsts = [needed - count for count in missing]
        return child, self.copies.of_fork(table, child, firsts, num_tokens)

    # --- between steps ---

    def begin_step(self) -> None:
        """Note that a step is about to be planned."""
        for notify in self.observers.on_step:
            notify(self.unpin)

    def settle(self) -> None:
        """Tell observers that an operation is complete."""
        for notify in self.observers.on_settle:
            notify()

    def pin(self, key: PrefixKey, num_tokens: int) -> BlockTable:
        """Hold the cached whole blocks among a sequence's first tokens for no sequence.

        Raises:
            StepInProgress: A step is under way.
        """
        self.check_between_steps()
        num_tokens -= num_tokens % self.block_size
        table = self._hold(key, self.match_first(key, num_tokens))
        table.writes, table.num_planned = False, num_tokens
        table.table_id = self._num_tables = self._num_tables + 1
        self._pinned[table.table_id] = table
        return table

    def unpin(self, table: BlockTable) -> None:
        """Release what ``pin`` returned."""
        if self._pinned.get(table.table_id) is not table:
            raise ReleasedTable("the table is not pinned in this cache, or not any more")
        del self._pinned[table.table_id]
        self._release_path(table)
        table.table_id = table.num_slots = -1

    def remove(self, belongs: Callable[[CacheEntry], bool]) -> int:
        """Free every evictable block whose entry matches; return how many."""
        return sum(pool.remove(belongs, contents) for pool, contents in self.groups)

    def new_epoch(self, weights: bytes | None = None) -> None:
        """Note that the weights have changed: nothing computed before may hit.

        Args:
            weights: Their fingerprint, for requests that wait; None leaves them theirs.

        Effects: evictable blocks are removed; live tables publish nothing more, and what they
        hold is removed when they are released.
        """
        self.epoch += 1
        self._weights = weights
        for table in self._tables.values():
            table.writes = False
        for notify in self.observers.on_clear:
            notify(everything=False)
        self._remove_stale()

    def rekey(self, key: PrefixKey) -> PrefixKey:
        """Return a waiting sequence's key under the present weights."""
        weights = key.identity.weights if self._weights is None else self._weights
        identity = replace(key.identity, epoch=self.epoch, weights=weights)
        return PrefixKey(identity, key.tokens, key.images)

    def check_between_steps(self) -> None:
        """Raise ``StepInProgress`` while blocks are published and not computed."""
        if self._publishing:
            raise StepInProgress("a step is under way: commit or fail it first")

    # --- for pictures and checks ---

    def check(self) -> None:
        """Assert every invariant of pool and index, and show the whole state; slow, for tests."""
        tables = [*self._tables.values(), *self._pinned.values()]
        try:
            self._check_state(tables)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.describe()}") from error

    def describe(self) -> str:
        """Return the whole state as text, one line per block and per live table."""
        lines = {block: "no content" for block in range(self.config.num_blocks)}
        for run in self.index.runs():
            for entry in run.entries:
                for place, block in enumerate(entry.blocks):
                    name = entry.name_of(place, self.block_size)
                    lines[block] = f"{name!r} after run {run.parent}, {entry.ref_count} holders"
        blocks = [f"block {block}: {line}" for block, line in lines.items()]
        tables = [f"table {table}" for table in self._tables.values()]
        return "\n".join([f"free order: {list(self.pool.free_order())}", *blocks, *tables])

    # --- small print ---

    def _enter(self, table: BlockTable, num_planned: int) -> None:
        """Number a table; it is live from now on."""
        table.table_id = self._num_tables = self._num_tables + 1
        table.num_planned = num_planned
        self._tables[table.table_id] = table

    def _leave(self, table: BlockTable, num_tokens: int, sealed: bool) -> None:
        """Release all that a table holds: private blocks first, then what it shares.

        Observers are told in between, while the published blocks are held.
        """
        if table.duplicates or len(table.blocks) > table.num_published:
            self.pool.free(table.private_blocks, table.tenant)
        findable = num_tokens if sealed else table.num_published * self.block_size
        for notify in self.observers.on_release:
            notify(table, num_tokens, findable, sealed)
        self._release_path(table)
        del self._tables[table.table_id]
        table.table_id = table.num_slots = -1
        if table.key.identity.epoch < self.epoch:
            self._remove_stale()

    def _end_step(self) -> None:
        """Tell observers that a step has ended."""
        self._publishing.clear()
        for notify in self.observers.on_commit:
            notify()
        self.settle()

    def _remove_stale(self) -> None:
        """Remove what was computed under old weights and is not held."""
        self.remove(lambda entry: entry.identity.epoch < self.epoch)

    # --- what is refused ---

    def _check_thread(self) -> None:
        thread = get_ident()
        if thread != self._thread:
            if self._tables:
                raise WrongThread(
                    f"the cache belongs to the thread that its {len(self._tables)} live tables "
                    "were admitted by: release them, or give each thread a cache of its own"
                )
            self._thread = thread

    def _check_table(self, table: BlockTable) -> None:
        if self._tables.get(table.table_id) is not table:
            raise ReleasedTable(
                "the table is not live in this cache: it was released, its step failed (which "
                "releases its tables), or another cache admitted it; admit the sequence again"
            )

    def _check_range(self, table: BlockTable, num_tokens: int, verb: str) -> None:
        most = min(table.num_slots, len(table.key.tokens))
        if num_tokens > most:
            raise TableOverrun(
                f"{verb} {num_tokens} tokens: the table has {table.num_slots} slots and its "
                f"sequence {len(table.key.tokens)} tokens; append tokens and grow the table first"
            )

    def _check_match(self, key: PrefixKey, match: PrefixMatch) -> None:
        is_fresh = match.key is key and match.index is self.index
        if is_fresh and match.version == self.index.version:
            return
        if match.key is not None or len(match.blocks):
            raise StaleMatch(
                "the match is of another key or another cache, or the cache has changed since: "
                "match the key again right before admitting it"
            )

    def _check_fits(self, num_tokens: int) -> None:
        if self.blocks_for(num_tokens) > self.config.num_blocks:
            raise PromptTooLong(
                f"the prompt has {num_tokens} tokens and needs {self.blocks_for(num_tokens)} "
                f"blocks of {self.block_size}, but the pool has {self.config.num_blocks}: shorten "
                "the prompt, or raise num_blocks"
            )

    def _check_failed(self, failed: list[BlockTable]) -> None:
        for table in failed:
            self._check_table(table)
        if len({table.table_id for table in failed}) < len(failed):
            raise ReleasedTable("a table is listed twice: a step fails each of its tables once")
        if self._publishing.keys() - {table.table_id for table in failed}:
            raise StepInProgress("a table that published in this step is missing: fail all of them")
