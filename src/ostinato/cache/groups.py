"""What does a sequence hold, over all groups of layers at once?

Layers that keep different things are in different groups, each with a pool and block tables
of its own. Group 0 is full attention: its index says which prefixes exist. Every other group
is a sliding window, whose blocks hang on the same prefixes::

    tokens     0-3   4-7   8-11  12-15 16-19
    group 0    b0    b1    b2    b3    b4       full attention
    group 1    null  null  null  b9    b4       window of 5

A hit is one length that is valid in every group. A model whose layers all have windows keeps
group 0 as well, without bytes behind its blocks: as the list of prefixes.
"""

from array import array
from collections.abc import Callable
from typing import Any

from ostinato.cache.allocator import Allocator
from ostinato.cache.block import CacheEntry
from ostinato.cache.block_hash import BlockHasher
from ostinato.cache.block_table import BlockTable
from ostinato.cache.group_match import common_match
from ostinato.cache.group_pools import make_pool, make_window_pool
from ostinato.cache.hash_index import HashIndex
from ostinato.cache.journal import Journal
from ostinato.cache.policies.contract import PolicyFactory
from ostinato.cache.prefix_index import PrefixIndex, PrefixMatch
from ostinato.cache.radix_index import RadixIndex
from ostinato.cache.window_group import WindowGroup
from ostinato.core.config import CacheConfig
from ostinato.core.identity import PrefixKey
from ostinato.core.ids import BlockId


