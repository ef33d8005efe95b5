"""One node of the radix tree: a run of blocks that are always held and released together.

::

    root (identity)
    └── node  blocks 0 1 2     tokens ABCD EFGH IJKL
        ├── node  blocks 3     tokens MNOP
        └── node  blocks 5 6   tokens MNOX QRST
            └── partial block  block 7  tokens UV

The reference count is the node's, not the block's: holding a path of 2,048 blocks touches as
many nodes as it has branches. A node is split where a second request leaves it.

Source: the radix tree of RadixAttention, arXiv 2312.07104, section 3.
"""

from array import array
from typing import Any

from ostinato.cache.block import CacheEntry
from ostinato.cache.child_index import ChildIndex
from ostinato.core.identity import BlockKey, Identity, PrefixKey, Spans, overlapping
from ostinato.core.tokens import TOKEN_BYTES, num_common_tokens

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
