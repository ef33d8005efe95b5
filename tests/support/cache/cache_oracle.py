"""A slow, obvious cache that predicts the real one.

The oracle gets the same calls as a cache and predicts everything: what hits, what fits, which
blocks are allocated, evicted and freed in which order, and who holds what. It has no digests,
trees or counters: contents are in a dict, references are recounted from block tables, a look-up
compares with everything there is.

A *text* stands for the KV of one token, as in ``fake_kv``: it is the same if and only if the token,
the image that it stands for, everything before it and the identity are.
"""

from dataclasses import dataclass, field
from typing import Self

from ostinato.cache.prefix_index import PrefixMatch
from ostinato.core.identity import PrefixKey
from ostinato.settings import PrefixCacheConfig
from tests.support.cache.cache_views import num_common
from tests.support.cache.fake_kv import spell, spell_identity

MAX_SLOTS = 600
"""A larger cache is not predicted: the oracle compares with everything there is."""


def whole_images(key: PrefixKey, start: int, stop: int) -> int:
    """Return the last end in ``start .. stop`` that no image of the sequence is cut at."""
    cut = [image.start for image in key.images if image.start < stop < image.end]
    return max(start, min([stop, *cut]))


@dataclass
class Cached:
    """A published block.

    Attributes:
        before: Text before its first token.
        texts: Texts of its tokens; fewer than a block for a sealed tail.
    """

    before: str
    texts: tuple[str, ...]


@dataclass(eq=False)
class Table:
    """A sequence's blocks, as the oracle sees them.

    Attributes:
        key: The sequence.
        texts: One per token of it so far.
        blocks: Its block table.
        writes: Whether it publishes.
        num_published: Leading blocks that are published.
        fresh: First block published in the running step; None if there is none.
        tail: Source of its copy and all before it, while the step runs.
        duplicates: Position and the block that had the same content before.
    """

    key: PrefixKey
    texts: list[str]
    blocks: list[int]
    writes: bool
    num_published: int = 0
    fresh: int | None = None
    tail: list[int] = field(default_factory=list)
    duplicates: dict[int, int] = field(default_factory=dict)

    @property
    def held(self) -> list[int]:
        """Published blocks that it holds, in token order."""
        held = range(self.num_published)
        return [self.duplicates.get(i, self.blocks[i]) for i in held]

    @property
    def private(self) -> list[int]:
        """Blocks that are not published."""
        return [self.blocks[i] for i in sorted(self.duplicates)] + self.blocks[self.num_published :]


