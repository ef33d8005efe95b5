"""The cache manager of a model with several groups of layers: windows, states, or both.

Each operation of the plain manager is done for full attention first, and then for every group with
what the table holds in it. A hit is the longest prefix that every group can continue.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields
from itertools import zip_longest
from typing import Any

from ostinato.cache.block import CacheEntry
from ostinato.cache.block_table import BlockTable
from ostinato.cache.manager import CacheManager
from ostinato.cache.observer import Observers
from ostinato.cache.prefix_index import PrefixMatch, PublishResult
from ostinato.core.errors import StepInProgress
from ostinato.core.identity import PrefixKey
from ostinato.core.plan import CopyRun, StateCopy
from ostinato.hybrid.layer_group import HybridMatch, LayerGroup, StateCopies

MakeLayerGroups = Callable[[Observers, StateCopies], Sequence[LayerGroup]]
"""Makes the groups of layers beside full attention; one with states notes their copies."""

_NEW, _KNOWN = PublishResult(), PublishResult(1)


class HybridCacheManager(CacheManager):
    """A cache manager with a pool of its own for each group of layers.

    Attributes:
        layer_groups: Layers beside full attention.
    """

    def __init__(self, make_groups: MakeLayerGroups, *args: Any, **kwargs: Any) -> None:
        """Make an empty cache; the other arguments are those of ``CacheManager``."""
        super().__init__(*args, **kwargs)
        self._state_copies = StateCopies()
        self.layer_groups = make_groups(self.observers, self._state_copies)
        self.pools += [group.pool for group in self.layer_groups]
        self.contents += self.layer_groups
        self._cuts = next((g.cuts for g in self.layer_groups if g.cuts is not None), None)
        self.chunk_unit = None if self._cuts is None else self._cuts.unit

    @property
    def state_copies(self) -> tuple[tuple[StateCopy, ...], tuple[StateCopy, ...]]:
        """The states to copy before and after the running step."""
        return tuple(self._state_copies.loads), tuple(self._state_copies.saves)

    @property
    def version(self) -> int:
        """Raised when a group of layers changes so that older matches are stale."""
        return sum(contents.version for contents in self.contents)

    def match(self, key: PrefixKey, num_tokens: int | None = None) -> HybridMatch:
        """Find the longest cached prefix that every group can continue; no effects.

        A group that cannot continue a prefix shortens it, until all groups agree on its end::

            group 0         ABCD EFGH IJKL MNOP     16 tokens
            window of 6               IJKL          12: MNOP is gone; IJKL, which is needed, is not
            window of 12    ABCD EFGH IJKL          12 again: that is the hit
        """
        with self._lock:
            return self._longest_match(key, num_tokens)

    def _longest_match(self, key: PrefixKey, num_tokens: int | None) -> HybridMatch:
        match = super().match(key, num_tokens)
        end, before = len(match.blocks), -1
        while end != before:
            before = end
            for group in self.layer_groups:
                end = group.longest_hit(key, end)
        num_seen, tails = len(match.blocks), []
        if end == num_seen and match.tail is not None:
            name = match.tail.entry.block_key(match.tail.place, self.block_size).name
            tails = [group.find_tail(key, end, name) for group in self.layer_groups]
        if end < num_seen or (match.tail is not None and None in tails):
            match, tails = super().match(key, end * self.block_size), []
        values = {field.name: getattr(match, field.name) for field in fields(PrefixMatch)}
        values["version"] = self.version
        if self._cuts is not None:
            values["num_seen_tokens"] = num_seen * self.block_size
        return HybridMatch(**values, group_tails=tails)

    def publish(self, table: BlockTable, num_tokens: int) -> None:
        """Make the full blocks among the tokens that this step will have computed findable."""
        if self.tables.step.get(table) and num_tokens > table.num_planned:
            raise StepInProgress(
                "a table and its fork publish no more before the copies between them have run: "
                "commit the step first"
            )
        super().publish(table, num_tokens)
        self.tables.step.setdefault(table, False)  # windows slide in every step

    def end_of_chunk(
        self, table: BlockTable, start: int, end: int, waiting: Iterable[PrefixKey]
    ) -> int:
        """Return where a chunk from ``start`` ends, at ``end`` or before; ``start`` if nowhere."""
        return end if self._cuts is None else self._cuts.end_of_chunk(table, start, end, waiting)

    def deepest_hit(self, table: BlockTable, key: PrefixKey, num_tokens: int) -> int:
        """Return where a hit of another key ends, once ``num_tokens`` that it shares are computed.

        With states it ends at the last position up to there whose state is being saved.
        """
        if self._cuts is None:
            return super().deepest_hit(table, key, num_tokens)
        return self._cuts.deepest_state(table, num_tokens)

    def remove(self, belongs: Callable[[CacheEntry], bool]) -> int:
        """Free every evictable block whose entry matches; return how many."""
        with self._lock:
            num_blocks = super().remove(belongs)
            for group in self.layer_groups:
                group.blocks_removed()
            return num_blocks

    def _pairs(self, table: BlockTable) -> "zip[tuple[LayerGroup, Any]]":
        """Return each group beside full attention with what a table holds in it."""
        return zip(self.layer_groups, table.held, strict=True)

    def _room_to_admit(self, key: PrefixKey, match: PrefixMatch, num_tokens: int) -> int:
        num_tokens = super()._room_to_admit(key, match, num_tokens)
        assert isinstance(match, HybridMatch)
        room, end = num_tokens, match.load_end
        for group, tail in self._tails(match) if num_tokens else ():
            room = min(room, group.room(key, len(match.blocks), tail, end))
        return 0 if room < num_tokens and end else room  # a load has all of its slots at once

    def _room_to_grow(self, table: BlockTable, num_tokens: int) -> int:
        num_tokens = super()._room_to_grow(table, num_tokens)
        for group, held in self._pairs(table):
            num_tokens = min(num_tokens, group.room_to_grow(held, num_tokens))
        return num_tokens

    def _shared_by_fork(self, table: BlockTable, num_tokens: int) -> list[int]:
        needed = self.blocks_for(num_tokens)
        more = [needed - group.num_to_fork(held, needed) for group, held in self._pairs(table)]
        return super()._shared_by_fork(table, num_tokens) + more

    def _tails(self, match: PrefixMatch) -> "zip_longest[tuple[LayerGroup, Any]]":
        """Return each group with the entry that it copies a match's tail from; None without one."""
        assert isinstance(match, HybridMatch)
        return zip_longest(self.layer_groups, () if match.tail is None else match.group_tails)

    def _hold(self, key: PrefixKey, match: PrefixMatch) -> BlockTable:
        assert isinstance(match, HybridMatch)
        held = [group.hold(key, match, tail) for group, tail in self._tails(match)]
        table = self._with_groups(super()._hold(key, match), held)
        table.num_seen_tokens = match.num_seen_tokens
        return table

    def _fork(self, table: BlockTable, num_shared: int) -> BlockTable:
        held = [group.fork(source) for group, source in self._pairs(table)]
        return self._with_groups(super()._fork(table, num_shared), held)

    def _with_groups(self, table: BlockTable, held: list[Any]) -> BlockTable:
        """Give a new table what it holds in each group."""
        pairs = zip(self.layer_groups, held, strict=True)
        table.groups = (table.blocks, *(h.blocks for group, h in pairs if group.has_rows))
        table.held = held
        return table

    def _allocate_slots(self, table: BlockTable, num_tokens: int, num_window_tokens: int) -> None:
        super()._allocate_slots(table, num_tokens, num_window_tokens)
        had_state = table.state_slot is not None
        for group, held in self._pairs(table):
            group.take(table, held, num_window_tokens)
        if table.state_slot is not None and not had_state:  # this step loads it
            self.tables.step.setdefault(table, False)
        table.num_slots = min(map(len, table.groups)) * self.block_size

    def _copies_of_tail(self, table: BlockTable, match: PrefixMatch) -> tuple[CopyRun, ...]:
        runs = super()._copies_of_tail(table, match)
        assert isinstance(match, HybridMatch) and match.tail is not None
        for group, tail in enumerate(match.group_tails, 1):
            target = table.groups[group][len(match.blocks)]
            runs += self._copy(tail.block, target, match.tail.num_tokens, group)
        return runs

    def _publish(self, table: BlockTable, num_tokens: int) -> None:
        super()._publish(table, num_tokens)
        for number, (group, held) in enumerate(self._pairs(table), 1):
            for place, is_new in group.publish(table, held, num_tokens):
                if on_publish := self.observers.on_publish:
                    result = _NEW if is_new else _KNOWN
                    self.observers.call(on_publish, table, place, place + 1, result, number)

    def _end_step(self) -> Iterable[BlockTable]:
        self._state_copies.loads.clear()
        self._state_copies.saves.clear()
        return super()._end_step()

    def _settle(self, table: BlockTable) -> None:
        super()._settle(table)
        for group, held in self._pairs(table):
            group.settle(table, held)

    def _retract(self, table: BlockTable) -> None:
        super()._retract(table)
        for number, (group, held) in enumerate(self._pairs(table), 1):
            removed = group.retract(held)
            if removed is not None and (on_retract := self.observers.on_retract):
                self.observers.call(on_retract, table, removed, number)

    def _publish_partial(self, table: BlockTable, num_tokens: int) -> bool:
        is_published = super()._publish_partial(table, num_tokens)
        if is_published:
            full = num_tokens // self.block_size
            text = table.key.tokens[full * self.block_size : num_tokens].tobytes()
            for group, held in self._pairs(table):
                group.publish_partial(table, held, full, text)
        return is_published

    def _release_tail(self, table: BlockTable) -> None:
        super()._release_tail(table)
        for group, held in self._pairs(table):
            group.release_tail(held)

    def _release_path(self, table: BlockTable) -> None:
        for group, held in self._pairs(table):
            group.release(table, held)
        super()._release_path(table)
        for group in self.layer_groups if self.pool.shares.are_limited else ():
            group.pool.enforce_quota(table, group)

    def check(self) -> None:
        """Assert that pools, index, groups and tables agree; slow, for tests."""
        super().check()
        tables = [*self.tables.live.values(), *self.tables.pinned.values()]
        for number, group in enumerate(self.layer_groups):
            group.check([table.held[number] for table in tables])
