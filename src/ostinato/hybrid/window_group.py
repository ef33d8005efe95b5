"""The blocks of all layers with one window size.

A query at position p of such a layer sees the last ``window`` tokens, itself included, so a
sequence of p tokens needs the blocks of tokens ``p - window + 1 .. p - 1`` and no others::

    window 9, blocks of 4, 14 tokens computed: token 14 sees tokens 6 to 14

    block   0     1     2     3
    tokens  0-3   4-7   8-11  12-15
    table   null  b7    b2    b5        block 0 has left the window and was released

Blocks that leave the window become evictable while the request runs. A hit that ends at a
block boundary needs the last ``ceil((window - 1) / block_size)`` blocks before it, and not
their ancestors: law 8 holds for full attention, whose index says which prefixes exist; here
blocks are found by their digests, one by one.

Rules:

1. A table has an entry per block of the sequence; ``null_block`` where nothing is held.
2. Held blocks are the last ones, without a gap.
3. A content is found by SHA-256 digest, and its tokens are compared.

Source: vLLM's sliding window manager and hybrid KV cache manager.
"""

from array import array
from collections.abc import Iterator

from ostinato.cache.block import CacheEntry
from ostinato.cache.block_table import BlockTable
from ostinato.cache.pool import BlockPool
from ostinato.cache.prefix_index import CachedRun, Removal
from ostinato.core.identity import Identity, PrefixKey
from ostinato.core.ids import BlockDigest
from ostinato.hybrid.layer_group import HybridMatch, LayerGroup
from ostinato.hybrid.window_content import WindowCopy, WindowTable
from ostinato.indexes.block_copy import BlockContent
from ostinato.indexes.block_hash import BlockHasher


