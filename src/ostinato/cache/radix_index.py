"""Prefix index as a radix tree that compares tokens.

One tree per identity; its edges are runs of whole blocks with their tokens. A match compares
tokens (``memcmp`` of packed ids), so it needs no hash to be right, and costs one step in Python
per branch, not per block::

    sequence  ABCD EFGH IJKL MNOP QRST UV
              └─ node, whole ─┘└ node ┘└─ tail: the child with the longest common prefix

A path is the deepest node that a request holds; holding it counts one holder in each node up to
the root. The reference count is the node's, not the block's: holding a path of 2,048 blocks touches
as many nodes as it has branches::

    root (identity)
    └── node  blocks 0 1 2     tokens ABCD EFGH IJKL
        ├── node  blocks 3     tokens MNOP
        └── node  blocks 5 6   tokens MNOX QRST
            └── partial block  block 7  tokens UV

Rules:

1. Every block of a node has the same holders; a node is split where they part.
2. A node's reference count is the number of live paths that end in it or below it, and of
   sources of copies that are it; a request that holds such a source holds a path to it.
3. Idle nodes are in the eviction policy, held nodes and roots are not.
4. Each content is published once: a second block of the same content is a duplicate, which
   its owner exchanges for the canonical one.
5. All blocks of a node are of one identity; after a boundary, another identity begins.

Source: RadixAttention, arXiv 2312.07104; SGLang's radix cache.
"""

from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from ostinato.cache.block import CacheEntry
from ostinato.cache.child_index import ChildIndex, walk
from ostinato.cache.eviction import RequestSummary
from ostinato.cache.pool import BlockPool
from ostinato.cache.prefix_index import CachedRun, PrefixMatch, PublishResult, Removal, TailMatch
from ostinato.core.identity import BlockKey, Identity, PrefixKey, Spans, overlapping
from ostinato.core.ids import BlockId
from ostinato.core.tokens import TOKEN_BYTES, num_common_tokens

_ALL_NEW = PublishResult()  # the usual result; never changed
_NO_CHILDREN: "ChildIndex[Any]" = ChildIndex()  # of every leaf


