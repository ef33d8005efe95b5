"""Prefix index as a radix tree that compares tokens.

One tree per identity; its edges are runs of whole blocks with their tokens. A match compares
tokens (``memcmp`` of packed ids), so it needs no hash to be right, and costs one step in Python
per branch, not per block::

    sequence  ABCD EFGH IJKL MNOP QRST UV
              └─ node, whole ─┘└ node ┘└─ tail: the child with the longest common prefix

A path is the deepest node that a request holds; holding it counts one holder in each node up to
the root.

Rules:

1. Every block of a node has the same holders; a node is split where they part.
2. A node's reference count is the number of live paths that end in it or below it, and of
   sources of copies that are it; a request that holds such a source holds a path to it.
3. Idle nodes are in the eviction policy, held nodes and roots are not.
4. Each content is published once: a second block of the same content is a duplicate, which
   its owner exchanges for the canonical one.
5. All blocks of a node are of one identity; after a public prefix, another identity begins.

Source: RadixAttention, arXiv 2312.07104; SGLang's radix cache.
"""

from array import array
from collections.abc import Iterator, Sequence

from ostinato.cache.block import CacheEntry
from ostinato.cache.eviction import RequestSummary
from ostinato.cache.pool import BlockPool
from ostinato.cache.prefix_index import (
    CachedBlock,
    CachedRun,
    PrefixMatch,
    PublishResult,
    Removal,
    TailMatch,
)
from ostinato.cache.radix_node import RadixNode
from ostinato.cache.radix_walk import cached_blocks, cached_runs, check
from ostinato.core.identity import Identity, PrefixKey
from ostinato.core.ids import BlockId
from ostinato.core.tokens import TOKEN_BYTES, num_common_tokens

_ALL_NEW = PublishResult()
"""The usual result of a publication; never changed."""


