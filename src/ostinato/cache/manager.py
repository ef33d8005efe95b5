"""The cache manager: admission, growth, publication and release of block tables.

A sequence's blocks go through it like this::

    match ─► admit ─► grow ─► publish ─► (forward pass) ─► commit ─► … ─► release
                                              └─ raised ──► fail

``publish`` makes a block findable before the forward pass that fills it: a request that finds it
is planned later in the same step or after it (law 5). ``fail`` takes that back. At most
``num_tokens - 1`` tokens of a prompt hit (law 4).

For layers that keep something else than full attention ``hybrid.manager`` extends its steps.
"""

import time
from array import array
from collections.abc import Callable, Iterable
from operator import index
from threading import RLock, get_ident
from typing import Any

from ostinato.cache.block import CacheEntry
from ostinato.cache.block_table import BlockTable, LiveTables
from ostinato.cache.eviction import BlockShares, LeastRecentlyUsed
from ostinato.cache.observer import CacheObserver, Observers
from ostinato.cache.pool import BlockPool
from ostinato.cache.prefix_index import Contents, PrefixIndex, PrefixMatch
from ostinato.cache.radix_index import RadixIndex
from ostinato.core.config import CacheConfig
from ostinato.core.errors import EmptyPrompt, PromptTooLong, StaleMatch
from ostinato.core.identity import Identity, PrefixKey
from ostinato.core.ids import SlotId
from ostinato.core.plan import CopyRun, StateCopy
from ostinato.core.request import RequestContext

MakeIndex = Callable[[BlockPool, int], PrefixIndex[Any]]
"""Makes an empty index over a pool, from the number of tokens in a block."""

_UNKNOWN = RequestContext()


