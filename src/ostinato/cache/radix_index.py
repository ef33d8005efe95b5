"""How are prefixes found by walking a tree?

One tree per identity; its edges are runs of whole blocks with their tokens. A match compares
tokens (``memcmp`` of packed ids), so it needs no hash to be right, and its cost in Python is
one step per branch on the way, not per block.

Rules:

1. Every block of a node has the same holders; a node is split where they part.
2. A node's reference count is the number of live paths that end in it or below it, and of
   sources of copies that are it; whoever holds such a source holds a path to it.
3. Idle nodes are in the eviction policy, held nodes and roots are not.
4. Each content is published once: a second block of the same content is a duplicate, which
   its owner exchanges for the canonical one.
5. All blocks of a node are of one identity; behind a public head, another one's begin.

Source: RadixAttention, arXiv 2312.07104; SGLang's radix cache.
"""

from array import array
from collections.abc import Iterator, Sequence

from ostinato.cache.block import CacheEntry
from ostinato.cache.block_hash import BlockHasher, block_bytes
from ostinato.cache.policies.contract import Turn
from ostinato.cache.pool import BlockPool
from ostinato.cache.prefix_index import (
    CachedBlock,
    CachedRun,
    Forgotten,
    PrefixMatch,
    Publication,
    TailMatch,
)
from ostinato.cache.radix_growth import first_text, go_on, overtaken, split
from ostinato.cache.radix_match import longest_prefix
from ostinato.cache.radix_node import RadixNode
from ostinato.cache.radix_path import hold, let_go, quote
from ostinato.cache.radix_walk import cached_blocks, cached_runs, check
from ostinato.core.identity import Identity, PrefixKey
from ostinato.core.ids import BlockDigest, BlockId

_ALL_NEW = Publication()
"""What most publications become; nobody changes it."""