class RadixIndex:
    """A tree of token runs.

    Attributes:
        version: Raised whenever content is added, split or removed: older matches are stale.
    """

    def __init__(self, pool: BlockPool, block_size: int) -> None:
        """Make an empty index over a pool."""
        self.version = 0
        self._pool = pool
        self._block_size = block_size
        self._roots: dict[Identity, RadixNode] = {}

    def match(self, key: PrefixKey, num_tokens: int) -> PrefixMatch:
        """Find the longest cached prefix among a sequence's first tokens.

        The match's cursor is the last node, and how many of its blocks match.

        Cost: O(num_tokens) compared bytes, O(depth) steps in Python.
        """
        size, blocks, root = self._block_size, array("i"), self._roots.get(key.identity.root)
        if root is None:
            return PrefixMatch(size, blocks, None, None, key, self, self.version)
        node, used, done, most = root, 0, 0, num_tokens // size
        is_plain = not key.has_extras
        view = memoryview(key.tokens)  # a slice of it copies nothing
        while done < most and (child := node.children.newest) is not None:
            # Most nodes have one child, which agrees as a whole: found without its name.
            is_whole = is_plain and _agrees(child, view, most, size)
            if not is_whole:
                child = node.children.get(key.block_name(done, size))
                if child is None:
                    break
                is_whole = is_plain and _agrees(child, view, most, size)
            node, used = child, child.num_blocks
            if not is_whole:
                used = child.num_common_blocks(key, view.cast("B"), most - done, size)
            done += used
            if used < child.num_blocks:
                blocks.extend(child.blocks[:used])
                break
            blocks.extend(child.blocks)
        tail = None
        if used < node.num_blocks or node.children.by_text:
            tail = self._tail(key, num_tokens, node, used)
        return PrefixMatch(size, blocks, tail, (node, used), key, self, self.version)

    def _tail(
        self, key: PrefixKey, num_tokens: int, node: RadixNode, used: int
    ) -> TailMatch | None:
        """Find the block after a match with the longest common prefix with the sequence."""
        size = self._block_size
        start = (node.start + used) * size
        stop = min(num_tokens, start + size)
        if key.has_extras:
            stop = start + key.num_text_tokens(start, stop)
        if stop <= start or size == 1:  # no prompt ends inside a block of one token
            return None
        text = key.tokens[start:stop].tobytes()
        if used < node.num_blocks:
            common = num_common_tokens(node.text_of(used, size), text)
            return TailMatch(BlockId(node.blocks[used]), common, node, used) if common else None
        best = node.children.longest_common_prefix(text)
        return None if best is None else TailMatch(BlockId(best[0].blocks[0]), best[1], best[0])

    def num_idle_blocks(self, match: PrefixMatch) -> int:
        """Count the matched whole blocks that no request holds, in O(depth)."""
        if match.cursor is None:
            return 0
        node: RadixNode = match.cursor[0]
        skipped = node.num_blocks - match.cursor[1]
        idle = sum(n.num_blocks for n in node.up() if not n.ref_count)
        return idle - (skipped if not node.ref_count else 0)

    def acquire(
        self, key: PrefixKey, match: PrefixMatch, summary: RequestSummary | None = None
    ) -> tuple[RadixNode, RadixNode | None]:
        """Hold the matched blocks; a node that matches in part is split.

        Of a tail's node, what follows the source block is split off.
        """
        if match.cursor is None or not match.blocks:
            path = self._root(key.identity.root)
        else:
            path, used = match.cursor
            if used < path.num_blocks:
                path = self._split(path, used)
        idle, source = _hold(path), None
        if match.tail is not None:
            source = match.tail.entry
            assert source.blocks[0] == match.tail.block, "the match was split off before it"
            if source.num_blocks > 1:
                source = self._split(source, 1)
            if not source.ref_count:
                idle.append(source)
            source.ref_count += 1
        if idle:
            self._pool.mark_used(idle)
        if summary is not None and path.idle_tick:
            self._pool.note_gap(summary, path.uses, path.idle_since_s)
        return path, source

    def release_tail(self, tail: RadixNode) -> None:
        """Release the source block of a copy."""
        tail.ref_count -= 1
        if not tail.ref_count:
            self._pool.mark_evictable((tail,))

    def fork(self, path: RadixNode) -> RadixNode:
        """Hold the blocks of a path once more."""
        _hold(path)  # none of it is idle: the parent holds it
        return path

    def publish(
        self,
        path: RadixNode,
        key: PrefixKey,
        blocks: "array[int]",
        summary: RequestSummary | None = None,
    ) -> tuple[RadixNode, PublishResult]:
        """Add new content to the tree; follow the content that it has and report duplicates."""
        node, size, done, num_blocks = path, self._block_size, 0, len(blocks)
        duplicates: list[tuple[int, BlockId]] = []
        self.version += 1
        while done < num_blocks:
            name = key.block_name(node.end, size)
            child = node.children.get(name)
            if child is None:
                node, count = self._add(node, key, blocks[done:] if done else blocks, name, summary)
                done += count
                continue
            with memoryview(key.tokens).cast("B") as packed:
                used = child.num_common_blocks(key, packed, num_blocks - done, size)
            if used < child.num_blocks:
                child = self._split(child, used)
            if not child.ref_count:
                self._pool.mark_used((child,))
            child.ref_count += 1
            duplicates += [(child.start + i, BlockId(b)) for i, b in enumerate(child.blocks)]
            node, done = child, done + used
        return node, PublishResult(len(duplicates), tuple(duplicates)) if duplicates else _ALL_NEW

    def orphans(self, path: RadixNode, num_blocks: int) -> Sequence[RadixNode]:
        """Return none: what a path published is in no other block (rule 4)."""
        return ()

    def retract(self, path: RadixNode, num_blocks: int) -> tuple[RadixNode, Removal]:
        """Remove what a path published last; rule 1 makes it whole nodes after one split."""
        node, removed = path, array("i")
        self.version += 1
        while node.end > num_blocks:
            if node.start < num_blocks:
                self._split(node, num_blocks - node.start)
            assert node.ref_count == 1 and node.is_leaf, "another request builds on it"
            parent = node.parent
            assert parent is not None
            removed.extend(node.blocks[::-1])
            parent.children.remove(*node.names(self._block_size), node)
            node = parent
        return node, Removal(removed, _last_block(node))

    def publish_partial(
        self, path: RadixNode, key: PrefixKey, block: BlockId, num_tokens: int
    ) -> RadixNode | None:
        """Add a leaf with fewer tokens than a block."""
        start = path.end * self._block_size
        if key.has_extras and key.num_text_tokens(start, num_tokens) < num_tokens - start:
            return None  # only text is shared token by token
        text = key.packed_range(start, num_tokens)
        if path.children.by_text:
            best = path.children.longest_common_prefix(text)
            if best is not None and best[1] == num_tokens - start:
                return None
        self.version += 1
        tail = RadixNode(path, key.identity)
        tail.tokens += text
        tail.add_blocks(array("i", (block,)))
        path.add_child(None, text, tail)
        self._pool.stamp(tail)
        return tail

    def release(
        self,
        path: RadixNode,
        summary: RequestSummary | None = None,
        partial: CacheEntry | None = None,
    ) -> None:
        """Release a path, tail first, in O(depth)."""
        idle = [] if partial is None else [partial]
        node = path
        while (parent := node.parent) is not None:
            count = node.ref_count = node.ref_count - 1
            assert count >= 0, "released more often than acquired"
            if not count:
                idle.append(node)
            node = parent
        node.ref_count -= 1
        if idle:
            self._pool.mark_evictable(idle, summary)
        if not node.ref_count and not node.children.by_text:
            del self._roots[node.identity]

    def evict(self, entry: CacheEntry, most: int) -> Removal:
        """Remove the last blocks of an idle leaf."""
        assert isinstance(entry, RadixNode) and not entry.ref_count and entry.is_leaf
        parent, size = entry.parent, self._block_size
        assert parent is not None
        self.version += 1
        kept = max(0, entry.num_blocks - most)
        self._pool.shrink(entry, entry.num_blocks - kept)
        if kept:
            return Removal(entry.cut(kept, size)[::-1], BlockId(entry.blocks[-1]))
        parent.children.remove(*entry.names(size), entry)
        if parent.parent is None:
            if not parent.ref_count and not parent.children:
                del self._roots[parent.identity]
        elif parent.is_leaf:
            self._pool.expose(parent)
        return Removal(entry.cut(0, size)[::-1], _last_block(parent))

    def contents(self) -> Iterator[CachedBlock]:
        """Walk every published block."""
        return cached_blocks(self._roots, self._block_size)

    def runs(self) -> Iterator[CachedRun]:
        """Walk everything published; a node is one run."""
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
        self,
        node: RadixNode,
        key: PrefixKey,
        blocks: "array[int]",
        name: bytes,
        summary: RequestSummary | None,
    ) -> tuple[RadixNode, int]:
        """Add new content after a held node, in it or in a child.

        Blocks that were used differently often, as far as the policy remembers, are different
        nodes: some are worth more than others.

        Returns:
            The node that has the blocks now, and how many it took.
        """
        uses = 1
        if self._pool.learns:
            known = self._pool.recall(key, node.end, len(blocks), self._block_size, summary)
            blocks, uses = blocks[: known.num_blocks], known.uses + 1
        is_public = key.identity.public_prefix is not None and node.identity != key.identity
        extends = node.ref_count == 1 and node.uses == uses and node.is_leaf and not is_public
        if not extends or node.parent is None:
            child = RadixNode(node, key.identity if is_public else node.identity)
            child.ref_count, child.uses = 1, uses
            self._pool.stamp(child)
            text = name
            if key.has_extras:
                start = node.end * self._block_size
                count = key.num_text_tokens(start, start + self._block_size)
                text = name[: count * TOKEN_BYTES]
            node.add_child(name, text, child)
            node = child
        node.append(key, blocks, self._block_size)
        return node, len(blocks)

    def _split(self, node: RadixNode, num_blocks: int) -> RadixNode:
        """Make the first blocks of a node a node of their own, which is returned."""
        self.version += 1
        head = node.split(num_blocks, self._block_size)
        self._pool.split(node, head)
        return head


def _agrees(node: RadixNode, view: memoryview, most: int, block_size: int) -> bool:
    """Whether a sequence without extras has all of a node among its first ``most`` blocks."""
    start, end = node.start, node.end
    if end > most or node.extras:
        return False
    return node.tokens.startswith(view[start * block_size : end * block_size])


def _hold(path: RadixNode) -> list[RadixNode]:
    """Count one more holder of a path; return the nodes that had none, the deepest first."""
    node, idle = path, []
    while (parent := node.parent) is not None:
        if not node.ref_count:
            idle.append(node)
        node.ref_count += 1
        node = parent
    node.ref_count += 1
    return idle


def _last_block(node: RadixNode) -> BlockId | None:
    """Return the block at a node's end; None for a root."""
    return None if node.parent is None else BlockId(node.blocks[-1])