class Groups:
    """The full-attention group, and one group per window size."""

    def __init__(
        self,
        config: CacheConfig,
        hasher: BlockHasher,
        index_hasher: BlockHasher,
        journal: Journal,
        clock: Callable[[], float],
        make_policy: PolicyFactory,
    ) -> None:
        """Make empty groups.

        Args:
            config: Sizes, index, order and policy.
            hasher: SHA-256, for windows and for outsiders.
            index_hasher: For the hash index.
            journal: Is told of evictions.
            clock: Seconds that never fall.
            make_policy: Says what is evicted from the full-attention group.
        """
        self.config = config
        self.block_size = config.block_size
        self.pool = make_pool(config, config.num_blocks, config.allotments, clock, make_policy)
        self.index: PrefixIndex[Any]
        outside = hasher if journal.events is not None else None
        if config.index == "radix":
            self.index = RadixIndex(self.pool, config.block_size, outside)
        else:
            self.index = HashIndex(self.pool, index_hasher, outside)
        self.windows = [
            WindowGroup(w.window, make_window_pool(config, w, clock), hasher)
            for w in config.windows
        ]
        self._full = Allocator(self.pool, self.index, journal, 0)
        self.allocators = [self._full] + [
            Allocator(window.pool, window, journal, group)
            for group, window in enumerate(self.windows, 1)
        ]

    def blocks_for(self, num_tokens: int) -> int:
        """Number of blocks that so many tokens fill or begin."""
        return -(-num_tokens // self.block_size)

    def match(self, key: PrefixKey, num_tokens: int) -> PrefixMatch:
        """Find the longest prefix that is cached in every group; no effects."""
        if not self.windows:
            return self.index.match(key, num_tokens)
        return common_match(self.index, self.windows, key, num_tokens)

    def hold(self, key: PrefixKey, match: PrefixMatch) -> BlockTable:
        """Hold a match in every group, and the sources of what will be copied."""
        num_blocks, tail = len(match.blocks), match.tail
        copied = 0 if tail is None else tail.num_tokens
        table = BlockTable(key, match.blocks[:], num_blocks * self.block_size, copied)
        table.path, table.tail_path = self.index.acquire(key, match)
        table.num_published = num_blocks
        if not self.pool.joins:  # who goes by the moment of release alone learns from no gap
            last = self.index.last_entry(table.path)
            if last is not None and last.idle_tick:
                self.pool.past.note_gap(table.turn, last.uses, last.idle_since_s)
        if self.windows:
            table.windows = [window.acquire(key, num_blocks) for window in self.windows]
            for number, copy in enumerate(match.window_tails):
                self.windows[number].hold_tail(table.windows[number], copy)
        return table

    def look_up(self, table: BlockTable) -> None:
        """Tell the eviction policy what a request asks for and did not find."""
        if not self.pool.past.remembers:
            return
        num_asked = (len(table.key) - 1) // self.block_size
        if table.writes and num_asked:
            num_found = table.num_published
            self.pool.past.look_up(table.key, num_found, num_asked, self.block_size, table.turn)

    def empty_table(self, key: PrefixKey) -> BlockTable:
        """Return the table of a sequence that neither reads nor writes the cache."""
        table = BlockTable(key, array("i"), writes=False)
        table.windows = [window.acquire(key, 0) for window in self.windows]
        return table

    def take(self, table: BlockTable, num_tokens: int, num_window_tokens: int) -> None:
        """Give a table slots; the caller knows that there is room."""
        missing = -(-num_tokens // self.block_size) - len(table.blocks)
        if missing > 0:
            table.blocks.extend(self._full.take(table.key.identity, missing))
        if not self.windows:
            return
        for number, window in enumerate(self.windows):
            held = table.windows[number]
            missing = self.blocks_for(num_window_tokens) - len(held.blocks)
            if missing > 0:
                taken = self.allocators[number + 1].take(table.key.identity, missing)
                window.append(held, taken)

    def publish(self, table: BlockTable, num_blocks: int, journal: Journal) -> "array[int]":
        """Make a table's first full blocks findable in every group.

        Returns:
            Those of group 0 that were not published before.
        """
        first = adopted = table.num_published
        blocks = table.blocks[first:num_blocks]
        table.path, publication = self.index.publish(table.path, table.key, blocks, table.turn)
        table.num_published = num_blocks
        known = publication.num_known
        if known:  # it comes before new content
            table.duplicates.extend(publication.duplicates)
            adopted += len(publication.duplicates)
            journal.stats.duplicate_blocks += known
        if adopted < num_blocks and table.first_adopted is None:
            table.first_adopted = adopted
        journal.published(table.key, first + known, num_blocks)
        if not self.windows:
            return blocks
        for group, (window, held) in enumerate(zip(self.windows, table.windows, strict=True), 1):
            new = window.publish(held, table.key, num_blocks)
            for place in new:
                journal.published(table.key, place, place + 1, group)
        return blocks

    def settle(self, table: BlockTable) -> None:
        """Exchange duplicates for canonical blocks, and give back what left a window."""
        self.release_tails(table)
        table.first_adopted = None
        if table.duplicates:
            for position, canonical in table.duplicates:
                own = array("i", [table.blocks[position]])
                table.blocks[position] = canonical
                self._full.give_back(table.tenant, own)
            table.duplicates.clear()
        if not self.windows:
            return
        for window, held in zip(self.windows, table.windows, strict=True):
            held.first_adopted = None
            window.slide(held, table.num_planned)

    def retract(self, table: BlockTable, journal: Journal) -> None:
        """Take back what a table published in this step."""
        identity = table.key.identity
        if table.first_adopted is not None:
            table.path, forgotten = self.index.retract(table.path, table.first_adopted)
            table.num_published, table.first_adopted = table.first_adopted, None
            journal.retracted(identity, forgotten.digests, 0)
        for group, (window, held) in enumerate(zip(self.windows, table.windows, strict=True), 1):
            journal.retracted(identity, window.retract(held), group)

    def seal(self, table: BlockTable, num_tokens: int) -> CacheEntry | None:
        """Make the partial last block of an ended sequence findable token by token.

        Returns:
            The index's entry for it, to be let go of with the table; None if there is none.
        """
        full = num_tokens // self.block_size
        if table.num_published != full or table.duplicates or num_tokens == full * self.block_size:
            return None
        block = BlockId(table.blocks[full])
        tail = self.index.seal(table.path, table.key, block, num_tokens)
        if tail is not None and self.windows:
            text = table.key.packed_range(full * self.block_size, num_tokens)
            for window, held in zip(self.windows, table.windows, strict=True):
                window.seal(held, table.key, full, text)
        return tail

    def release_tails(self, table: BlockTable) -> None:
        """Let go of the sources of copies; windows have some only if group 0 has one."""
        if table.tail_path is None:
            return
        self.index.release_tail(table.tail_path)
        table.tail_path = None
        if not self.windows:
            return
        for window, held in zip(self.windows, table.windows, strict=True):
            window.release_tail(held)

    def scrap(self, table: BlockTable, num_sealed: int = 0) -> None:
        """Give back the blocks that no index has.

        Args:
            table: Whose.
            num_sealed: How many of its private blocks are sealed tails by now.
        """
        if len(table.blocks) > table.num_published + num_sealed or table.duplicates:
            self._full.give_back(table.tenant, table.private_blocks[num_sealed:])

    def quote(self, table: BlockTable) -> "list[tuple[bytearray, int]] | None":
        """Return what a table published, as the index keeps it; None if only a copy would do."""
        return None if table.path is None else self.index.quote(table.path)

    def drop(self, table: BlockTable) -> None:
        """Let go of all that a table holds."""
        self.scrap(table)
        self.let_go(table)

    def let_go(self, table: BlockTable, tail: CacheEntry | None = None) -> None:
        """Let go of what a table shares, after what it had alone; trim its tenant to its quota.

        Args:
            table: Whose.
            tail: Its sealed tail, if it has one.
        """
        if table.path is not None:
            self.index.release(table.path, table.turn, tail)
        if self.windows:
            for window, held in zip(self.windows, table.windows, strict=True):
                window.release(held)
        if self.config.allotments:
            for allocator in self.allocators:
                allocator.trim(table.tenant)

    def num_shared(self, table: BlockTable, group: int, num_tokens: int) -> int:
        """Return how many leading blocks a fork of a table shares with it in a group."""
        if group == 0:
            return min(table.num_published, num_tokens // self.block_size)
        return table.windows[group - 1].num_shared

    def fork(self, table: BlockTable, num_tokens: int) -> BlockTable | None:
        """Share a table's published blocks with a new one, and give it blocks for the rest.

        Returns:
            None, with no effect, if it does not fit.
        """
        for group, allocator in enumerate(self.allocators):
            missing = self.blocks_for(num_tokens) - self.num_shared(table, group, num_tokens)
            if missing > allocator.num_free_for(table.tenant):
                return None
        shared = self.num_shared(table, 0, num_tokens)
        child = BlockTable(table.key.copy(), table.blocks[:shared], writes=table.writes)
        for position, canonical in table.duplicates:
            child.blocks[position] = canonical
        child.num_published = shared
        if table.path is not None:
            child.path = self.index.fork(table.path)
        pairs = zip(self.windows, table.windows, strict=True)
        child.windows = [window.fork(held) for window, held in pairs]
        self.take(child, num_tokens, num_tokens)
        return child

    def forget(self, belongs: Callable[[CacheEntry], bool]) -> int:
        """Make all evictable blocks scratch that belong to something; returns how many."""
        return sum(allocator.forget(belongs) for allocator in self.allocators)