class RadixIndex:
    """A tree of token runs. A path is the deepest node that a request holds."""

    def __init__(self, pool: BlockPool, block_size: int, hasher: BlockHasher | None = None) -> None:
        """Make an empty index over a pool; with a hasher if outsiders are told of blocks."""
        self._pool = pool
        self._block_size = block_size
        self._hasher = hasher
        self._roots: dict[Identity, RadixNode] = {}

    def match(self, key: PrefixKey, num_tokens: int) -> PrefixMatch:
        """Find the longest cached prefix among a sequence's first tokens."""
        identity = key.identity
        if identity.head is not None:
            root = self._roots.get(identity.root)
        elif (root := self._roots.get(identity)) is not None:
            key.identity = root.identity  # the same value: nodes share it, and compare it faster
        return longest_prefix(root, key, num_tokens, self._block_size)

    def tail_name(self, tail: TailMatch) -> bytes:
        """Return the packed tokens and extras of a tail's block."""
        node: RadixNode = tail.entry
        return node.name_of(tail.place, self._block_size)

    def num_idle_blocks(self, match: PrefixMatch) -> int:
        """Count the matched whole blocks that nobody holds, in O(depth)."""
        if match.cursor is None:
            return 0
        node: RadixNode = match.cursor[0]
        skipped = node.num_blocks - match.cursor[1]
        idle = sum(n.num_blocks for n in node.up() if not n.ref_count)
        return idle - (skipped if not node.ref_count else 0)

    def acquire(self, key: PrefixKey, match: PrefixMatch) -> tuple[RadixNode, RadixNode | None]:
        """Hold the matched blocks; the node that the match leaves in its middle is split.

        Of a tail's node what follows the source block is split off.
        """
        if match.cursor is None or not match.blocks:
            path = self._root(key.identity.root)
        else:
            path, used = match.cursor
            if used < path.num_blocks:
                path = self._split(path, used)
        idle, source = hold(path), None
        if match.tail is not None:
            source = self._source(match.tail)
            if not source.ref_count:
                idle.append(source)
            source.ref_count += 1
        if idle:
            self._pool.hold_all(idle)
        return path, source

    def _source(self, tail: TailMatch) -> RadixNode:
        """Return the node of a tail's source block alone."""
        node: RadixNode = tail.entry
        assert node.blocks[0] == tail.block, "the match has been split off before it"
        return self._split(node, 1) if node.num_blocks > 1 else node

    def release_tail(self, tail: RadixNode) -> None:
        """Let go of the source block."""
        tail.ref_count -= 1
        if not tail.ref_count:
            tail.is_growing = False
            self._pool.idle(tail)

    def count_hit(self, path: RadixNode) -> None:
        """Note that a request's hit ended where this path ends."""
        if path.parent is not None:
            path.count_hits(1)

    def last_entry(self, path: RadixNode) -> RadixNode | None:
        """Return the deepest entry that a path holds; None if it holds none."""
        return None if path.is_root else path

    def fork(self, path: RadixNode) -> RadixNode:
        """Hold what a path holds once more."""
        idle = hold(path)
        if idle:
            self._pool.hold_all(idle)
        return path

    def publish(
        self, path: RadixNode, key: PrefixKey, blocks: "array[int]", turn: Turn | None = None
    ) -> tuple[RadixNode, Publication]:
        """Add new content to the tree; where the tree has it, follow it and name duplicates."""
        node, size, done, num_blocks = path, self._block_size, 0, len(blocks)
        duplicates: list[tuple[int, BlockId]] = []
        while done < num_blocks:
            name = block_bytes(key, node.end, size)
            child = node.children.get(name)
            if child is None:
                node, count = self._add(node, key, blocks[done:] if done else blocks, name, turn)
                done += count
                continue
            with memoryview(key.tokens).cast("B") as packed:
                used = child.num_common_blocks(key, packed, num_blocks - done, size)
            if used < child.num_blocks:
                child = self._split(child, used)
            if not child.ref_count:
                self._pool.hold_all((child,))
            child.ref_count += 1
            duplicates += [
                (child.start + i, BlockId(block)) for i, block in enumerate(child.blocks)
            ]
            node, done = child, done + used
        return node, Publication(len(duplicates), tuple(duplicates)) if duplicates else _ALL_NEW

    def retract(self, path: RadixNode, num_blocks: int) -> tuple[RadixNode, Forgotten]:
        """Remove what a path published last; rule 1 makes it whole nodes after one split."""
        node, dropped, digests = path, array("i"), list[BlockDigest]()
        while node.end > num_blocks:
            if node.start < num_blocks:
                self._split(node, num_blocks - node.start)
            assert node.ref_count == 1 and node.is_leaf, "somebody builds on it"
            parent = node.parent
            assert parent is not None
            dropped.extend(node.blocks[::-1])
            digests += reversed(node.digests)
            node.leave_hits(parent)
            parent.disown(node, self._block_size)
            node = parent
        return node, Forgotten(dropped, tuple(digests))

    def seal(
        self,
        path: RadixNode,
        key: PrefixKey,
        block: BlockId,
        num_tokens: int,
    ) -> RadixNode | None:
        """Add a leaf with fewer tokens than a block."""
        start = path.end * self._block_size
        if key.has_extras and key.num_text_tokens(start, num_tokens) < num_tokens - start:
            return None  # only text is shared token by token
        text = key.packed_range(start, num_tokens)
        if path.children:
            best = path.children.most_alike(text)
            if best is not None and best[1] == num_tokens - start:
                return None
        tail = RadixNode(path, key.identity)
        tail.tokens += text
        tail.add_blocks(array("i", (block,)))
        path.add_child(None, text, tail)
        self._pool.adopt(tail)
        return tail

    def release(
        self, path: RadixNode, turn: Turn | None = None, tail: CacheEntry | None = None
    ) -> None:
        """Let go of a path, tail first, in O(depth)."""
        idle = [] if tail is None else [tail]
        root = let_go(path, idle)
        if idle:
            self._pool.idle_all(idle, turn)
        if not root.ref_count and not root.children:
            del self._roots[root.identity]

    def quote(self, path: RadixNode) -> list[tuple[bytearray, int]]:
        """Return a path's tokens without a copy: those of its nodes, in O(depth)."""
        return quote(path)

    def evict(self, entry: CacheEntry, most: int) -> Forgotten:
        """Cut blocks off an idle leaf, deepest first; at once only what was published at once."""
        assert isinstance(entry, RadixNode) and not entry.ref_count and entry.is_leaf
        parent = entry.parent
        assert parent is not None
        kept = entry.num_blocks - min(most, entry.num_of_one_birth())
        digests = entry.digests[kept:]
        if not kept:
            parent.disown(entry, self._block_size)
        self._pool.shrink(entry, entry.num_blocks - kept)
        dropped = entry.cut(kept, self._block_size)
        if not kept:
            entry.leave_hits(parent)
            if parent.is_root:
                if not parent.ref_count and not parent.children:
                    del self._roots[parent.identity]
            elif parent.is_leaf:
                self._pool.expose(parent)
        return Forgotten(dropped[::-1], tuple(reversed(digests)))

    def contents(self) -> Iterator[CachedBlock]:
        """Walk every published block."""
        return cached_blocks(self._roots, self._block_size)

    def runs(self) -> Iterator[CachedRun]:
        """Walk everything published: a node is one run, cut where hits ended in it."""
        return cached_runs(self._roots, self._block_size)

    def check(self, paths: "list[RadixNode]", tails: "Sequence[RadixNode]" = ()) -> None:
        """Assert rules 1 to 5 and that the tree's links agree."""
        idle = {id(entry) for entry in self._pool.entries()}
        check(self._roots, self._block_size, idle, paths, tails)

    def _root(self, identity: Identity) -> RadixNode:
        root = self._roots.get(identity)
        if root is None:
            root = self._roots[identity] = RadixNode(None, identity)
        return root

    def _add(
        self, node: RadixNode, key: PrefixKey, blocks: "array[int]", name: bytes, turn: Turn | None
    ) -> tuple[RadixNode, int]:
        """Put new content behind a held node.

        Where the policy goes by use, what was cached before is a node of its own: it is worth more
        than what follows it.

        Args:
            node: What it continues.
            key: The sequence.
            blocks: Those of its blocks that are new.
            name: Packed tokens and extras of the first of them.
            turn: Learns what is remembered of them.

        Returns:
            The node that has them now, and how many it took.
        """
        if self._pool.joins:
            uses, tails = 1, overtaken(node, key, name, self._block_size)
            goes_on = tails is not None
            if tails is not None:
                go_on(node, tails, self._pool.now())
        else:
            known = self._pool.past.recall(key, node.end, len(blocks), self._block_size, turn)
            blocks, uses = blocks[: known.num_blocks], known.uses + 1
            is_own = node.parent is not None and node.identity == key.identity
            goes_on = is_own and node.uses == uses and node.ref_count == 1 and node.is_leaf
        if not goes_on:
            node = self._add_child(node, key, name, uses)
        node.append(key, blocks, self._block_size)
        if self._hasher is not None:
            digests = self._hasher.digests(key, node.end)
            node.add_digests(digests[node.end - len(blocks) : node.end])
        return node, len(blocks)

    def _add_child(self, node: RadixNode, key: PrefixKey, name: bytes, uses: int) -> RadixNode:
        """Hang an empty node behind another, of one request's own."""
        child = RadixNode(node, key.identity)
        child.ref_count, child.uses, child.is_growing = 1, uses, True
        self._pool.adopt(child)
        node.add_child(name, first_text(key, child.start, name, self._block_size), child)
        return child

    def _split(self, node: RadixNode, num_blocks: int) -> RadixNode:
        """Make the first blocks of a node a node of their own, which is returned."""
        head = split(node, num_blocks, self._block_size)
        self._pool.split(node, head)
        return head
