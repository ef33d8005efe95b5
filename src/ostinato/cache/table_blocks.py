"""The blocks of one table: in the pool, in the index, and in every group of layers.

``CacheManager`` decides what happens in which order and refuses what is wrong; here is how a
table comes to its blocks, publishes them and releases them again. Full attention comes first,
then the other groups in turn, each with what the table holds in it.
"""

from array import array
from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import Any

from ostinato.cache.block import CacheEntry
from ostinato.cache.block_table import BlockTable, StepCopies
from ostinato.cache.layer_group import LayerGroup
from ostinato.cache.observer import Observers
from ostinato.cache.pool import BlockPool, Contents
from ostinato.cache.prefix_index import PrefixIndex, PrefixMatch, PublishResult
from ostinato.core.config import CacheConfig
from ostinato.core.identity import PrefixKey
from ostinato.core.ids import BlockId
from ostinato.core.plan import CopyRun

MakeIndex = Callable[[BlockPool, int], PrefixIndex[Any]]
"""Makes an empty index over a pool, for blocks of so many tokens."""

MakeLayerGroups = Callable[[Observers, StepCopies], Sequence[LayerGroup]]
"""Makes the groups of layers beside full attention; states are copied with the step's copies."""

_NEW, _KNOWN = PublishResult(), PublishResult(1)


