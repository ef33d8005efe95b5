"""A slow, obvious cache that predicts the real one.

The oracle gets the same calls as a cache and predicts everything: what hits, what fits, which
blocks are allocated, evicted and freed in which order, and who holds what. It has no digests,
trees or counters: contents are in a dict, references are recounted from block tables, a look-up
compares with everything there is.

A *value* stands for the KV of one token: it is the same if and only if the token, the image that
it stands for, everything before it and the identity are.
"""

from dataclasses import dataclass, field

from ostinato.core.identity import PrefixKey
from ostinato.settings import PrefixCacheConfig


class KvValues:
    """Numbers that stand for KV."""

    def __init__(self) -> None:
        self._numbers: dict[object, int] = {}

    def root(self, key: PrefixKey) -> int:
        """Return the value before a sequence's first token: its identity."""
        return self._number(key.identity)

    def of(self, key: PrefixKey, known: list[int] | None = None) -> list[int]:
        """Return one value per token; ``known`` are those of its first tokens."""
        values = list(known or ())
        before = values[-1] if values else self.root(key)
        for position in range(len(values), len(key)):
            before = self._number((before, key.tokens[position], _image_at(key, position)))
            values.append(before)
        return values

    def _number(self, thing: object) -> int:
        return self._numbers.setdefault(thing, len(self._numbers))


def _image_at(key: PrefixKey, position: int) -> tuple[bytes, int, int] | None:
    """Return which part of which image a position stands for."""
    for image in key.images:
        if image.start <= position < image.end:
            return image.digest, position - image.start, image.length
    return None


def whole_images(key: PrefixKey, start: int, stop: int) -> int:
    """Return the last end in ``start .. stop`` that no image of the sequence is cut at."""
    cut = [image.start for image in key.images if image.start < stop < image.end]
    return max(start, min([stop, *cut]))


@dataclass
class Cached:
    """A published block.

    Attributes:
        before: Value of the token before its first one.
        values: Values of its tokens; fewer than a block for a sealed tail.
    """

    before: int
    values: tuple[int, ...]


@dataclass(eq=False)
class Table:
    """A sequence's blocks, as the oracle sees them.

    Attributes:
        key: The sequence.
        values: One per token of it so far.
        blocks: Its block table.
        writes: Whether it publishes.
        num_published: Leading blocks that are published.
        fresh: First block published in the running step; None if there is none.
        tail: Source of its copy and all before it, while the step runs.
        duplicates: Position and the block that had the same content before.
    """

    key: PrefixKey
    values: list[int]
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

    def __init__(self, config: PrefixCacheConfig, values: KvValues) -> None:
        self.config = config
        self.size = config.block_size
        self.values = values
        self.cached: dict[int, Cached] = {}  # in order of publication
        self.tables: list[Table] = []
        self.free = list(range(config.num_blocks))
        self.evictable: list[int] = []
        self._freed_at = {block: -1 for block in self.free}
        self._time = 0
        self.given: list[int] = []

    # --- looking up ---

    def hits(self, key: PrefixKey, values: list[int]) -> list[int]:
        """Return the whole blocks that hit; of several copies the oldest."""
        blocks: list[int] = []
        while (len(blocks) + 1) * self.size < len(key):
            start = len(blocks) * self.size
            wanted = tuple(values[start : start + self.size])
            found = self._with_content(wanted)
            if not found:
                break
            blocks.append(found[0])
        return blocks

    def tails(self, key: PrefixKey, values: list[int], num_hits: int) -> tuple[int, list[int]]:
        """Return how many tokens can be copied behind the hits, and out of which blocks."""
        start = num_hits * self.size
        stop = min(len(key) - 1, start + self.size)
        wanted = values[start:stop]
        best: dict[int, list[int]] = {}
        for block, cached in self._children(values[start - 1] if start else self.values.root(key)):
            if block == self._with_content(cached.values)[0]:
                end = whole_images(key, start, start + _num_common(wanted, cached.values))
                best.setdefault(end - start, []).append(block)
        most = max(best, default=0)
        return (most, best[most]) if most else (0, [])

    def _with_content(self, values: tuple[int, ...]) -> list[int]:
        return [block for block, cached in self.cached.items() if cached.values == values]

    def _children(self, before: int) -> list[tuple[int, Cached]]:
        return [(b, cached) for b, cached in self.cached.items() if cached.before == before]

    # --- what is asked of a cache ---

    def admit(
        self,
        key: PrefixKey,
        values: list[int],
        hits: list[int],
        source: int | None,
        writes: bool,
    ) -> Table | None:
        """Predict an admission; ``source`` is the block to copy from."""
        needed = -(-len(key) // self.size) - len(hits)
        free = len(self.free_order()) - sum(block in self.evictable for block in hits)
        if source is not None and needed > free - (source in self.evictable):
            source = None
        if needed > free:
            return None
        caching = self.config.enable_prefix_caching
        table = Table(key, values, hits[:], writes and caching, num_published=len(hits))
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
            same = self._with_content(content.values)
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
            self._release_blocks(table)

    def release(self, table: Table, num_tokens: int) -> None:
        """Predict what an ended sequence leaves behind."""
        full, rest = divmod(num_tokens, self.size)
        sealed = None
        sealable = self.config.seal_tails and table.writes and table.num_published == full
        positions = range(full * self.size, num_tokens)
        has_images = any(_image_at(table.key, place) is not None for place in positions)
        if sealable and rest and not has_images:
            content = self._content(table, full, rest)
            siblings = [cached for _, cached in self._children(content.before)]
            if not any(cached.values[:rest] == content.values for cached in siblings):
                sealed = table.blocks.pop(full)
                self.cached[sealed] = content
        self._release_blocks(table, sealed)

    def fork(self, table: Table, num_tokens: int) -> Table | None:
        """Predict a second continuation."""
        needed = -(-num_tokens // self.size) - table.num_published
        if needed > len(self.free_order()):
            return None
        child = Table(table.key.copy(), table.values[:], table.held, table.writes)
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

    def _content(self, table: Table, position: int, num_tokens: int) -> Cached:
        start = position * self.size
        before = table.values[start - 1] if start else self.values.root(table.key)
        return Cached(before, tuple(table.values[start : start + num_tokens]))

    def _add(self, table: Table) -> None:
        self.tables.append(table)
        for block in table.held + table.tail:
            self._hold(block)

    def _hold(self, block: int) -> None:
        if block in self.evictable:
            self.evictable.remove(block)

    def _allocate(self, num_blocks: int) -> list[int]:
        if self.config.policy == "lru":
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
        values = self.cached[block].values
        is_copied = len(self._with_content(values)) > 1
        assert is_copied or not self._children(values[-1]), "cached content builds on it"

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


def _num_common(left: list[int], right: tuple[int, ...]) -> int:
    """Count the values that two runs begin with alike."""
    pairs = enumerate(zip(left, right, strict=False))
    parts = (place for place, (mine, theirs) in pairs if mine != theirs)
    return next(parts, min(len(left), len(right)))