class CacheManager:
    """Matches, admits, grows, publishes and releases the block tables of requests.

    Methods that take a table raise ``ReleasedTable`` if they would change one that is not live in
    this cache, and ``TableOverrun`` if it has fewer slots or tokens than they need.
    """

    chunk_unit: int | None = None
    """Chunks of a prefill end at its multiples, but for the last; None if anywhere."""

    def __init__(
        self,
        config: CacheConfig,
        clock: Callable[[], float] = time.monotonic,
        shares: BlockShares | None = None,
        make_index: MakeIndex = RadixIndex,
        observers: Iterable[CacheObserver] = (),
        may_publish: Callable[[PrefixKey, int], bool] = lambda key, num_hit: True,
        epoch: int = 0,
        make_pool: type[BlockPool] = BlockPool,
    ) -> None:
        """Make an empty cache.

        Args:
            config: Sizes, and what is published.
            clock: Seconds that never fall; for ages.
            shares: Who may take whose blocks; all from all, under LRU, by default.
            make_index: Makes the prefix index.
            observers: Are called for what happens.
            may_publish: Whether a sequence that begins with a public prefix and hit a number of
                tokens may publish what it computes.
            epoch: Of the weights.
            make_pool: Makes the pool, which says in which order free blocks are allocated.
        """
        self.config, self.block_size = config, config.block_size
        self.epoch = epoch  # of the weights; part of every new identity
        self.observers = Observers(observers)
        shares = BlockShares(LeastRecentlyUsed()) if shares is None else shares
        self.pool = make_pool(config.num_blocks, shares, clock, self.observers)
        self.index = make_index(self.pool, config.block_size)
        self.pools = [self.pool]  # one per group of layers: full attention alone has one
        self.contents: list[Contents] = [self.index]  # what knows the content of each
        self.tables = LiveTables()
        self._lock = RLock()  # a call that raises WrongThread may come in the middle of another
        self._copies: dict[tuple[int, int], tuple[CopyRun, ...]] = {}
        """Of the running step, by group and target block."""
        self._may_publish = may_publish
        self._weights: bytes | None = None
        self._num_stale_tables = 0  # that were admitted under older weights

    @property
    def num_live_tables(self) -> int:
        """Sequences that hold blocks."""
        return len(self.tables.live)

    @property
    def version(self) -> int:
        """Raised when the cache changes so that older matches are stale."""
        return self.index.version

    @property
    def state_copies(self) -> tuple[tuple[StateCopy, ...], tuple[StateCopy, ...]]:
        """The states to copy before and after the running step."""
        return (), ()

    # --- one sequence ---

    def match(self, key: PrefixKey, num_tokens: int | None = None) -> PrefixMatch:
        """Find the longest cached prefix among a sequence's first tokens; no effects.

        By default these are all but the last token, which has to be computed (law 4).
        """
        limit = len(key.tokens) - 1 if num_tokens is None else min(num_tokens, len(key.tokens))
        with self._lock:
            return self.index.match(key, max(0, limit))

    def admit(
        self,
        key: PrefixKey,
        match: PrefixMatch,
        writes: bool = True,
        most_new: int | None = None,
        context: RequestContext = _UNKNOWN,
    ) -> tuple[BlockTable, tuple[CopyRun, ...]] | None:
        """Hold what matched and allocate a prompt's blocks.

        Args:
            key: The sequence; every token so far gets a slot for full attention.
            match: What ``match`` just returned for it.
            writes: Whether its full blocks will be published.
            most_new: New tokens that get slots in sliding windows now; None is all of them.
            context: What observers may want to know of its request.

        Returns:
            The block table, and the slots to copy in this step; None if not even one new
            token fits now, and then nothing has changed. The copy of a tail is left out if only its
            source stands in the way.

        Raises:
            RequestError: It has no tokens, or would not fit an empty cache.
            PromptTooLong: Leases and guarantees leave too few blocks, and no sequence is running.
            StaleMatch: The match is of another key or cache, or older than the last change; or
                the key is not of the present weights.
            WrongThread: Another thread's tables are live.
        """
        with self._lock:
            if self.tables.owner != get_ident():
                self.tables.check_thread()
            is_own = match.key is key and match.index is self.index
            if not is_own or match.version != self.version or key.identity.epoch != self.epoch:
                raise self._stale_match(key)
            num_tokens, hit = len(key.tokens), match.num_tokens
            end = num_tokens if most_new is None else min(num_tokens, hit + most_new)
            room = self._room_to_admit(key, match, end)
            if room <= hit and match.tail is not None:
                match = match.without_tail()
                hit = match.num_tokens
                room = self._room_to_admit(key, match, end)
            if room <= hit:
                self.check_fits(num_tokens)
                self._check_wait(key, match)
                return None
            may_publish = key.identity.base is None or self._may_publish(key, hit)
            table = self._hold(key, match)
            table.writes = writes and may_publish and self.config.enable_prefix_caching
            table.num_computed = table.num_planned = hit
            self.tables.add(table)
            if match.tail is not None or self.tables.step:  # it may hold what the step computes
                self.tables.step[table] = False
            if on_admit := self.observers.on_admit:
                self.observers.call(on_admit, table, context)
            self._allocate_slots(table, num_tokens, room)
            next_full = hit - hit % self.block_size + self.block_size
            table.next_full = min(next_full, table.num_slots)
            return table, self._copies_of_tail(table, match) if match.tail is not None else ()

    def _stale_match(self, key: PrefixKey) -> StaleMatch:
        """Return why a match is not of this key, or not of this cache as it is now."""
        return StaleMatch(
            f"the key is of epoch {key.identity.epoch}, the weights of {self.epoch}: rekey it"
            if key.identity.epoch != self.epoch
            else "the match is of another key or another cache, or the cache has changed since: "
            "match the key again right before admitting it"
        )

    def _check_wait(self, key: PrefixKey, match: PrefixMatch) -> None:
        """Raise PromptTooLong if no running sequence will free what a prompt lacks."""
        if not self.tables.live:
            free = [pool.num_free_for(key.identity.owner) for pool in self.pools]
            raise PromptTooLong(
                f"the prompt needs {self.blocks_for(len(key.tokens))} blocks, {len(match.blocks)} "
                f"of them are cached, and no sequence is running that would free more: its tenant "
                f"may have {free} (per group of layers, the cached ones included), and "
                f"{len(self.tables.pinned)} prefixes are pinned; release a lease or a guarantee, "
                "or raise num_blocks"
            )

    def growable(self, table: BlockTable, num_tokens: int) -> int:
        """Return how many tokens ``grow`` could give slots to, at most ``num_tokens``."""
        if num_tokens <= table.num_slots:
            return num_tokens
        self.tables.check_live(table)
        return self._room_to_grow(table, index(num_tokens))

    def grow(self, table: BlockTable, num_tokens: int) -> bool:
        """Give a table slots for its first tokens; False, with no effect, if they do not fit."""
        if num_tokens > table.num_slots:
            if self.growable(table, num_tokens) < num_tokens:
                return False
            with self._lock:
                self._allocate_slots(table, num_tokens, num_tokens)
        return True

    def publish(self, table: BlockTable, num_tokens: int) -> None:
        """Make the full blocks among the tokens that this step will have computed findable."""
        tables = table.live_in
        if (  # a decode that fills no block needs no more than these comparisons
            num_tokens - table.num_planned != 1
            or num_tokens >= table.next_full
            or num_tokens > len(table.key.tokens)
            or tables is not self.tables
            or tables.owner != get_ident()
        ):
            if num_tokens // self.block_size > table.num_published and table.writes:
                self.tables.check_publish(table, num_tokens)
                with self._lock:
                    self._publish(table, num_tokens)
            else:
                self.tables.check_range(table, num_tokens, "publish", table.num_planned)
            next_full = num_tokens - num_tokens % self.block_size + self.block_size
            table.next_full = min(next_full, table.num_slots)
        table.num_planned = num_tokens

    def advance(self, table: BlockTable, num_tokens: int) -> None:
        """Note that the last step computed more tokens than were planned: drafts that were right.

        Only before a release: ``publish`` takes them with those of the next step.

        Effects: full blocks among them become findable.

        Raises:
            StepInProgress: The table is in the running step.
            TableOverrun: It has fewer slots or tokens.
        """
        self.tables.check_release(table, table.num_planned)
        self.tables.check_range(table, num_tokens, "advance", table.num_planned)
        with self._lock:
            if num_tokens // self.block_size > table.num_published and table.writes:
                self._publish(table, num_tokens)
                self._settle(table)
                del self.tables.step[table]
            table.num_planned = table.num_computed = num_tokens

    def end_of_chunk(
        self, table: BlockTable, start: int, end: int, waiting: Iterable[PrefixKey]
    ) -> int:
        """Return where a chunk ends, at ``end`` or before, given what waits, or ``start``."""
        return end

    def deepest_hit(self, table: BlockTable, key: PrefixKey, num_tokens: int) -> int:
        """Return where a hit of another key ends, once the tokens that it shares are computed."""
        start = num_tokens - num_tokens % self.block_size
        block = key.block_key(start, num_tokens)
        return start + block.num_common_tokens(block)

    def commit(self) -> None:
        """Note that the step has run: what its tables have published is computed."""
        with self._lock:
            if self.tables.owner != get_ident():
                self.tables.check_thread()
            for table in self.tables.live.values():
                table.num_computed = table.num_planned
            for table in self._end_step():
                self._settle(table)
            self.settle()

    def fail(self) -> None:
        """Roll a failed step back: take back what it published, and release all its tables.

        These are the tables that have published or were forked since the last commit, and those
        that were admitted since, whether they have published or not.
        """
        with self._lock:
            self.tables.check_thread()
            failed = [*self.tables.unplanned, *self.tables.decodes, *self._end_step()]
            for table in failed:
                self._release_tail(table)
            for table in reversed(failed):  # what has found a block comes after its publisher
                self._retract(table)
                self._release_all(table, table.num_published * self.block_size, False)
            self.settle()

    def release(self, table: BlockTable, num_tokens: int, num_output_tokens: int = 0) -> None:
        """Release a table: published blocks stay findable, the others become free.

        Args:
            table: Whose blocks; not to be used any more.
            num_tokens: Its tokens that are computed; a partial last block may be published.
            num_output_tokens: Tokens that were generated, for the eviction policy.

        Raises:
            StepInProgress: It is in the running step: ``commit`` or ``fail`` comes first.
        """
        self.tables.check_release(table, num_tokens)
        with self._lock:
            table.summary.num_output_tokens = num_output_tokens
            self._release_all(table, num_tokens, self._publish_partial(table, num_tokens))
            self.settle()

    def fork(self, table: BlockTable) -> tuple[BlockTable, tuple[CopyRun, ...]] | None:
        """Make a table for a second continuation of all that is planned of a sequence (``n > 1``).

        Published blocks are shared; private ones are copied, in this step, after its writes.

        Returns:
            The child's table and the slots to copy; None, with no effect, if it does not fit.
        """
        self.tables.check_live(table)
        num_tokens = table.num_planned
        needed, firsts = self.blocks_for(num_tokens), self._shared_by_fork(table, num_tokens)
        pairs = zip(self.pools, firsts, strict=True)
        if any(needed - first > pool.num_free_for(table.tenant) for pool, first in pairs):
            return None
        with self._lock:
            child = self._fork(table, firsts[0])
            self.tables.add(child)
            self._num_stale_tables += table.key.identity.epoch < self.epoch
            child.num_planned = num_tokens
            for each in (table, child):  # the parent keeps its place: others may have found it
                self.tables.step[each] = True
            if on_fork := self.observers.on_fork:
                self.observers.call(on_fork, table, child)
            self._allocate_slots(child, num_tokens, num_tokens)
            return child, self._copies_of_fork(table, child, firsts)

    # --- between steps ---

    def begin_step(self) -> None:
        """Note that a step is about to be planned."""
        with self._lock:
            if self.tables.owner != get_ident():
                self.tables.check_thread()
            if on_step := self.observers.on_step:
                self.observers.call(on_step, self.unpin)

    def settle(self) -> None:
        """Tell observers that a step or an operation between steps is complete."""
        on_settle, tables = self.observers.on_settle, self.tables
        if on_settle and not (tables.step and tables.is_publishing):
            self.observers.call(on_settle)

    def pin(self, key: PrefixKey, num_tokens: int) -> BlockTable:
        """Hold the cached whole blocks among a sequence's first tokens for no sequence.

        Raises:
            StepInProgress: A step is under way.
        """
        with self._lock:
            self.tables.check_thread()
            self.tables.check_between_steps()
            num_tokens -= num_tokens % self.block_size
            table = self._hold(key, self.match(key, num_tokens).without_tail())
            table.writes = False
            table.num_computed = table.num_planned = table.num_shared_tokens
            self.tables.add(table, is_pinned=True)
            self._num_stale_tables += key.identity.epoch < self.epoch
            return table

    def unpin(self, table: BlockTable) -> None:
        """Release what ``pin`` returned."""
        with self._lock:
            self.tables.check_thread()
            self.tables.check_pinned(table)
            self._release_held(table)

    def remove(self, belongs: Callable[[CacheEntry], bool]) -> int:
        """Free every evictable block whose entry matches; return how many."""
        with self._lock:
            self.tables.check_thread()
            pairs = zip(self.pools, self.contents, strict=True)
            return sum(pool.remove(belongs, contents) for pool, contents in pairs)

    def new_epoch(self, weights: bytes | None = None) -> None:
        """Note that the weights have changed: nothing computed before may hit.

        The fingerprint of the new ones is for ``rekey``; None keeps that of each key.

        Effects: evictable blocks are removed; live tables publish nothing more, and what they
        hold is removed when they are released.
        """
        Identity(b"" if weights is None else weights)  # raises InvalidIdentity
        with self._lock:
            self.tables.check_thread()
            self.epoch += 1
            self._weights = weights
            for table in self.tables.live.values():
                table.writes = False
            self.cleared(everything=False)
            self._num_stale_tables = len(self.tables.live) + len(self.tables.pinned)
            for pool in self.pools:
                pool.stale_before = self.epoch if self._num_stale_tables else 0
            self.remove(lambda entry: entry.identity.epoch < self.epoch)

    def cleared(self, everything: bool) -> None:
        """Tell observers that the weights have changed, or that everything was removed."""
        if on_clear := self.observers.on_clear:
            self.observers.call(on_clear, everything)

    def rekey(self, key: PrefixKey) -> PrefixKey:
        """Return a waiting sequence's key under the present weights."""
        weights = key.identity.weights if self._weights is None else self._weights
        return key.with_identity(key.identity.renewed(weights, self.epoch))

    def check(self) -> None:
        """Assert that pool, index and tables agree; slow, for tests."""
        tables = [*self.tables.live.values(), *self.tables.pinned.values()]
        sources = [table.copy_source for table in tables if table.copy_source is not None]
        self.index.check([table.path for table in tables], sources)
        cached = [b for run in self.index.runs() for entry in run.entries for b in entry.blocks]
        self.pool.check([*cached, *(block for table in tables for block in table.private_blocks)])
        for table in tables:
            assert len(set(table.blocks)) == len(table.blocks), "a block twice in a table"
        for pool in self.pools if not tables else ():
            assert pool.num_free == pool.num_blocks, "blocks leaked (law 9)"

    def check_fits(self, num_tokens: int) -> None:
        """Raise EmptyPrompt or PromptTooLong if ``num_tokens`` can never be admitted."""
        if not num_tokens:
            raise EmptyPrompt("the prompt has no tokens: at least one is needed")
        if num_tokens > self.config.num_blocks * self.block_size:
            raise PromptTooLong(
                f"the prompt has {num_tokens} tokens and needs {self.blocks_for(num_tokens)} "
                f"blocks of {self.block_size}, but the pool has {self.config.num_blocks}: shorten "
                "the prompt, or raise num_blocks or kv_cache_memory"
            )

    def blocks_for(self, num_tokens: int) -> int:
        """Number of blocks that ``num_tokens`` fill or begin."""
        return -(-num_tokens // self.block_size)

    # --- the steps of these, which HybridCacheManager extends ---

    def _room_to_admit(self, key: PrefixKey, match: PrefixMatch, num_tokens: int) -> int:
        """Return how many tokens could have slots if a match were held; 0 if not all blocks fit."""
        missing = -(-len(key.tokens) // self.block_size) - len(match.blocks)
        if missing > self.pool.num_unused or self.pool.shares.are_limited:
            free = self.pool.num_free_for(key.identity.owner) - match.num_idle_blocks
            return num_tokens if missing <= free else 0
        return num_tokens

    def _room_to_grow(self, table: BlockTable, num_tokens: int) -> int:
        """Return how many tokens could have slots, at most ``num_tokens``."""
        free = self.pool.num_free_for(table.tenant)
        return min(num_tokens, (len(table.blocks) + free) * self.block_size)

    def _shared_by_fork(self, table: BlockTable, num_tokens: int) -> list[int]:
        """Return how many leading blocks a fork would share in each pool; it takes the others."""
        return [table.num_published]

    def _hold(self, key: PrefixKey, match: PrefixMatch) -> BlockTable:
        """Hold a match, and the source of what will be copied; the table is not live yet."""
        table = BlockTable(key, match.blocks[:], key.identity.owner)
        table.groups, table.num_published = (table.blocks,), len(table.blocks)
        table.num_shared_tokens = match.num_shared_tokens
        table.num_copied_tokens = match.num_tokens - match.num_shared_tokens
        table.hit_entry = match.entries[-1] if match.entries else None
        table.path, table.copy_source = self.index.acquire(key, match)
        return table

    def _fork(self, table: BlockTable, num_shared: int) -> BlockTable:
        """Share a table's first blocks, which are published, with a new one."""
        child = BlockTable(table.key.copy(), table.blocks[:num_shared], table.tenant)
        child.groups = (child.blocks,)
        for position, canonical in table.duplicates:
            child.blocks[position] = canonical
        child.writes, child.num_published = table.writes, num_shared
        child.path = self.index.fork(table.path)
        return child

    def _allocate_slots(self, table: BlockTable, num_tokens: int, num_window_tokens: int) -> None:
        """Give a table slots; the caller knows that there is room."""
        missing = -(-num_tokens // self.block_size) - len(table.blocks)
        if missing > 0:
            table.blocks.extend(self.pool.allocate(table, missing, self.index))
        table.num_slots = len(table.blocks) * self.block_size

    def _copies_of_tail(self, table: BlockTable, match: PrefixMatch) -> tuple[CopyRun, ...]:
        """Plan the copy of a tail into the block after the whole blocks that hit."""
        tail, target = match.tail, table.blocks[len(match.blocks)]
        return () if tail is None else self._copy(tail.block, target, tail.num_tokens)

    def _copies_of_fork(
        self, table: BlockTable, child: BlockTable, firsts: list[int]
    ) -> tuple[CopyRun, ...]:
        """Plan the copies of what a fork does not share: from ``firsts`` on, group by group."""
        runs: tuple[CopyRun, ...] = ()
        pairs = zip(table.groups, child.groups, firsts, strict=False)  # states have no rows
        for group, (source_blocks, own_blocks, first) in enumerate(pairs):
            for place in range(first, len(own_blocks)):
                used = min(self.block_size, child.num_planned - place * self.block_size)
                runs += self._copy(source_blocks[place], own_blocks[place], used, group)
        return runs

    def _copy(
        self, source: int, target: int, num_tokens: int, group: int = 0
    ) -> tuple[CopyRun, ...]:
        """Plan the copy of a block's first slots (copy on write).

        A slot that is itself copied to in this step is read where that copy reads it::

            slots of block 7    a b c d          cached
            copied to block 9   a b c .          in this step
            copied to block 12  a b . .          from 7, not from 9
        """
        first, to, runs, done = source * self.block_size, target * self.block_size, [], 0
        for earlier in self._copies.get((group, source), ()):
            size = min(earlier.num_tokens, num_tokens - done)
            if size > 0:
                runs.append(CopyRun(earlier.source, SlotId(to + done), size, group))
                done += size
        if done < num_tokens:
            slots = SlotId(first + done), SlotId(to + done)
            runs.append(CopyRun(*slots, num_tokens - done, group))
        self._copies[group, target] = tuple(runs)
        return tuple(runs)

    def _publish(self, table: BlockTable, num_tokens: int) -> None:
        """Make a table's full blocks among its first tokens findable; there are new ones."""
        first, last = table.num_published, num_tokens // self.block_size
        blocks, end = table.blocks[first:last], last * self.block_size
        table.path, result = self.index.publish(table.path, table.key, blocks, end, table.summary)
        table.num_published = last
        step = self.tables.step
        step[table] = step.pop(table, False)  # at the end: after all whose blocks it has found
        table.duplicates.extend(result.duplicates)
        fresh = first + len(result.duplicates)  # they come before new content
        if fresh < last and table.first_published is None:
            table.first_published = fresh
        if on_publish := self.observers.on_publish:
            self.observers.call(on_publish, table, first, last, result)

    def _end_step(self) -> Iterable[BlockTable]:
        """Begin another step; return what there is to settle of this one."""
        self._copies.clear()
        return self.tables.end_step()

    def _settle(self, table: BlockTable) -> None:
        """Release the sources of copies, and exchange duplicates for canonical blocks."""
        self._release_tail(table)
        table.first_published = None
        for position, canonical in table.duplicates:
            own = array("i", [table.blocks[position]])
            table.blocks[position] = canonical
            self.pool.free(own, table.tenant)
        table.duplicates.clear()

    def _retract(self, table: BlockTable) -> None:
        """Take back what a table published in this step."""
        if table.first_published is not None:
            table.num_published, table.first_published = table.first_published, None
            table.path, removal = self.index.retract(table.path, table.num_published)
            if on_retract := self.observers.on_retract:
                self.observers.call(on_retract, table, removal)

    def _publish_partial(self, table: BlockTable, num_tokens: int) -> bool:
        """Make the partial last block of an ended sequence findable, if there is one."""
        full, rest = divmod(num_tokens, self.block_size)
        is_next = table.num_published == full and not table.duplicates
        if not (rest and is_next and table.writes and self.config.seal_tails):
            return False
        blocks = table.blocks[full : full + 1]
        table.path, result = self.index.publish(table.path, table.key, blocks, num_tokens)
        table.num_published += not result.num_known
        return not result.num_known

    def _release_tail(self, table: BlockTable) -> None:
        """Release the source of a copy."""
        if table.copy_source is not None:
            self.pool.release((table.copy_source,))
            table.copy_source = None

    def _release_path(self, table: BlockTable) -> None:
        """Release what a table shares, and evict what its tenant has above its quota."""
        self.index.release(table.path, table.summary)
        if self.pool.shares.are_limited:
            self.pool.enforce_quota(table, self.index)

    def _release_all(self, table: BlockTable, num_tokens: int, sealed: bool) -> None:
        """Release all that a table holds: private blocks first, then what it shares.

        Observers are called in between, while the published blocks are held.
        """
        if table.duplicates or len(table.blocks) > table.num_published:
            self.pool.free(table.private_blocks, table.tenant)
        findable = num_tokens if sealed else table.num_published * self.block_size
        if on_release := self.observers.on_release:
            self.observers.call(on_release, table, num_tokens, findable, sealed)
        self._release_held(table)

    def _release_held(self, table: BlockTable) -> None:
        """Release what a table shares, and with it the table."""
        self._release_path(table)
        self.tables.remove(table)
        if table.key.identity.epoch < self.epoch:
            self._remove_stale()

    def _remove_stale(self) -> None:
        """Remove what tables of old weights have released; with the last of them, all is gone."""
        self._num_stale_tables -= 1
        for pool, contents in zip(self.pools, self.contents, strict=True):
            pool.remove_stale(contents)
            pool.stale_before = self.epoch if self._num_stale_tables else 0
