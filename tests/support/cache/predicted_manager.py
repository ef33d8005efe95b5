"""A cache manager whose every call an oracle has predicted."""

from collections.abc import Callable, Sequence
from typing import TypeVar

from ostinato.cache.block_table import BlockTable
from ostinato.cache.manager import CacheManager
from ostinato.cache.prefix_index import PrefixMatch
from ostinato.core.errors import PromptTooLong
from ostinato.core.identity import PrefixKey
from ostinato.core.plan import CopyRun
from ostinato.core.request import RequestContext
from ostinato.core.tokens import TOKEN_BYTES
from ostinato.observe.introspection import cached_blocks
from ostinato.settings import PrefixCacheConfig
from tests.support.cache.cache_oracle import CacheOracle, Table
from tests.support.cache.whole_state import whole_state

T = TypeVar("T")


class PredictedManager:
    """Hands each call to the manager and to the oracle, and compares what they say.

    Whatever is refused has changed nothing, in any cache.

    Attributes:
        oracle: None of a cache that it does not know, or that others have changed.
    """

    def __init__(self, manager: CacheManager, config: PrefixCacheConfig) -> None:
        """Begin with an empty cache."""
        self.oracle = CacheOracle.of(config)
        self._manager = manager
        self._expected: dict[BlockTable, Table] = {}
        self._seen = self._mark()

    # --- calls ---

    def match(self, key: PrefixKey) -> PrefixMatch:
        """Look a key up."""
        self._follow()
        found = self._manager.match(key)
        if self.oracle is not None:
            self.oracle.check_match(key, found)
        return found

    def admit(
        self, key: PrefixKey, found: PrefixMatch, writes: bool, preempted: bool
    ) -> tuple[BlockTable, tuple[CopyRun, ...]] | None:
        """Admit a prompt; None if it does not fit, now or ever."""

        def admit() -> tuple[BlockTable, tuple[CopyRun, ...]] | None:
            try:
                context = RequestContext(is_readmission=preempted)
                return self._manager.admit(key, found, writes=writes, context=context)
            except PromptTooLong:
                assert self.oracle is None or self.oracle.never_fits(len(key))
                return None

        admitted = self._unless_changed(admit, lambda admitted: admitted is None)
        given = () if admitted is None else admitted[0].blocks[len(found.blocks) :]
        if self.oracle is not None:
            table = self.oracle.admit(key, found, writes, list(given))
            self._expect(admitted, table)
        return admitted

    def grow(self, table: BlockTable, num_tokens: int) -> bool:
        """Give a table blocks for so many tokens, if there are any."""
        num_held = len(table.blocks)
        fits = self._unless_changed(
            lambda: self._manager.grow(table, num_tokens), lambda fits: not fits
        )
        if self.oracle is not None:
            self.oracle.given = list(table.blocks[num_held:])
            assert fits == self.oracle.grow(self._expected[table], num_tokens), "fits, or not"
        return fits

    def append(self, table: BlockTable, token: int) -> None:
        """Append a token that was sampled."""
        self._follow()
        table.key.append(token)
        self._seen = self._mark()

    def publish(self, table: BlockTable, num_tokens: int) -> None:
        """Make the full blocks of so many tokens findable."""
        self._follow()
        self._manager.publish(table, num_tokens)
        if self.oracle is not None:
            self.oracle.publish(self._expected[table], num_tokens)
        self._seen = self._mark()

    def fork(
        self, table: BlockTable, num_tokens: int
    ) -> tuple[BlockTable, tuple[CopyRun, ...]] | None:
        """Make a second continuation, if it fits."""
        forked = self._unless_changed(
            lambda: self._manager.fork(table), lambda forked: forked is None
        )
        if self.oracle is not None:
            given = () if forked is None else forked[0].blocks[table.num_published :]
            self.oracle.given = list(given)
            self._expect(forked, self.oracle.fork(self._expected[table], num_tokens))
        return forked

    def commit(self, tables: Sequence[BlockTable]) -> None:
        """End a step of these tables that has run."""
        self._follow()
        self._manager.commit()
        if self.oracle is not None:
            self.oracle.commit([self._expected[table] for table in tables])
        self._seen = self._mark()

    def fail(self, tables: Sequence[BlockTable]) -> None:
        """End a step of these tables that has raised."""
        self._follow()
        failed = [*self._manager.tables.decodes, *self._manager.tables.step]
        assert set(failed) == set(tables), "the step has other tables"
        self._manager.fail()
        if self.oracle is not None:
            self.oracle.fail([self._expected.pop(table) for table in failed])
        self._seen = self._mark()

    def release(self, table: BlockTable, num_tokens: int) -> None:
        """End a sequence of which so many tokens are computed."""
        self._follow()
        self._manager.release(table, num_tokens)
        if self.oracle is not None:
            self.oracle.release(self._expected.pop(table), num_tokens)
        self._seen = self._mark()

    def reset(self, reset: Callable[[], object]) -> None:
        """Empty the cache by a call that does it."""
        self._follow()
        reset()
        if self.oracle is not None:
            self.oracle.reset(list(self._manager.pool.free_order()))
        self._seen = self._mark()

    # --- what is compared ---

    def check(self, slots: list[str] | None) -> None:
        """Compare all that can be seen, and between steps what the slots of blocks hold."""
        self._follow()
        if self.oracle is None:
            return
        self._agree(list(self._manager.pool.free_order()), self.oracle.free_order())
        contents = cached_blocks(self._manager.index)
        seen = {c.block: (c.ref_count, len(c.tokens) // TOKEN_BYTES) for c in contents}
        self._agree(seen, self.oracle.contents())
        for table, expected in self._expected.items():
            self._agree(list(table.blocks), expected.blocks)
        if slots is not None:
            self.oracle.check_slots(slots)

    # --- small print ---

    def _unless_changed(self, call: Callable[[], T], is_refusal: Callable[[T], bool]) -> T:
        """Make a call; what is refused has changed nothing."""
        self._follow()
        before = whole_state(self._manager)
        answer = call()
        if is_refusal(answer):
            assert whole_state(self._manager) == before, "a refusal changed something"
        self._seen = self._mark()
        return answer

    def _expect(
        self, given: tuple[BlockTable, tuple[CopyRun, ...]] | None, expected: Table | None
    ) -> None:
        assert (given is None) == (expected is None), "fits, or does not fit"
        if given is not None and expected is not None:
            expected.key = given[0].key
            self._expected[given[0]] = expected

    def _agree(self, found: object, expected: object) -> None:
        assert found == expected, f"{whole_state(self._manager)}\n{self.oracle}"

    def _follow(self) -> None:
        """See whether others have changed the cache: then the oracle knows it no longer."""
        mark = self._mark()
        if mark != self._seen:
            self.oracle, self._seen = None, mark

    def _mark(self) -> tuple[int, ...]:
        """Return what differs once something has changed."""
        manager = self._manager
        leased = len(manager.tables.pinned)
        free, live = manager.pool.num_free, manager.num_live_tables
        return manager.index.version, free, live, leased, manager.epoch