class RadixNode(CacheEntry):
    """An edge of tokens and the blocks that hold them."""

    __slots__ = ("children", "end", "name", "parent", "spans", "start", "tokens")

    blocks: "array[int]"
    end: int

    def __init__(self, parent: "RadixNode | None", identity: Identity, name: bytes = b"") -> None:
        """Make an empty node after a parent, which does not know it yet; or a root."""
        super().__init__(identity)
        self.parent = parent  # None for a root
        self.name = name  # of its first block, among the parent's children
        self.start = self.end = 0 if parent is None else parent.end  # in blocks from the root
        self.tokens = bytearray()  # packed; whole blocks, or one that is partial
        self.blocks = array("i")  # ids, shape (num_blocks,)
        self.spans: Spans = ()  # that overlap its blocks
        self.children: ChildIndex[RadixNode] = _NO_CHILDREN  # what may follow the last block

    @property
    def is_leaf(self) -> bool:
        """Whether no cached content builds on it."""
        return self.children.newest is None

    def run_from(self, first: int) -> tuple[int, bytes]:
        """Return the position and the packed tokens of its blocks from its ``first``-th on."""
        size = len(self.tokens) // len(self.blocks)
        return self.start + first, bytes(self.tokens[first * size :])

    def up(self) -> "list[RadixNode]":
        """List the nodes from this one to its root, both included."""
        nodes, node = [self], self.parent
        while node is not None:
            nodes.append(node)
            node = node.parent
        return nodes

    def block_key(self, index: int, block_size: int) -> BlockKey:
        """Return what identifies its ``index``-th block among continuations of its prefix."""
        start, size = (self.start + index) * block_size, block_size * TOKEN_BYTES
        tokens = bytes(self.tokens[index * size : (index + 1) * size])
        return BlockKey(tokens, overlapping(self.spans, start, start + block_size), start)

    def add_child(self, child: "RadixNode") -> None:
        """Add a child under its name."""
        if self.children is _NO_CHILDREN:
            self.children = ChildIndex()
        self.children.add(child.name, child)

    def num_common_blocks(self, key: PrefixKey, max_blocks: int, block_size: int) -> int:
        """Count the leading blocks that a sequence has among its first ``max_blocks`` ones."""
        first, last = self.start * block_size, min(self.end, max_blocks) * block_size
        tokens, common = memoryview(key.tokens)[first:last].cast("B"), last - first
        if not self.tokens.startswith(tokens):
            common = num_common_tokens(memoryview(self.tokens), tokens)
        if key.spans or self.spans:
            parted = {*self.spans} ^ {*overlapping(key.spans, first, last)}
            common = min([common, *(span.start - first for span in parted)])
        return common // block_size

    def append(self, tokens: bytes | memoryview, blocks: "array[int]") -> None:
        """Add blocks and their packed tokens."""
        self.tokens += tokens
        self.blocks.extend(blocks)
        self.num_blocks += len(blocks)
        self.end += len(blocks)

    def cut(self, num_blocks: int, block_size: int) -> "array[int]":
        """Remove all blocks but the first ``num_blocks``; return the removed ids."""
        removed = self.blocks[num_blocks:]
        del self.blocks[num_blocks:]
        del self.tokens[num_blocks * block_size * TOKEN_BYTES :]
        self.end, self.num_blocks = self.start + num_blocks, num_blocks
        self.keep_spans(self.spans, block_size)
        return removed

    def split(self, num_blocks: int, block_size: int) -> "RadixNode":
        """Make the first blocks a node of their own, which is returned.

        This node keeps the rest, so that paths that end in it stay valid.
        """
        parent, size = self.parent, num_blocks * block_size * TOKEN_BYTES
        assert parent is not None and 0 < num_blocks < self.num_blocks
        head = RadixNode(parent, self.identity, self.name)
        head.append(memoryview(self.tokens)[:size], self.blocks[:num_blocks])
        head.ref_count, head.born_s = self.ref_count, self.born_s
        parent.children.replace(self.name, head)
        del self.tokens[:size]
        del self.blocks[:num_blocks]
        self.parent, self.start, self.num_blocks = head, head.end, self.num_blocks - num_blocks
        for node in (head, self):
            node.keep_spans(self.spans, block_size)
        self.name = self.block_key(0, block_size).child_name
        head.add_child(self)
        return head

    def keep_spans(self, spans: Spans, block_size: int) -> None:
        """Keep those of a sequence's spans that overlap its blocks."""
        self.spans = overlapping(spans, self.start * block_size, self.end * block_size)


