"""A cache manager for models with sliding windows.

Layers that keep different things are in different groups, each with a pool and block tables
of its own. Group 0 is full attention: its index says which prefixes exist. Every other group
is a sliding window, whose blocks belong to the same prefixes::

    tokens     0-3   4-7   8-11  12-15 16-19
    group 0    b0    b1    b2    b3    b4       full attention
    group 1    null  null  null  b9    b4       window of 5

A hit is one length that is valid in every group: a window that cannot go on from an end shortens
the prefix, which another window may then not accept::

    group 0         ABCD EFGH IJKL MNOP     16 tokens
    window of 6               IJKL          12: MNOP is gone, and what it looks back to is there
    window of 12    ABCD EFGH IJKL          12 again: that is the hit

A model whose layers all have windows keeps group 0 as well, without memory for its blocks: as
the list of prefixes.
"""

from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ostinato.cache.block_table import BlockTable
from ostinato.cache.manager import CacheManager
from ostinato.cache.observer import Observers
from ostinato.cache.pool import BlockPool, Contents
from ostinato.cache.prefix_index import PrefixMatch, PublishResult
from ostinato.core.identity import PrefixKey
from ostinato.core.ids import BlockId
from ostinato.core.plan import CopyRun
from ostinato.hybrid.window_content import WindowCopy, WindowTable
from ostinato.hybrid.window_group import WindowGroup

_NEW, _KNOWN = PublishResult(), PublishResult(1)


@dataclass(slots=True)
class HybridMatch(PrefixMatch):
    """A match in every group.

    Attributes:
        window_tails: Per window, the copy of the tail's block; empty without a tail.
    """

    window_tails: tuple[WindowCopy, ...] = ()


@dataclass(slots=True, eq=False)
class HybridBlockTable(BlockTable):
    """The blocks of one sequence in every group.

    Attributes:
        windows: What is held in each window group.
    """

    windows: list[WindowTable] = field(default_factory=list)

    @property
    def groups(self) -> "tuple[array[int], ...]":
        """One row of block ids per group of layers: full attention, then each window."""
        return (self.blocks, *(window.blocks for window in self.windows))


