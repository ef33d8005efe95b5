"""What may the scheduler ask?

One manager over all groups of layers. A sequence's blocks go through it like this::

    match ─► admit ─► grow ─► publish ─► (forward pass) ─► commit ─► … ─► release
                                              └─ raised ──► fail

Rules:

1. ``match`` changes nothing. ``admit``, ``grow`` and ``fork`` either do all or nothing (law 6).
2. ``publish`` makes a block findable before the forward pass that fills it: whoever finds
   it is planned later in the same step or after it (law 5). ``fail`` takes that back.
3. At most ``num_tokens - 1`` tokens of a prompt hit (law 4).
4. Free + held + private = all blocks; without live tables and leases free = all (law 9).
"""

import time
from collections.abc import Callable, Iterable
from functools import partial

from ostinato.cache.block import CacheEntry
from ostinato.cache.block_hash import BlockHasher, DigestFunction, make_digest, sha256
from ostinato.cache.block_table import BlockTable
from ostinato.cache.chronicle import Chronicle
from ostinato.cache.custody import Custody
from ostinato.cache.events import EventLog
from ostinato.cache.ghost import Ghost
from ostinato.cache.group_match import without_tail
from ostinato.cache.group_room import room_to_admit, room_to_grow
from ostinato.cache.group_state import check, describe
from ostinato.cache.groups import Groups
from ostinato.cache.journal import Journal
from ostinato.cache.policies import make_policy
from ostinato.cache.policies.contract import PolicyFactory
from ostinato.cache.prefix_index import PrefixMatch
from ostinato.cache.stats import CacheStats
from ostinato.cache.step_copies import StepCopies
from ostinato.core.config import CacheConfig
from ostinato.core.identity import PrefixKey
from ostinato.core.plan import CopyRun