class TableBlocks:
    """Where the blocks of tables are.

    Attributes:
        config: As given.
        block_size: Tokens per block.
        pool: The blocks.
        index: What is findable in them.
        layer_groups: Layers beside full attention, each group with a pool of its own.
        cuts: Where prefills are cut; None if anywhere.
        copies: What is copied in the step that is planned.
        observers: As given.
    """

    def __init__(
        self,
        config: CacheConfig,
        pool: BlockPool,
        make_index: MakeIndex,
        make_groups: MakeLayerGroups,
        observers: Observers,
    ) -> None:
        """Begin without a table."""
        self.config, self.block_size = config, config.block_size
        self.pool, self.observers = pool, observers
        self.index = make_index(pool, config.block_size)
        self.copies = StepCopies(config.block_size)
        self.layer_groups = make_groups(observers, self.copies)
        self.cuts = next((g.cuts for g in self.layer_groups if g.cuts is not None), None)
        self._publishing: dict[int, BlockTable] = {}  # in the running step

    @property
    def groups(self) -> list[tuple[BlockPool, Contents]]:
        """For each group of layers its pool, and what knows the content of its blocks."""
        return [(self.pool, self.index), *((group.pool, group) for group in self.layer_groups)]

    @property
    def pools(self) -> list[BlockPool]:
        """One pool per group of layers."""
        return [pool for pool, _ in self.groups]

    def blocks_for(self, num_tokens: int) -> int:
        """Number of blocks that so many tokens fill or begin."""
        return -(-num_tokens // self.block_size)

    def _room_to_admit(self, key: PrefixKey, match: PrefixMatch, num_tokens: int) -> int:
        """Return how many tokens could have slots if a match were held; 0 if not all blocks fit.

        Blocks that would be held, and an idle source of a copy, are free until they are.
        """
        missing = -(-len(key.tokens) // self.block_size) - len(match.blocks)
        if missing > self.pool.num_unused or self.pool.shares.are_limited:
            free = self.pool.num_free_for(key.identity.owner) - match.num_idle_blocks
            if match.tail is not None and not match.tail.entry.ref_count:
                free -= 1
            if missing > free:
                return 0
        for group, tail in zip_longest(self.layer_groups, match.group_tails):
            num_tokens = min(num_tokens, group.room(key, len(match.blocks), tail))
        return num_tokens

    def _room_to_grow(self, table: BlockTable, num_tokens: int) -> int:
        """Return how many tokens could have slots, at most ``num_tokens``."""
        free = self.pool.num_free_for(table.tenant)
        num_tokens = min(num_tokens, (len(table.blocks) + free) * self.block_size)
        for group, held in self._pairs(table):
            num_tokens = min(num_tokens, group.room_to_grow(held, num_tokens))
        return num_tokens

    def _pairs(self, table: BlockTable) -> "zip[tuple[LayerGroup, Any]]":
        """Return each other group of layers with what a table holds in it."""
        return zip(self.layer_groups, table.held, strict=True)

    def _hold_groups(self, key: PrefixKey, match: PrefixMatch) -> list[Any]:
        """Hold a match in each other group of layers."""
        pairs = zip_longest(self.layer_groups, match.group_tails)
        return [group.hold(key, match, tail) for group, tail in pairs]

    def _make_table(self, key: PrefixKey, blocks: "array[int]", held: list[Any]) -> BlockTable:
        """Make a table; it is numbered when it becomes live."""
        rows = [
            h.blocks for group, h in zip(self.layer_groups, held, strict=True) if group.has_rows
        ]
        table = BlockTable(key, blocks, key.identity.owner, groups=(blocks, *rows), held=held)
        table.needs_settling = bool(held)
        return table

    def _hold(self, key: PrefixKey, match: PrefixMatch) -> BlockTable:
        """Hold a match, and the source of what will be copied."""
        num_blocks, tail = len(match.blocks), match.tail
        copied = 0 if tail is None else tail.num_tokens
        table = self._make_table(key, match.blocks[:], self._hold_groups(key, match))
        table.num_shared_tokens, table.num_copied_tokens = num_blocks * self.block_size, copied
        table.needs_settling |= copied > 0
        table.num_seen_tokens = match.num_seen_tokens
        if match.entries:
            table.found = match.entries[-1]
        table.path, table.copy_source = self.index.acquire(key, match)
        table.num_published = num_blocks
        return table

    def _take(self, table: BlockTable, num_tokens: int, num_window_tokens: int) -> None:
        """Give a table slots; the caller knows that there is room."""
        missing = -(-num_tokens // self.block_size) - len(table.blocks)
        if missing > 0:
            table.blocks.extend(self.pool.take(table, missing, self.index))
        for group, held in self._pairs(table):
            group.take(table, held, num_window_tokens)
        table.num_slots = min(map(len, table.groups)) * self.block_size

    def _copies_of_tail(self, table: BlockTable, match: PrefixMatch) -> tuple[CopyRun, ...]:
        """Plan the copy of a tail into the block after the whole blocks that hit."""
        tail = match.tail
        assert tail is not None
        sources, runs = [tail.block, *(t.block for t in match.group_tails)], list[CopyRun]()
        for group, source in enumerate(sources):
            target = BlockId(table.groups[group][len(match.blocks)])
            runs += self.copies.of_block(group, source, target, tail.num_tokens)
        return tuple(runs)

    def _publish(self, table: BlockTable, num_tokens: int) -> None:
        """Make a table's first full blocks findable."""
        last = num_tokens // self.block_size
        first = fresh = table.num_published
        if last <= first or not table.writes:
            return
        blocks, num_tokens = table.blocks[first:last], last * self.block_size
        published = self.index.publish(table.path, table.key, blocks, num_tokens, table.summary)
        table.path, result = published
        table.num_published = last
        if result.duplicates:  # they come before new content
            table.duplicates.extend(result.duplicates)
            fresh += len(result.duplicates)
        table.needs_settling = True
        if fresh < last and table.first_published is None:
            table.first_published = fresh
            self._publishing[table.table_id] = table
        for notify in self.observers.on_publish:
            notify(table, first, last, result)
        for number, (group, held) in enumerate(self._pairs(table), 1):
            for place, is_new in group.publish(table, held, num_tokens):
                for notify in self.observers.on_publish:
                    notify(table, place, place + 1, _NEW if is_new else _KNOWN, number)

    def _settle(self, table: BlockTable) -> None:
        """Release the sources of copies, and exchange duplicates for canonical blocks."""
        self._release_tail(table)
        table.first_published, table.needs_settling = None, bool(table.held)
        for position, canonical in table.duplicates:
            own = array("i", [table.blocks[position]])
            table.blocks[position] = canonical
            self.pool.free(own, table.tenant)
        table.duplicates.clear()
        for group, held in self._pairs(table):
            group.settle(table, held)

    def _retract(self, table: BlockTable) -> None:
        """Take back what a table published in this step."""

        def evict(entry: CacheEntry) -> None:
            self.pool.evict(entry, "space", table, self.index)

        if table.first_published is not None:
            first, table.first_published = table.first_published, None
            table.path, removal = self.index.retract(table.path, first, evict)
            table.num_published = first
            for notify in self.observers.on_retract:
                notify(table, removal)
        for number, (group, held) in enumerate(self._pairs(table), 1):
            removed = group.retract(held)
            for notify in self.observers.on_retract if removed is not None else ():
                notify(table, removed, number)

    def _publish_partial(self, table: BlockTable, num_tokens: int) -> bool:
        """Make the partial last block of an ended sequence findable, if there is one."""
        full, rest = divmod(num_tokens, self.block_size)
        is_next = table.num_published == full and not table.duplicates
        if not (rest and is_next and table.writes and self.config.seal_tails):
            return False
        blocks = table.blocks[full : full + 1]
        table.path, result = self.index.publish(table.path, table.key, blocks, num_tokens)
        if result.num_known:
            return False
        table.num_published += 1
        text = table.key.packed_range(full * self.block_size, num_tokens)
        for group, held in self._pairs(table):
            group.publish_partial(table, held, full, text)
        return True

    def _release_tail(self, table: BlockTable) -> None:
        """Release the source of a copy."""
        if table.copy_source is not None:
            self.pool.release((table.copy_source,))
            table.copy_source = None
        for group, held in self._pairs(table):
            group.release_tail(held)

    def _release_path(self, table: BlockTable) -> None:
        """Release what a table shares, and evict what its tenant has above its quota."""
        for group, held in self._pairs(table):
            group.release(table, held)
        if table.path is not None:
            self.index.release(table.path, table.summary)
        for pool, contents in self.groups if self.pool.shares.are_limited else ():
            pool.enforce_quota(table, contents)

    def _fork(self, table: BlockTable, num_shared: int) -> BlockTable:
        """Share a table's first blocks, which are published, with a new one."""
        held = [group.fork(theirs) for group, theirs in self._pairs(table)]
        child = self._make_table(table.key.copy(), table.blocks[:num_shared], held)
        for position, canonical in table.duplicates:
            child.blocks[position] = canonical
        child.writes, child.num_published = table.writes, num_shared
        if table.path is not None:
            child.path = self.index.fork(table.path)
        return child

    def _check_state(self, tables: list[BlockTable]) -> None:
        """Assert that pool, index and tables agree."""
        paths = [table.path for table in tables if table.path is not None]
        self.index.check(paths, [t.copy_source for t in tables if t.copy_source is not None])
        cached = [b for run in self.index.runs() for entry in run.entries for b in entry.blocks]
        self.pool.check([*cached, *(block for table in tables for block in table.private_blocks)])
        for table in tables:
            assert len(set(table.blocks)) == len(table.blocks), "a block twice in a table"
        for number, group in enumerate(self.layer_groups):
            group.check([table.held[number] for table in tables])
        for pool in self.pools if not tables else ():
            assert pool.num_free == pool.num_blocks, "blocks leaked (law 9)"