class CacheOracle:
    """Predicts a cache of one configuration.

    Under LRU it predicts what is evicted. Under other policies it is told in ``given`` which blocks
    were allocated, and holds them to what every policy promises.
    """

    @classmethod
    def of(cls, config: PrefixCacheConfig) -> Self | None:
        """Return the oracle of a cache; None if that has more groups, tenants or slots."""
        is_plain = not (config.windows or config.states or config.tenant_shares)
        return cls(config) if is_plain and config.num_slots <= MAX_SLOTS else None

    def __init__(self, config: PrefixCacheConfig) -> None:
        self.config = config
        self.size = config.block_size
        self.cached: dict[int, Cached] = {}  # in order of publication
        self.tables: list[Table] = []
        self.free = list(range(config.num_blocks))
        self.evictable: list[int] = []
        self._freed_at = {block: -1 for block in self.free}
        self._time = 0
        self.given: list[int] = []

    def __str__(self) -> str:
        return f"oracle: {self.free_order()} {self.cached}"

    # --- looking up ---

    def check_match(self, key: PrefixKey, found: PrefixMatch) -> None:
        """Compare what a look-up has found with all that there is."""
        texts = spell(key)
        hits = self.hits(key, texts)
        num_copied, sources = self.tails(key, texts, len(hits))
        assert list(found.blocks) == hits, "whole blocks"
        assert found.num_copied_tokens == num_copied, "the longest tail"
        assert found.tail is None or found.tail.block in sources, "a tail of that length"

    def never_fits(self, num_tokens: int) -> bool:
        """Whether so many tokens need more blocks than there are."""
        return -(-num_tokens // self.size) > self.config.num_blocks

    def hits(self, key: PrefixKey, texts: list[str]) -> list[int]:
        """Return the whole blocks that hit; of several copies the oldest."""
        blocks: list[int] = []
        while (len(blocks) + 1) * self.size < len(key):
            start = len(blocks) * self.size
            wanted = tuple(texts[start : start + self.size])
            found = self._with_content(wanted)
            if not found:
                break
            blocks.append(found[0])
        return blocks

    def tails(self, key: PrefixKey, texts: list[str], num_hits: int) -> tuple[int, list[int]]:
        """Return how many tokens can be copied behind the hits, and out of which blocks."""
        start = num_hits * self.size
        stop = min(len(key) - 1, start + self.size)
        wanted = texts[start:stop]
        best: dict[int, list[int]] = {}
        before = texts[start - 1] if start else spell_identity(key.identity.root)
        for block, cached in self._children(before):
            if block == self._with_content(cached.texts)[0]:
                end = whole_images(key, start, start + num_common(wanted, cached.texts))
                best.setdefault(end - start, []).append(block)
        most = max(best, default=0)
        return (most, best[most]) if most else (0, [])

    def _with_content(self, texts: tuple[str, ...]) -> list[int]:
        return [block for block, cached in self.cached.items() if cached.texts == texts]

    def _children(self, before: str) -> list[tuple[int, Cached]]:
        return [(b, cached) for b, cached in self.cached.items() if cached.before == before]

    # --- what is asked of a cache ---

    def admit(
        self, key: PrefixKey, found: PrefixMatch, writes: bool, given: list[int]
    ) -> Table | None:
        """Predict an admission with a match; ``given`` are the blocks that were allocated."""
        self.given = given
        hits, source = list(found.blocks), found.tail.block if found.tail else None
        needed = -(-len(key) // self.size) - len(hits)
        free = len(self.free_order()) - sum(block in self.evictable for block in hits)
        if source is not None and needed > free - (source in self.evictable):
            source = None
        if needed > free:
            return None
        writes = writes and self.config.enable_prefix_caching
        # What follows a lost public prefix cannot be found.
        writes = writes and len(hits) * self.size >= key.identity.start
        table = Table(key, spell(key), hits[:], writes, num_published=len(hits))
        if source is not None:
            table.tail = [source]  # what is before it the hits hold
        self._add(table)
        table.blocks += self._allocate(needed)
        return table

    def grow(self, table: Table, num_tokens: int) -> bool:
        """Predict whether a table gets more blocks, and which."""
        needed = -(-num_tokens // self.size) - len(table.blocks)
        if needed > len(self.free_order()):
            return False
        table.blocks += self._allocate(max(0, needed))
        return True

    def publish(self, table: Table, num_tokens: int) -> None:
        """Predict which blocks become findable, and which are duplicates."""
        last = num_tokens // self.size if table.writes else 0
        for position in range(table.num_published, last):
            content = self._content(table, position, self.size)
            same = self._with_content(content.texts)
            if same and self.config.index == "radix":
                table.duplicates[position] = same[0]
                self._hold(same[0])
            else:
                self.cached[table.blocks[position]] = content
                if table.fresh is None:
                    table.fresh = position
            table.num_published = position + 1

    def commit(self, tables: list[Table]) -> None:
        """Predict what a step leaves behind."""
        for table in tables:
            self._release_tail(table)
            table.fresh = None
            for position, known in sorted(table.duplicates.items()):
                own, table.blocks[position] = table.blocks[position], known
                self._free_blocks([own])
            table.duplicates.clear()

    def fail(self, tables: list[Table]) -> None:
        """Predict what a failed step leaves behind: nothing of its own."""
        for table in tables:
            self._release_tail(table)
        for table in reversed(tables):
            if table.fresh is not None:
                for block in table.blocks[table.fresh : table.num_published]:
                    del self.cached[block]
                table.num_published = table.fresh
                self._evict_unreachable()
            self._release_blocks(table)

    def release(self, table: Table, num_tokens: int) -> None:
        """Predict what an ended sequence leaves behind."""
        full, rest = divmod(num_tokens, self.size)
        sealed = None
        sealable = self.config.seal_tails and table.writes and table.num_published == full
        start = full * self.size
        has_images = any(i.start < num_tokens and i.end > start for i in table.key.images)
        if sealable and rest and not has_images:
            content = self._content(table, full, rest)
            siblings = [cached for _, cached in self._children(content.before)]
            if not any(cached.texts[:rest] == content.texts for cached in siblings):
                sealed = table.blocks.pop(full)
                self.cached[sealed] = content
        self._release_blocks(table, sealed)

    def fork(self, table: Table, num_tokens: int) -> Table | None:
        """Predict a second continuation."""
        needed = -(-num_tokens // self.size) - table.num_published
        if needed > len(self.free_order()):
            return None
        child = Table(table.key.copy(), table.texts[:], table.held, table.writes)
        child.num_published = table.num_published
        self._add(child)
        child.blocks += self._allocate(needed)
        return child

    def reset(self, free: list[int]) -> None:
        """Forget everything; the order of the free blocks is the cache's own choice."""
        assert not self.tables and sorted(free) == list(range(self.config.num_blocks))
        self.cached.clear()
        self.evictable.clear()
        self.free = []
        self._free_blocks(free[::-1])

    # --- what can be seen ---

    def contents(self) -> dict[int, tuple[int, int]]:
        """Return references and number of tokens of each published block."""
        counts = self.references()
        return {block: (counts[block], len(c.texts)) for block, c in self.cached.items()}

    def check_slots(self, store: list[str]) -> None:
        """Law 5: whatever is findable between steps has been computed, and for this prefix."""
        for block, cached in self.cached.items():
            found = store[block * self.size :][: len(cached.texts)]
            assert found == list(cached.texts), f"block {block} holds {found}, not {cached.texts}"

    def free_order(self) -> list[int]:
        """Return all free blocks in the order in which they are given away."""
        if self.config.free_order == "unused_first":
            return self.free + self.evictable
        return sorted(self.free + self.evictable, key=self._freed_at.__getitem__)

    def references(self) -> dict[int, int]:
        """Recount who holds which published block."""
        counts = dict.fromkeys(self.cached, 0)
        for table in self.tables:
            for block in table.held + table.tail:
                counts[block] += 1
        return counts

    # --- helpers ---

    def _evict_unreachable(self) -> None:
        """Law 8: what only the failed step's copy of a block led to is found no longer."""
        gone: list[int] = []
        while True:
            ends = {cached.texts[-1] for cached in self.cached.values()}
            starts = {block: cached.before for block, cached in self.cached.items()}
            lost = [b for b, start in starts.items() if not (start in ends or start.endswith(":"))]
            if not lost:
                break
            del self.cached[lost[0]]
            gone.append(lost[0])
        for block in reversed(gone):
            self.evictable.remove(block)
            self._free_blocks([block])

    def _content(self, table: Table, position: int, num_tokens: int) -> Cached:
        start = position * self.size
        table.texts = spell(table.key, table.texts)
        before = table.texts[start - 1] if start else spell_identity(table.key.identity.root)
        return Cached(before, tuple(table.texts[start : start + num_tokens]))

    def _add(self, table: Table) -> None:
        self.tables.append(table)
        for block in table.held + table.tail:
            self._hold(block)

    def _hold(self, block: int) -> None:
        if block in self.evictable:
            self.evictable.remove(block)

    def _allocate(self, num_blocks: int) -> list[int]:
        if self.config.eviction_policy == "lru":
            given = self.free_order()[:num_blocks]
        else:
            given = self.given
            assert len(given) == num_blocks, "another number of blocks"
        for block in given:
            self._check_promise(block)
            if block in self.cached:
                del self.cached[block]
                self.evictable.remove(block)
            else:
                self.free.remove(block)
        return given

    def _check_promise(self, block: int) -> None:
        """Whatever the policy: free blocks in order, then leaves without references (law 8)."""
        if block not in self.cached:
            assert block == self.free[0], "another free block comes first"
            return
        assert not (self.free and self.config.free_order == "unused_first"), "free blocks are left"
        assert block in self.evictable, "a sequence holds it"
        texts = self.cached[block].texts
        is_copied = len(self._with_content(texts)) > 1
        assert is_copied or not self._children(texts[-1]), "cached content builds on it"

    def _release_blocks(self, table: Table, sealed: int | None = None) -> None:
        self._free_blocks(table.private)  # they come after what is sealed
        self.tables.remove(table)
        if sealed is not None:
            self._make_evictable(sealed)
        self._make_evictable_unless_held(table.held)

    def _release_tail(self, table: Table) -> None:
        tail, table.tail = table.tail, []
        self._make_evictable_unless_held(tail)

    def _make_evictable_unless_held(self, blocks: list[int]) -> None:
        counts = self.references()
        for block in reversed(blocks):
            if not counts[block] and block not in self.evictable:
                self._make_evictable(block)

    def _make_evictable(self, block: int) -> None:
        self._note_freed(block)
        self.evictable.append(block)

    def _free_blocks(self, blocks: list[int]) -> None:
        for block in reversed(blocks):
            self._note_freed(block)
        if self.config.free_order == "unused_first":
            self.free = blocks[::-1] + self.free
        else:
            self.free += blocks[::-1]

    def _note_freed(self, block: int) -> None:
        self._time += 1
        self._freed_at[block] = self._time