class HybridCacheManager(CacheManager):
    """A cache manager over a full-attention group and one group per window size.

    Attributes:
        windows: The window groups.
    """

    def __init__(self, *args: Any, make_windows: Callable[[Observers], list[WindowGroup]]) -> None:
        """Make an empty cache; arguments as of ``CacheManager``, and the window groups."""
        super().__init__(*args)
        self.windows = make_windows(self.observers)

    def match_first(self, key: PrefixKey, num_tokens: int) -> PrefixMatch:
        """Find the longest prefix among the first tokens that is valid in every group."""
        match = self.index.match(key, num_tokens)
        end = self._common_end(key, len(match.blocks))
        if end == len(match.blocks):
            if match.tail is None:
                return match
            entry, place = match.tail.entry, match.tail.place
            name = entry.name_of(place, self.block_size)
            tails = tuple(window.find_tail(key, end, name) for window in self.windows)
            if None not in tails:
                at = match.entries, match.num_unmatched, key, match.index, match.version
                return HybridMatch(self.block_size, match.blocks, match.tail, *at, tails)  # type: ignore[arg-type]
        return self.index.match(key, end * self.block_size)

    def _common_end(self, key: PrefixKey, end: int) -> int:
        """Return the longest prefix, in blocks, that every window can go on from."""
        while True:
            before = end
            for window in self.windows:
                end = window.longest_hit(key, end)
            if end == before:
                return end

    @property
    def groups(self) -> list[tuple[BlockPool, Contents]]:
        """For each group of layers its pool, and what knows the content of its blocks."""
        return [*super().groups, *((window.pool, window) for window in self.windows)]

    # --- what a plain manager does for one group ---

    def _room_to_admit(self, key: PrefixKey, match: PrefixMatch, num_tokens: int) -> int:
        if not super()._room_to_admit(key, match, num_tokens):
            return 0
        held, tails = len(match.blocks), _tails(match)
        for number, window in enumerate(self.windows):
            free = window.pool.num_free_for(key.identity.owner)
            free -= window.num_idle_blocks(key, held)
            if tails and not tails[number].ref_count:
                free -= 1
            num_tokens = min(num_tokens, (held + free) * self.block_size)
        return num_tokens

    def _room_to_grow(self, table: BlockTable, num_tokens: int) -> int:
        for pool, blocks in zip(self.pools, table.groups, strict=True):
            if self.blocks_for(num_tokens) > len(blocks):
                free = pool.num_free_for(table.tenant)
                num_tokens = min(num_tokens, (len(blocks) + free) * self.block_size)
        return num_tokens

    def _make_table(
        self, key: PrefixKey, blocks: "array[int]", shared: int = 0, copied: int = 0
    ) -> BlockTable:
        nothing = [window.acquire(key, 0) for window in self.windows]
        fixed = key, blocks, key.identity.owner, shared, copied
        return HybridBlockTable(*fixed, needs_settling=True, windows=nothing)

    def _hold(self, key: PrefixKey, match: PrefixMatch) -> BlockTable:
        table = super()._hold(key, match)
        _windows(table)[:] = [window.acquire(key, len(match.blocks)) for window in self.windows]
        for (window, held), copy in zip(self._pairs(table), _tails(match), strict=False):
            window.hold_tail(held, copy)
        return table

    def _take(self, table: BlockTable, num_tokens: int, num_window_tokens: int) -> None:
        super()._take(table, num_tokens, num_window_tokens)
        needed = self.blocks_for(num_window_tokens)
        for window, held in self._pairs(table):
            if needed > len(held.blocks):
                window.append(held, window.pool.take(table, needed - len(held.blocks), window))
        table.num_slots = min(map(len, table.groups)) * self.block_size

    def _copies_of_tail(self, table: BlockTable, match: PrefixMatch) -> tuple[CopyRun, ...]:
        assert match.tail is not None
        runs, place = super()._copies_of_tail(table, match), len(match.blocks)
        for group, source in enumerate(_tails(match), 1):
            target = BlockId(table.groups[group][place])
            runs += self._copies.of_block(group, source.block, target, match.tail.num_tokens)
        return runs

    def _publish(self, table: BlockTable, last: int) -> None:
        super()._publish(table, last)
        if not table.writes:
            return
        for group, (window, held) in enumerate(self._pairs(table), 1):
            for place, is_new in window.publish(held, table.key, last):
                for notify in self.observers.on_publish:
                    notify(table, place, place + 1, _NEW if is_new else _KNOWN, group)

    def _settle(self, table: BlockTable) -> None:
        super()._settle(table)
        table.needs_settling = True  # a window slides with every step
        for window, held in self._pairs(table):
            held.first_published = None
            window.slide(held, table.num_planned)

    def _retract(self, table: BlockTable) -> None:
        super()._retract(table)
        for group, (window, held) in enumerate(self._pairs(table), 1):
            removal = window.retract(held)
            for notify in self.observers.on_retract:
                notify(table, removal, group)

    def _publish_partial(self, table: BlockTable, num_tokens: int) -> bool:
        sealed = super()._publish_partial(table, num_tokens)
        if sealed:
            full = num_tokens // self.block_size
            text = table.key.packed_range(full * self.block_size, num_tokens)
            for window, held in self._pairs(table):
                window.publish_partial(held, table.key, full, text)
        return sealed

    def _release_tail(self, table: BlockTable) -> None:
        super()._release_tail(table)
        for window, held in self._pairs(table):
            window.release_tail(held)

    def _release_path(self, table: BlockTable) -> None:
        super()._release_path(table)
        for window, held in self._pairs(table):
            window.release(held)
            if window.pool.shares.are_limited:
                window.pool.enforce_quota(table, window)

    def _num_shared(self, table: BlockTable, num_tokens: int) -> list[int]:
        windows = [held.num_shared for held in _windows(table)]
        return [*super()._num_shared(table, num_tokens), *windows]

    def _fork(self, table: BlockTable, num_shared: int) -> BlockTable:
        child = super()._fork(table, num_shared)
        _windows(child)[:] = [window.fork(held) for window, held in self._pairs(table)]
        return child

    def _check_state(self, tables: list[BlockTable]) -> None:
        super()._check_state(tables)
        for number, window in enumerate(self.windows):
            window.check([_windows(table)[number] for table in tables])
            assert tables or window.pool.num_free == window.pool.num_blocks, "blocks leaked (law 9)"

    def _pairs(self, table: BlockTable) -> "zip[tuple[WindowGroup, WindowTable]]":
        """Return each window with what a table holds in it."""
        return zip(self.windows, _windows(table), strict=True)


def _windows(table: BlockTable) -> list[WindowTable]:
    assert isinstance(table, HybridBlockTable), "a table of another manager"
    return table.windows


def _tails(match: PrefixMatch) -> tuple[WindowCopy, ...]:
    return match.window_tails if isinstance(match, HybridMatch) and match.tail is not None else ()