class WindowGroup(LayerGroup):
    """The blocks of all layers with one window size."""

    has_rows, cuts = True, None

    def __init__(self, window: int, pool: BlockPool, hasher: BlockHasher) -> None:
        """Make an empty group over a pool of its own.

        Args:
            window: Tokens that a query sees, itself included, at least 1.
            pool: Its blocks.
            hasher: SHA-256 digests.
        """
        self.version = 0
        self.window = window
        self.pool = pool
        self.null_block = pool.num_blocks
        self._hasher = hasher
        self._block_size = hasher.block_size
        self._contents: dict[BlockDigest, BlockContent] = {}

    def first_needed(self, num_tokens: int) -> int:
        """Return the first block that a sequence of ``num_tokens`` tokens still needs."""
        return max(0, num_tokens - self.window + 1) // self._block_size

    def longest_hit(self, key: PrefixKey, num_blocks: int) -> int:
        """Return the longest prefix, in blocks, whose window is cached.

        Args:
            key: The sequence.
            num_blocks: Bound on the answer.

        Effects: none. Cost: at most one look-up per block.
        """
        digests = self._hasher.digests(key, num_blocks)
        end = num_blocks
        while end:
            places = range(end - 1, self.first_needed(end * self._block_size) - 1, -1)
            missing = next((i for i in places if digests[i] not in self._contents), None)
            if missing is None:
                return end
            end = missing  # every longer prefix that ends before needs this block too
        return 0

    def kept(self, key: PrefixKey, num_blocks: int) -> list[tuple[int, int]]:
        """List the blocks of the window before the end of a hit, by place."""
        blocks = [copy.block for copy in self._window(key, num_blocks)]
        return list(enumerate(blocks, num_blocks - len(blocks)))

    def room(
        self, key: PrefixKey, num_blocks: int, tail: CacheEntry | None, load_end: int = 0
    ) -> int:
        """Return how many tokens could have slots if a hit of ``num_blocks`` blocks were held."""
        held = self._window(key, num_blocks) + ([] if tail is None else [tail])
        free = self.pool.num_free_for(key.identity.owner) - sum(not e.ref_count for e in held)
        return (max(num_blocks, self.first_needed(load_end)) + free) * self._block_size

    def room_to_grow(self, held: WindowTable, num_tokens: int) -> int:
        """Return how many of a sequence's first ``num_tokens`` could have slots."""
        if num_tokens > len(held.blocks) * self._block_size:
            free = self.pool.num_free_for(held.tenant)
            num_tokens = min(num_tokens, (len(held.blocks) + free) * self._block_size)
        return num_tokens

    def num_to_fork(self, held: WindowTable, num_blocks: int) -> int:
        """Return how many blocks a fork does not share."""
        return num_blocks - held.num_shared

    def hold(self, key: PrefixKey, match: HybridMatch, tail: CacheEntry | None) -> WindowTable:
        """Hold the window before the end of a hit, and the source of a copy.

        Of what is loaded, places before the window at its end stay empty.
        """
        num_blocks = len(match.blocks)
        copies = self._window(key, num_blocks)
        self.pool.acquire(copies)
        first = num_blocks - len(copies)
        blocks = array("i", [self.null_block] * first + [copy.block for copy in copies])
        noted = [*[None] * first, *copies]
        held = WindowTable(key.identity.owner, blocks, noted, first, num_blocks)
        if isinstance(tail, WindowCopy):
            self.pool.acquire((tail,))
            held.tail = tail
        self._slide(held, match.load_end)
        if (missing := self.first_needed(match.load_end) - num_blocks) > 0:
            held.blocks.extend([self.null_block] * missing)
            held.copies.extend([None] * missing)
            held.first = len(held.blocks)
        return held

    def find_tail(self, key: PrefixKey, num_blocks: int, name: bytes) -> WindowCopy | None:
        """Find the copy of a block that the sequence leaves in its middle.

        Args:
            key: The sequence.
            num_blocks: Blocks before it.
            name: The block's packed tokens and extras.
        """
        content = self._contents.get(self._hasher.child(key, num_blocks, name))
        return content.copies[0] if content is not None and content.name == name else None

    def release_tail(self, held: WindowTable) -> None:
        """Release the source of a copy, if there is one."""
        if held.tail is not None:
            self.pool.release((held.tail,))
            held.tail = None

    def take(self, table: BlockTable, held: WindowTable, num_tokens: int) -> None:
        """Give a table private blocks for its first tokens."""
        missing = -(-num_tokens // self._block_size) - len(held.blocks)
        if missing > 0:
            held.blocks.extend(self.pool.allocate(table, missing, self))
            held.copies.extend([None] * missing)

    def publish(
        self, table: BlockTable, held: WindowTable, num_tokens: int
    ) -> list[tuple[int, bool]]:
        """Make a sequence's first full blocks findable, as far as the table holds them."""
        published, key, num_blocks = [], table.key, num_tokens // self._block_size
        digests = self._hasher.digests(key, num_blocks)
        for place in range(max(held.num_published, held.first), num_blocks):
            name = self._hasher.name(key, place)
            content = self._content(key.identity, digests[place], name)
            published.append((place, not content.copies))
            held.copies[place] = WindowCopy(held.blocks[place], content, self.pool.now())
            if held.first_published is None:
                held.first_published = place
        held.num_published = max(held.num_published, num_blocks)
        return published

    def retract(self, held: WindowTable) -> Removal:
        """Take back what this step published; those blocks are private again."""
        removed = array("i")
        if held.first_published is not None:
            for place in range(len(held.blocks) - 1, held.first_published - 1, -1):
                copy = held.copies[place]
                if copy is not None:
                    assert copy.ref_count == 1, "another request holds it"
                    copy.ref_count = 0
                    self._remove(copy)
                    removed.append(copy.block)
                    held.copies[place] = None
            held.num_published, held.first_published = held.first_published, None
        return Removal(removed)

    def settle(self, table: BlockTable, held: WindowTable) -> None:
        """Release the blocks that left the window with this step, deepest first."""
        held.first_published = None
        self._slide(held, table.num_computed)

    def release(self, table: BlockTable, held: WindowTable) -> None:
        """Release all that a table holds, deepest first."""
        self.release_tail(held)
        self._release_places(held, held.first, len(held.blocks))
        held.first = len(held.blocks)

    def publish_partial(
        self, table: BlockTable, held: WindowTable, num_blocks: int, text: bytes
    ) -> None:
        """Make the partial last block of an ended sequence findable, with the window before it."""
        digest = self._hasher.child(table.key, num_blocks, text)
        content = self._content(table.key.identity, digest, text)
        held.copies[num_blocks] = WindowCopy(held.blocks[num_blocks], content, self.pool.now())

    def fork(self, held: WindowTable) -> WindowTable:
        """Share what is published; the rest of the places are still to be given blocks."""
        shared = held.num_shared
        self.pool.acquire([copy for copy in held.copies[held.first : shared] if copy is not None])
        blocks, copies = held.blocks[:shared], held.copies[:shared]
        return WindowTable(held.tenant, blocks, copies, held.first, shared)

    def evict(self, entry: CacheEntry, max_blocks: int) -> Removal:
        """Remove one evictable copy."""
        assert isinstance(entry, WindowCopy) and not entry.ref_count and max_blocks
        self._remove(entry)
        return Removal(array("i", [entry.block]))

    def runs(self) -> Iterator[CachedRun]:
        """Walk everything published; the copies of one content are one run."""
        return (CachedRun(None, content.copies) for content in self._contents.values())

    def copies(self) -> Iterator[WindowCopy]:
        """Walk every published block."""
        return (copy for content in self._contents.values() for copy in content.copies)

    def check(self, every: list[WindowTable]) -> None:
        """Assert rules 1 to 3; references are recounted from live tables."""
        held = list[WindowCopy | None]()
        for table in every:
            assert len(table.blocks) == len(table.copies), "a place without a note"
            for place, block in enumerate(table.blocks):
                assert (block == self.null_block) == (place < table.first), "a gap in a window"
            held += [*table.copies[table.first :], table.tail]
        self.pool.check_entries([*self.copies()], filter(None, held))
        private = [block for table in every for block in table.private_blocks]
        self.pool.check([*private, *(copy.block for copy in self.copies())])

    def _window(self, key: PrefixKey, num_blocks: int) -> "list[WindowCopy]":
        """List the oldest copies of the window before a block boundary."""
        digests = self._hasher.digests(key, num_blocks)
        first = self.first_needed(num_blocks * self._block_size)
        return [self._contents[digests[i]].copies[0] for i in range(first, num_blocks)]

    def _content(self, identity: Identity, digest: BlockDigest, name: bytes) -> BlockContent:
        content = self._contents.get(digest)
        if content is None:
            content = BlockContent(identity, digest, name)
            self._contents[digest] = content
        assert content.name == name, "two blocks of one SHA-256 digest"
        return content

    def _slide(self, held: WindowTable, num_tokens: int) -> None:
        """Release the places that the window after ``num_tokens`` tokens does not reach."""
        keep = min(self.first_needed(num_tokens), len(held.blocks))
        self._release_places(held, held.first, keep)
        held.first = max(held.first, keep)

    def _release_places(self, table: WindowTable, first: int, last: int) -> None:
        """Release the places ``first .. last``, deepest first."""
        held = list(zip(table.blocks[first:last], table.copies[first:last], strict=True))
        self.pool.release([copy for _, copy in reversed(held) if copy is not None])
        private = array("i", [block for block, copy in held if copy is None])
        self.pool.free(private, table.tenant)
        table.blocks[first:last] = array("i", [self.null_block] * len(held))
        table.copies[first:last] = [None] * len(held)

    def _remove(self, copy: WindowCopy) -> None:
        """Take a copy out of its content; the last one takes the content with it."""
        self.version += 1
        copy.remove()
        if not copy.content.copies:
            del self._contents[copy.content.digest]