class RadixIndex:
    """A tree of token runs."""

    def __init__(self, pool: BlockPool, block_size: int) -> None:
        """Make an empty index over a pool."""
        self.version = 0  # raised whenever content is added, split or removed
        self.block_size = block_size
        self._pool = pool
        self._roots: dict[Identity, RadixNode] = {}

    def match(self, key: PrefixKey, num_tokens: int) -> PrefixMatch:
        """Find the longest cached prefix among a sequence's first tokens.

        Cost: O(num_tokens) compared bytes, O(depth) steps in Python.
        """
        entries: list[RadixNode] = []
        size, blocks = self.block_size, array("i")
        node, limit, unmatched = self._roots.get(key.identity.root), num_tokens // size, 0
        if node is None:
            return PrefixMatch(0, 0, blocks, None, entries, 0, key, self, self.version)
        view = memoryview(key.tokens)  # a slice of it copies nothing
        while not unmatched and node.end < limit and (child := node.children.newest) is not None:
            # Most nodes have one child, which agrees as a whole: found without its name.
            whole = child.end <= limit and not (key.spans or child.spans)
            if not (whole and child.tokens.startswith(view[node.end * size : child.end * size])):
                child = node.children.get(key.child_name(node.end * size, (node.end + 1) * size))
                if child is None:
                    break
                unmatched = child.num_blocks - child.num_common_blocks(key, limit, size)
            node = child
            entries.append(node)
            blocks.extend(node.blocks[:-unmatched] if unmatched else node.blocks)
        num_shared = num_hit = len(blocks) * size
        tail = None
        if num_tokens > num_shared and (unmatched or node.children.newest is not None):
            tail = self._tail(key, num_tokens, node, node.num_blocks - unmatched)
            num_hit += 0 if tail is None else tail.num_tokens
        return PrefixMatch(
            num_shared, num_hit, blocks, tail, entries, unmatched, key, self, self.version
        )

    def _tail(
        self, key: PrefixKey, num_tokens: int, node: RadixNode, used: int
    ) -> TailMatch | None:
        """Find the block after a match with the longest common prefix with the sequence."""
        size, start = self.block_size, (node.start + used) * self.block_size
        stop = min(num_tokens, start + size)
        run = key.tokens[start:stop].tobytes()
        if used < node.num_blocks:
            child, common = node, num_common_tokens(run, node.block_key(used, size).tokens)
        else:
            name = key.child_name(start, stop)[: len(run)] if key.spans else run
            closest, common = node.children.closest(name)
            child, used = closest or node, 0
        if common and (key.spans or child.spans):
            common = key.block_key(start, stop).num_common_tokens(child.block_key(used, size))
        return TailMatch(BlockId(child.blocks[used]), common, child, used) if common else None

    def acquire(self, key: PrefixKey, match: PrefixMatch) -> tuple[RadixNode, RadixNode | None]:
        """Hold the matched blocks; a node that matches in part is split.

        Of a tail's node, what follows the source block is split off.
        """
        path = match.entries[-1] if match.entries else self._roots.get(key.identity.root)
        if path is None:
            root = key.identity.root
            path = self._roots[root] = RadixNode(None, root)
        if match.num_unmatched:
            path = self._split(path, path.num_blocks - match.num_unmatched)
        nodes = path.up()
        nodes.pop().ref_count += 1  # the root
        source: RadixNode | None = None if match.tail is None else match.tail.entry
        if source is not None:
            if source.num_blocks > 1:
                source = self._split(source, 1)
            nodes.append(source)
        self._pool.acquire(nodes)
        return path, source

    def fork(self, path: RadixNode) -> RadixNode:
        """Hold the blocks of a path once more."""
        nodes = path.up()
        nodes.pop().ref_count += 1  # the root
        self._pool.acquire(nodes)
        return path

    def publish(
        self,
        path: RadixNode,
        key: PrefixKey,
        blocks: "array[int]",
        num_tokens: int,
        summary: RequestSummary | None = None,
    ) -> tuple[RadixNode, PublishResult]:
        """Add new content to the tree; follow the content that it has and report duplicates."""
        node, size = path, self.block_size
        if num_tokens % size:
            return self._publish_partial(path, key, blocks, num_tokens)
        duplicates: list[tuple[int, BlockId]] = []
        first, last = node.end, num_tokens // size
        while node.end < last:
            name = key.child_name(node.end * size, (node.end + 1) * size)
            child = node.children.get(name)
            if child is None:
                node = self._add(node, key, blocks[node.end - first :], name, summary)
                continue
            used = child.num_common_blocks(key, last, size)
            node = child if used == child.num_blocks else self._split(child, used)
            self._pool.acquire((node,))
            duplicates += [(place, BlockId(b)) for place, b in enumerate(node.blocks, node.start)]
        return node, PublishResult(len(duplicates), tuple(duplicates)) if duplicates else _ALL_NEW

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
            parent.children.remove(node.name)
            node = parent
        return node, Removal(removed, _last_block(node))

    def release(self, path: RadixNode, summary: RequestSummary | None = None) -> None:
        """Release a path, tail first, in O(depth)."""
        nodes = path.up()
        root = nodes.pop()
        self._pool.release(nodes, summary)
        root.ref_count -= 1
        if not root.ref_count and root.children.newest is None:
            del self._roots[root.identity]

    def evict(self, entry: CacheEntry, max_blocks: int) -> Removal:
        """Remove the last blocks of an idle leaf."""
        assert isinstance(entry, RadixNode) and not entry.ref_count and entry.is_leaf
        parent, kept = entry.parent, max(0, entry.num_blocks - max_blocks)
        assert parent is not None
        self.version += 1
        if not kept:
            parent.children.remove(entry.name)
            if parent.is_leaf and parent.parent is not None:
                self._pool.became_leaf(parent)
            elif parent.is_leaf and not parent.ref_count:  # an empty root
                del self._roots[parent.identity]
        removed = entry.cut(kept, self.block_size)[::-1]
        return Removal(removed, _last_block(entry if kept else parent))

    def runs(self) -> Iterator[CachedRun]:
        """Iterate over all nodes but the roots; each is one run."""
        return (CachedRun(parent, (node,)) for parent, node in walk(self._roots.values()))

    def check(self, paths: "list[RadixNode]", sources: Sequence[CacheEntry] = ()) -> None:
        """Assert rules 1 to 5 and that the tree's links agree."""
        nodes = [node for _, node in walk(self._roots.values())]
        held = [path.up() for path in paths]
        self._pool.check_entries(nodes, [*sources, *(node for up in held for node in up[:-1])])
        ends = Counter(id(up[-1]) for up in held)
        for root in self._roots.values():
            assert root.ref_count == ends.pop(id(root), 0), "a root's references are miscounted"
            assert root.ref_count or root.children, "an empty root was left behind"
        assert not ends, "a path leads to a root outside the tree"
        for node in nodes:
            parent, width, count = node.parent, self.block_size * TOKEN_BYTES, node.num_blocks
            assert count == len(node.blocks) == node.end - node.start > 0, "miscounted blocks"
            assert parent is not None and node.start == parent.end, "not where its parent ends"
            assert parent.children.get(node.name) is node, "not found by its name"
            assert node.name == node.block_key(0, self.block_size).child_name, "another's name"
            parted = node.identity.tenant != parent.identity.tenant and parent.parent is not None
            assert not parted or parent.ref_count, "an idle public prefix has content after it"
            is_partial = 0 < len(node.tokens) < width and count == 1 and node.is_leaf
            assert is_partial or len(node.tokens) == count * width, "a partial block with children"

    def _add(
        self,
        node: RadixNode,
        key: PrefixKey,
        blocks: "array[int]",
        name: bytes,
        summary: RequestSummary | None,
    ) -> RadixNode:
        """Add new content after a held node, in it or in a child, and return that.

        It may be less than all: blocks that were used differently often, as far as the policy
        remembers, are different nodes, since some are worth more than others.
        """
        size, policy = self.block_size, self._pool.shares.policy_of(key.identity.owner)
        recalled = policy.recall(key, node.end, len(blocks), size, summary)
        identity, next_stage = key.identity.of_block(node.end, size)
        uses, blocks = recalled[0] + 1, blocks[: min(recalled[1], next_stage - node.end)]
        extends = node.ref_count == 1 and node.uses == uses and node.is_leaf
        if not extends or node.parent is None or node.identity != identity:
            node = self._add_child(node, identity, name)
            node.uses = uses
        tokens = memoryview(key.tokens)[node.end * size : (node.end + len(blocks)) * size]
        node.append(tokens, blocks)
        if key.spans:
            node.keep_spans(key.spans, size)
        self.version += 1
        return node

    def _publish_partial(
        self, path: RadixNode, key: PrefixKey, blocks: "array[int]", num_tokens: int
    ) -> tuple[RadixNode, PublishResult]:
        """Add a leaf with fewer tokens than a block, unless one begins with the same."""
        own = key.block_key(path.end * self.block_size, num_tokens)
        if own.spans or path.children.begins_with(own.tokens):
            return path, PublishResult(1)
        self.version += 1
        tail = self._add_child(path, key.identity, own.tokens)
        tail.append(own.tokens, blocks)
        return tail, _ALL_NEW

    def _add_child(self, parent: RadixNode, identity: Identity, name: bytes) -> RadixNode:
        """Add an empty node that one request holds."""
        child = RadixNode(parent, identity, name)
        child.ref_count, child.born_s = 1, self._pool.now()
        parent.add_child(child)
        return child

    def _split(self, node: RadixNode, num_blocks: int) -> RadixNode:
        """Make the first blocks of a node a node of their own, which is returned."""
        self.version += 1
        head = node.split(num_blocks, self.block_size)
        self._pool.split(node, head)
        return head


def _last_block(node: RadixNode) -> BlockId | None:
    """Return the block at a node's end; None for a root."""
    return None if node.parent is None else BlockId(node.blocks[-1])
