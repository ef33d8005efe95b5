"""One cache, used as a scheduler uses it, beside an oracle and a fake KV store.

The oracle predicts all that can be seen of the cache. The KV store has one number per slot,
which stands for everything that the KV of a token depends on. Steps write and copy slots, so
whatever a sequence reads, and whatever is findable, can be compared with the truth.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial

import pytest

from ostinato.assembly import build_cache
from ostinato.cache.block_table import BlockTable
from ostinato.cache.prefix_index import PrefixMatch
from ostinato.core.identity import Identity, ImageSpan, PrefixKey
from ostinato.core.plan import CopyRun
from ostinato.errors import CacheInUse, CacheMisuse, PromptTooLong
from ostinato.indexes.block_hash import DigestFunction
from ostinato.observe.introspection import CachedBlock, cached_blocks
from ostinato.settings import PrefixCacheConfig
from tests.properties.cache_oracle import CacheOracle, KvValues, Table

Content = tuple[bytes, bytes, bytes]
"""A published block's prefix, tokens and images."""

TORN = -1
"""What a failed step leaves in the slots that it was to write."""


@dataclass(frozen=True)
class Prompt:
    """A request's prompt; each cache makes its own key of it, in which it remembers digests."""

    tokens: tuple[int, ...]
    images: tuple[ImageSpan, ...] = ()
    identity: Identity = field(default_factory=Identity)
    reads: bool = True
    writes: bool = True


@dataclass(eq=False)
class LiveSequence:
    """A sequence in one cache; without a table while it waits.

    Attributes:
        number: The same in all caches under test.
        key: Its tokens so far.
        reads: Whether it may hit.
        writes: Whether it publishes.
        values: What its KV should be, one per token.
        table: Its blocks.
        expected: Its blocks according to the oracle.
        num_computed: Leading tokens whose KV is written.
        planned: The same after the running step; None if that does not compute it.
        is_published: Whether the step's full blocks are findable.
        is_cancelled: Whether it ends with the step.
        was_preempted: Whether it has run before.
    """

    number: int
    key: PrefixKey
    reads: bool
    writes: bool
    values: list[int]
    table: BlockTable | None = None
    expected: Table | None = None
    num_computed: int = 0
    planned: int | None = None
    is_published: bool = False
    is_cancelled: bool = False
    was_preempted: bool = False

    @property
    def in_step(self) -> bool:
        """Whether the running step computes it, or made it."""
        return self.planned is not None

    @property
    def tables(self) -> tuple[BlockTable, Table]:
        """Its blocks, and those according to the oracle; of a running one."""
        assert self.table is not None and self.expected is not None
        return self.table, self.expected