class CacheManager:
    """The cache heart: who holds which block, and what is found where.

    Attributes:
        config: As given.
        groups: Pools, index and windows.
        pool: Of the full-attention group.
        index: Of the full-attention group.
        events: What outsiders are told; None if ``keep_event_batches`` is 0.
        chronicle: What is remembered of admissions and losses, for explanations.
        custody: Leases, erasure, epochs and reset.
        ghost: Estimates for other sizes and policies; None if there are none.
    """

    def __init__(
        self,
        config: CacheConfig,
        clock: Callable[[], float] = time.monotonic,
        digest: DigestFunction | None = None,
        policy: PolicyFactory | None = None,
    ) -> None:
        """Make an empty cache.

        Args:
            config: Sizes, index, order and policy.
            clock: Seconds that never fall; for ages and leases.
            digest: Replaces the configured digest function of the hash index.
            policy: Makes another eviction policy than the configured one.
        """
        self.config = config
        self.block_size = config.block_size
        self.events = EventLog(clock, config.keep_event_batches) if _told(config) else None
        hasher = BlockHasher(config.block_size, sha256)
        plain = digest is None and config.digest == "sha256"
        index_hasher = hasher if plain else BlockHasher(
            config.block_size, digest or make_digest(config.digest)
        )  # fmt: skip
        self.chronicle = Chronicle(config, clock)
        self._journal = Journal(self.events, hasher, self.chronicle)
        policy = policy or partial(make_policy, config.policy)
        self.groups = Groups(config, hasher, index_hasher, self._journal, clock, policy)
        self._journal.stats.reuse_distances = self.groups.pool.reuse_distances
        self.pool, self.index = self.groups.pool, self.groups.index
        self._copies = StepCopies(config.block_size)
        self._tables: dict[int, BlockTable] = {}
        counts = self._journal.stats.first
        accounts = self.pool.accounts
        self.ghost = Ghost(config, clock, counts, accounts) if _haunted(config) else None
        self.custody = Custody(self.groups, self._journal, clock, self._tables, self.ghost)

    @property
    def stats(self) -> CacheStats:
        """Counters since the start, and the ghost's estimates as of now."""
        stats = self._journal.stats
        if self.ghost is not None:
            stats.ghosts = self.ghost.estimates()
        return stats

    @property
    def num_live_tables(self) -> int:
        """Sequences that hold blocks."""
        return len(self._tables)

    @property
    def live_tables(self) -> list[BlockTable]:
        """What sequences hold; leases have tables of their own."""
        return list(self._tables.values())

    def blocks_for(self, num_tokens: int) -> int:
        """Number of blocks that so many tokens fill or begin."""
        return self.groups.blocks_for(num_tokens)

    def match(self, key: PrefixKey) -> PrefixMatch:
        """Find the longest cached prefix of a prompt: at most all but its last token.

        Effects: none.
        """
        if not self.config.enable_prefix_caching:
            return PrefixMatch(self.block_size)
        return self.groups.match(key, len(key.tokens) - 1)

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
    ) -> tuple[BlockTable, tuple[CopyRun, ...]] | None:
        """Hold what matched and allocate a prompt's blocks.

        Args:
            key: The sequence; every token so far gets a slot for full attention.
            match: What ``match`` just said of it.
            writes: Whether its full blocks will be published.
            preempted: Whether it ran before; counted apart.
            most_new: New tokens that get slots in windows now; None is all of them.

        Returns:
            The block table, and the slots to copy in this step; None if not even one new
            token fits, and then nothing has changed. Where only the source of a copy stands
            in the way, the copy is given up.
        """
        shared, tail, num_tokens = len(match.blocks) * self.block_size, match.tail, len(key.tokens)
        copied = 0 if tail is None else tail.num_tokens
        hit = shared + copied
        wanted = num_tokens if most_new is None else min(num_tokens, hit + most_new)
        room = room_to_admit(self.groups, key, match, wanted)
        if room <= hit and tail is not None:
            match, tail = without_tail(match), None
            hit, copied = shared, 0
            room = room_to_admit(self.groups, key, match, wanted)
        if room <= hit:
            return None
        visit = self.chronicle.arrive(key, match.blocks, copied, not preempted)
        if self.config.enable_prefix_caching:
            table = self.groups.hold(key, match)
            is_common = key.identity.head is None  # so it is with most
            table.writes = writes and (is_common or self.custody.may_continue(key, hit))
        else:
            table = self.groups.empty_table(key)
        if visit is not None:
            table.visit, visit.writes = visit, table.writes
        if self.pool.past.remembers and not preempted:
            self.groups.look_up(table)
        self.groups.take(table, num_tokens, room)
        table.num_planned = hit
        self._tables[id(table)] = table
        tenant = key.identity.owner
        self._journal.stats.count_lookup(tenant, num_tokens, shared, copied, preempted)
        if shared and not preempted:
            self.index.count_hit(table.path)
        self.custody.used(key, hit)
        copies = self._copies.of_tail(table, match) if tail is not None else ()
        if self.ghost is not None and not preempted:
            self.ghost.on_admit(table, num_tokens)
        return table, copies

    def num_slots(self, table: BlockTable) -> int:
        """Return how many tokens of a table have slots in every group."""
        return min(map(len, table.groups)) * self.block_size

    def growable(self, table: BlockTable, num_tokens: int) -> int:
        """Return how many tokens ``grow`` could give slots to, at most ``num_tokens``.

        Effects: none.
        """
        if num_tokens <= len(table.blocks) * self.block_size and not table.windows:
            return num_tokens  # so it is in most decodes
        return room_to_grow(self.groups, table, num_tokens)

    def grow(self, table: BlockTable, num_tokens: int) -> bool:
        """Give a table slots for its first ``num_tokens`` tokens in every group.

        Returns:
            False, with no effect, if a pool has too few free blocks.
        """
        if num_tokens <= len(table.blocks) * self.block_size and not table.windows:
            return True
        if room_to_grow(self.groups, table, num_tokens) < num_tokens:
            return False
        self.chronicle.acting = table.visit
        self.groups.take(table, num_tokens, num_tokens)
        return True

    def publish(self, table: BlockTable, num_tokens: int) -> None:
        """Make the full blocks among the first tokens findable, before they are computed.

        Args:
            table: Whose blocks.
            num_tokens: Tokens that will have been computed after this step.
        """
        table.num_planned = num_tokens
        last = num_tokens // self.block_size
        if table.writes and last > table.num_published:
            blocks = self.groups.publish(table, last, self._journal)
            if table.visit is not None:
                self.chronicle.published(table.visit, blocks)

    def commit(self, tables: Iterable[BlockTable]) -> None:
        """Note that the step that these tables took part in has run."""
        self._copies.clear()
        for table in tables:
            # Most decodes have nothing to settle, and there is one per sequence and step.
            if (
                table.first_adopted is not None
                or table.windows
                or table.duplicates
                or table.tail_path is not None
            ):
                self.groups.settle(table)
        self.chronicle.step_ended()
        self._journal.commit()

    def fail(self, tables: Iterable[BlockTable]) -> None:
        """Take back what a failed step published, and release all its tables.

        Args:
            tables: Every table of the step, in the order of the plan.
        """
        self._copies.clear()
        failed = list(tables)
        for table in failed:
            self.groups.release_tails(table)
        for table in reversed(failed):  # whoever found a block is planned after its publisher
            self.groups.retract(table, self._journal)
            if self.ghost is not None:
                self.ghost.on_release(table, 0)
            self._leave(table, table.num_published * self.block_size)
        self.chronicle.step_ended()
        self._journal.fail()

    def release(self, table: BlockTable, num_tokens: int, num_output_tokens: int = 0) -> None:
        """Let go of a table: published blocks stay findable, the others become scratch.

        Args:
            table: Whose blocks; not to be used any more.
            num_tokens: Its tokens that are computed; a partial last block may be sealed.
            num_output_tokens: Tokens that were generated, for the eviction policy.
        """
        table.turn.num_output_tokens = num_output_tokens
        self.groups.release_tails(table)
        tail = None
        if table.writes and self.config.seal_tails:
            tail = self.groups.seal(table, num_tokens)
        if self.ghost is not None:
            self.ghost.on_release(table, num_tokens)
        self._leave(table, num_tokens, tail)
        self._journal.commit()  # a tenant above its quota has just lost some

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
        self.chronicle.acting = table.visit
        child = self.groups.fork(table, num_tokens)
        if child is None:
            return None
        blocks = child.blocks[: child.num_published]
        child.visit = self.chronicle.arrive(child.key, blocks, 0, is_first=False)
        if child.visit is not None and table.visit is not None:
            child.visit.name, child.visit.writes = table.visit.name, child.writes
        firsts = [
            self.groups.num_shared(table, group, num_tokens) for group in range(len(table.groups))
        ]
        runs = self._copies.of_fork(table, child, firsts, num_tokens)
        child.num_planned = num_tokens
        self._tables[id(child)] = child
        return child, runs

    def check(self) -> None:
        """Assert every invariant of pools and indexes; slow, for tests.

        Raises:
            AssertionError: With a picture of the whole state.
        """
        try:
            self.chronicle.check()
            check(self.groups, [*self._tables.values(), *self.custody.tables()])
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.describe()}") from error

    def describe(self) -> str:
        """Return the whole state as text, one line per block."""
        return describe(self.groups, self.live_tables)

    def _leave(self, table: BlockTable, num_tokens: int, tail: CacheEntry | None = None) -> None:
        """Let go of all that a table holds.

        Args:
            table: Whose blocks; what it had alone becomes scratch.
            num_tokens: Its tokens that are computed.
            tail: What the index has of its partial last block.
        """
        self._journal.stats.sealed_tails += tail is not None
        self.groups.scrap(table, tail is not None)
        if table.visit is not None:
            findable = table.num_published * self.block_size if tail is None else num_tokens
            self.chronicle.leave(table, num_tokens, findable, self.groups.quote(table))
        self.groups.let_go(table, tail)
        del self._tables[id(table)]
        if table.key.identity.epoch < self.custody.epoch:
            self.custody.forget_stale()


def _haunted(config: CacheConfig) -> bool:
    """Whether a ghost shall watch."""
    return config.num_ghost_blocks > 0 and config.enable_prefix_caching


def _told(config: CacheConfig) -> bool:
    """Whether anybody may listen to events."""
    return config.keep_event_batches > 0