class CacheUnderTest:
    """One cache with its oracle and its KV store."""

    def __init__(
        self, config: PrefixCacheConfig, values: KvValues, digest: DigestFunction | None
    ) -> None:
        self.config = config
        self.prefix_cache = build_cache(config, clock=lambda: 0.0, digest=digest)
        self.manager = self.prefix_cache.manager
        self.oracle = CacheOracle(config, values)
        self.values = values
        self.kv: list[int] = [TORN] * config.num_slots
        self.sequences: dict[int, LiveSequence] = {}
        self.step: list[LiveSequence] = []
        self.copies: list[CopyRun] = []
        self.counts: Counter[str] = Counter()
        self.released: list[BlockTable] = []

    # --- what happens ---

    def arrive(self, number: int, prompt: Prompt) -> None:
        """Take a prompt; it waits."""
        key = PrefixKey(prompt.identity, prompt.tokens, prompt.images)
        values = self.values.of(key)
        self.sequences[number] = LiveSequence(number, key, prompt.reads, prompt.writes, values)

    def admit(self, live: LiveSequence, match: PrefixMatch, chunk: int) -> None:
        """Admit a waiting sequence if it fits, and plan its first chunk."""
        self._publish_planned()
        hits, source = list(match.blocks), match.tail.block if match.tail else None
        try:
            admitted = self.manager.admit(live.key, match, live.writes, live.was_preempted)
        except PromptTooLong:
            assert -(-len(live.key) // self.config.block_size) > self.config.num_blocks
            admitted = None
        self.oracle.given = [] if admitted is None else list(admitted[0].blocks[len(hits) :])
        table = self.oracle.admit(live.key, live.values[:], hits, source, live.writes)
        assert (admitted is None) == (table is None), "fits, or does not fit"
        if admitted is None or table is None:
            self.counts["refused"] += 1
            return
        live.table, copies = admitted
        live.expected, live.values = table, table.values
        live.num_computed = len(hits) * self.config.block_size + sum(c.num_tokens for c in copies)
        assert live.num_computed == live.table.num_cached_tokens < len(live.key), "law 4"
        self.copies += copies
        self.counts["copy given up"] += source is not None and not copies
        self._count(hits, copies)
        self._plan(live, chunk)
        self._publish_planned()

    def look_up(self, live: LiveSequence) -> PrefixMatch:
        """Match a waiting sequence, and compare with what there is."""
        if not live.reads or not self.config.enable_prefix_caching:
            return self.manager.no_match()
        self._publish_planned()
        match = self.manager.match(live.key)
        hits = self.oracle.hits(live.key, live.values)
        num_copied, sources = self.oracle.tails(live.key, live.values, len(hits))
        assert list(match.blocks) == hits, "whole blocks"
        assert match.num_copied_tokens == num_copied, "the longest tail"
        assert match.tail is None or match.tail.block in sources, "a tail of that length"
        return match

    def go_on(self, live: LiveSequence, chunk: int) -> None:
        """Plan more tokens of a running sequence, if there is room."""
        table, expected = live.tables
        num_held = len(table.blocks)
        fits = self.manager.grow(table, len(live.key))
        self.oracle.given = list(table.blocks[num_held:])
        assert fits == self.oracle.grow(expected, len(live.key))
        self.counts["no room to grow"] += not fits
        if fits:
            self._plan(live, chunk)

    def fork(self, parent: LiveSequence, number: int) -> None:
        """Make a second continuation of a sequence whose prompt this step completes."""
        self._publish_planned()
        parent_table, parent_expected = parent.tables
        forked = self.manager.fork(parent_table, len(parent.key))
        num_shared = parent_table.num_published
        self.oracle.given = [] if forked is None else list(forked[0].blocks[num_shared:])
        table = self.oracle.fork(parent_expected, len(parent.key))
        assert (forked is None) == (table is None), "fits, or does not fit"
        if forked is None or table is None:
            return
        child_table, copies = forked
        table.key = child_table.key
        child = replace(parent, number=number, key=table.key, values=table.values)
        child.table, child.expected = child_table, table
        child.num_computed = parent.planned or 0  # nothing of its own in this step
        self.sequences[number] = child
        self.step.append(child)
        self.copies += copies
        self.counts["forked"] += 1

    def give_up(self, live: LiveSequence, come_back: bool) -> None:
        """Preempt or cancel a sequence; one that has published waits for the step's end."""
        if live.in_step and live.is_published:
            live.is_cancelled |= not come_back
            return
        if live.in_step:
            self.step.remove(live)
            live.planned = None
        if live.table is not None:
            table, expected = live.tables
            self.manager.release(table, live.num_computed)
            self.oracle.release(expected, live.num_computed)
            self.released.append(table)
            live.was_preempted = True
        live.table = live.expected = None
        live.num_computed = 0
        if not come_back:
            del self.sequences[live.number]

    def commit(self, token_of: Callable[[LiveSequence], int]) -> None:
        """Run the step: write, copy, read; then sample where a prompt is complete."""
        self._publish_planned()
        self._run_step()
        tables, expected = self._step_tables()
        self.manager.commit(tables)
        self.oracle.commit(expected)
        for live in self._end_step():
            live.num_computed = live.planned or 0
            live.planned, live.is_published = None, False
            if live.num_computed == len(live.key):
                live.key.append(token_of(live))
                live.values[:] = self.values.of(live.key, live.values)
            if live.is_cancelled:
                self.give_up(live, come_back=False)

    def fail(self) -> None:
        """Let the step's forward pass raise halfway: its slots hold anything."""
        self._publish_planned()
        for slot in [*self._written(), *self._copied()]:
            self.kv[slot] = TORN
        tables, expected = self._step_tables()
        self.manager.fail(tables)
        self.oracle.fail(expected)
        self.counts["failed with followers"] += len(self.step) > 1
        for live in self._end_step():
            del self.sequences[live.number]

    def reset(self) -> None:
        """Forget everything, as soon as everybody who runs has been preempted."""
        if self.oracle.tables:
            with pytest.raises(CacheInUse, match=f"{len(self.oracle.tables)} running"):
                self.prefix_cache.admin.reset()
            self.check()
        for live in list(self.sequences.values()):
            self.give_up(live, come_back=True)
        self.prefix_cache.admin.reset()
        self.oracle.reset(list(self.manager.pool.free_order()))

    def misuse(self, choice: int) -> None:
        """Call something in a wrong order; what is compared afterwards sees that it was refused."""
        calls = self._wrong_calls()
        if calls:
            with pytest.raises(CacheMisuse):
                calls[choice % len(calls)]()
            self.counts["misused"] += 1

    def _wrong_calls(self) -> list[Callable[[], object]]:
        """List calls that are wrong now."""
        manager, calls = self.manager, list[Callable[[], object]]()
        for table in self.released[-2:]:
            calls += [
                partial(manager.release, table, 0),
                partial(manager.fail, [table]),
                partial(manager.publish, table, 1),
                partial(manager.grow, table, 1),
                partial(manager.fork, table, 0),
            ]
        for live in self.sequences.values():
            if (table := live.table) is None:
                continue
            beyond = table.num_slots + 1
            calls += [partial(manager.publish, table, beyond), partial(manager.fork, table, beyond)]
            if table.first_published is not None:
                calls += [partial(manager.release, table, 0), partial(manager.fail, [])]
        if len(self.sequences) > 1 and self.config.enable_prefix_caching:
            one, other, *_ = self.sequences.values()
            if one.key is not other.key:
                calls.append(partial(manager.admit, one.key, manager.match(other.key)))
        return calls

    # --- what is compared ---

    def check(self) -> None:
        """Compare everything that can be seen with the oracle, and KV with the truth."""
        self.manager.check()
        assert list(self.manager.pool.free_order()) == self.oracle.free_order(), self._describe()
        seen = {
            c.block: (c.ref_count, len(c.tokens) // 4) for c in cached_blocks(self.manager.index)
        }
        references = self.oracle.references()
        assert seen == {
            block: (references[block], len(cached.values))
            for block, cached in self.oracle.cached.items()
        }, self._describe()
        for live in self.sequences.values():
            if live.table is not None:
                table, expected = live.tables
                assert list(table.blocks) == expected.blocks, self._describe()
        if not self.step:
            self._check_findable()
            for live in self.sequences.values():
                self._check_readable(live, live.num_computed)

    def _check_readable(self, live: LiveSequence, num_tokens: int) -> None:
        """Law 3: what a sequence reads is the KV of its own tokens."""
        for position in range(num_tokens):
            assert self.kv[self._slot(live, position)] == live.values[position], (
                f"sequence {live.number} reads another's KV at token {position}"
            )

    def _check_findable(self) -> None:
        """Law 5: whatever is findable between steps has been computed, and for this prefix."""
        for block, cached in self.oracle.cached.items():
            start = block * self.config.block_size
            assert self.kv[start : start + len(cached.values)] == list(cached.values), (
                f"block {block} does not hold what it is found by"
            )

    def contents(self) -> Counter[Content]:
        """Return all published contents with the number of their copies."""
        return Counter(_content(cached) for cached in cached_blocks(self.manager.index))

    def queue(self) -> list[Content | None]:
        """Return the free queue by content; None for a block without."""
        contents = {c.block: _content(c) for c in cached_blocks(self.manager.index)}
        return [contents.get(block) for block in self.manager.pool.free_order()]

    def held(self) -> Counter[tuple[Content, int]]:
        """Return all published contents with their reference counts."""
        return Counter((_content(c), c.ref_count) for c in cached_blocks(self.manager.index))

    # --- helpers ---

    def _plan(self, live: LiveSequence, chunk: int) -> None:
        live.planned = min(len(live.key), live.num_computed + chunk)
        live.is_published = False
        self.step.append(live)

    def _publish_planned(self) -> None:
        for live in self.step:
            if not live.is_published:
                table, expected = live.tables
                assert live.planned is not None
                self.manager.publish(table, live.planned)
                self.oracle.publish(expected, live.planned)
                live.is_published = True

    def _step_tables(self) -> tuple[list[BlockTable], list[Table]]:
        tables = [live.tables for live in self.step]
        return [table for table, _ in tables], [expected for _, expected in tables]

    def _end_step(self) -> list[LiveSequence]:
        ended, self.step, self.copies = self.step, [], []
        return ended

    def _slot(self, live: LiveSequence, position: int) -> int:
        block, offset = divmod(position, self.config.block_size)
        return live.tables[0].blocks[block] * self.config.block_size + offset

    def _written(self) -> dict[int, int]:
        """Return the step's new tokens: slot and value; forked children compute nothing."""
        written: dict[int, int] = {}
        for live in self.step:
            for position in range(live.num_computed, live.planned or 0):
                slot = self._slot(live, position)
                assert slot not in written, "two tokens of a step in one slot"
                written[slot] = live.values[position]
        return written

    def _copied(self) -> dict[int, int]:
        """Return the step's copies, slot by slot: target and source."""
        copied: dict[int, int] = {}
        size = self.config.block_size
        for run in self.copies:
            last = run.num_tokens - 1
            assert run.source // size == (run.source + last) // size, "a copy crosses a block"
            assert run.target // size == (run.target + last) // size, "a copy crosses a block"
            for offset in range(run.num_tokens):
                assert run.target + offset not in copied, "two copies into one slot"
                copied[run.target + offset] = run.source + offset
        return copied

    def _run_step(self) -> None:
        """Write, then copy all at once, then let every sequence read what is before it."""
        written, copied = self._written(), self._copied()
        assert not set(written) & set(copied), "a copy and a new token in one slot"
        for slot, value in written.items():
            self.kv[slot] = value
        assert not set(copied) & set(copied.values()), "a copy reads what another one writes"
        for target, source in copied.items():
            self.kv[target] = self.kv[source]
        for live in self.step:
            self._check_readable(live, live.planned or 0)

    def _count(self, hits: list[int], copies: Iterable[CopyRun]) -> None:
        self.counts["admitted"] += 1
        self.counts["shared"] += bool(hits)
        self.counts["copied"] += bool(copies)

    def _describe(self) -> str:
        return f"{self.manager.describe()}\noracle: {self.oracle.free_order()} {self.oracle.cached}"


def _content(cached: CachedBlock) -> Content:
    return cached.parent, cached.tokens, cached.extra
