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
from types import MappingProxyType
from typing import Any

from ostinato.cache.block import CacheEntry
from ostinato.cache.child_index import ChildIndex, child_name
from ostinato.core.identity import BlockExtra, Identity, PrefixKey
from ostinato.core.tokens import TOKEN_BYTES, num_common_tokens

_NO_EXTRAS: Any = MappingProxyType({})
_NO_CHILDREN: "ChildIndex[Any]" = ChildIndex()
"""Most nodes have no images and leaves have no children: they share one empty object each."""


class RadixNode(CacheEntry):
    """An edge of tokens and the blocks that hold them.

    Attributes:
        parent: The node before it; None for a root.
        start: Blocks between the root and this node.
        end: Blocks between the root and this node's end.
        num_blocks: Blocks of this node alone.
        tokens: Packed tokens, ``block_size * 4`` bytes per block; fewer for a partial block.
        blocks: Block ids, shape (num_blocks,).
        extras: Extras of the blocks that images touch, by distance from the root in blocks.
        children: What may follow the last block.
    """

    __slots__ = ("blocks", "children", "end", "extras", "num_blocks", "parent", "start", "tokens")

    num_blocks: int
    end: int

    def __init__(self, parent: "RadixNode | None", identity: Identity) -> None:
        """Make an empty node after a parent, which does not know it yet; or a root."""
        super().__init__(identity)
        self.parent = parent
        self.start = self.end = 0 if parent is None else parent.end
        self.num_blocks = 0
        self.tokens = bytearray()
        self.blocks: array[int] = array("i")
        self.extras: dict[int, BlockExtra] = _NO_EXTRAS
        self.children: ChildIndex[RadixNode] = _NO_CHILDREN

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

    def run_of(self, index: int, block_size: int) -> tuple[bytes, BlockExtra | None]:
        """Return the packed tokens and the extra of its ``index``-th block."""
        size = block_size * TOKEN_BYTES
        tokens = bytes(self.tokens[index * size : (index + 1) * size])
        return tokens, self.extras.get(self.start + index)

    def child_name(self, block_size: int) -> bytes:
        """Return the name that its parent finds it by."""
        run, extra = self.run_of(0, block_size)
        return run if extra is None else child_name(run, extra)

    def append(self, tokens: bytes | memoryview, blocks: "array[int]") -> None:
        """Add blocks and their packed tokens."""
        self.tokens += tokens
        self.blocks.extend(blocks)
        self.num_blocks += len(blocks)
        self.end += len(blocks)

    def add_child(self, name: bytes, child: "RadixNode") -> None:
        """Add a child, as ``ChildIndex.add`` does."""
        if self.children is _NO_CHILDREN:
            self.children = ChildIndex()
        self.children.add(name, child)

    def num_common_blocks(
        self, key: PrefixKey, packed: memoryview, most: int, block_size: int
    ) -> int:
        """Count the leading blocks, up to ``most``, that a sequence, packed, agrees with."""
        offset, whole = self.start * block_size * TOKEN_BYTES, self.tokens
        theirs = packed[offset : offset + len(whole)]
        if most >= self.num_blocks and len(theirs) == len(whole) and whole.startswith(theirs):
            common = self.num_blocks
        else:
            size = min(most, self.num_blocks) * block_size * TOKEN_BYTES
            common = num_common_tokens(memoryview(whole)[:size], theirs[:size]) // block_size
        if key.has_extras or self.extras:
            others = key.extras(self.start, self.start + common, block_size)
            parted = [i for i in {*self.extras, *others} if self.extras.get(i) != others.get(i)]
            common = min([common, *(index - self.start for index in parted)])
        return common

    def name_of(self, index: int, block_size: int) -> bytes:
        """Return the packed tokens and extras of its ``index``-th block."""
        tokens, extra = self.run_of(index, block_size)
        return tokens if extra is None else tokens + extra.encoded

    def cut(self, num_blocks: int, block_size: int) -> "array[int]":
        """Remove all blocks but the first ``num_blocks``; return the removed ids."""
        removed = self.blocks[num_blocks:]
        del self.blocks[num_blocks:]
        del self.tokens[num_blocks * block_size * TOKEN_BYTES :]
        self.num_blocks, self.end = num_blocks, self.start + num_blocks
        if self.extras:
            self.extras = {i: extra for i, extra in self.extras.items() if i < self.end}
        return removed

    def split(self, num_blocks: int, block_size: int) -> "RadixNode":
        """Make the first blocks a node of their own, which is returned.

        This node keeps the rest, so that paths that end in it stay valid.
        """
        parent = self.parent
        assert parent is not None and 0 < num_blocks < self.num_blocks
        name, size = self.child_name(block_size), num_blocks * block_size * TOKEN_BYTES
        head = RadixNode(parent, self.identity)
        head.append(memoryview(self.tokens)[:size], self.blocks[:num_blocks])
        head.ref_count, head.born_s = self.ref_count, self.born_s
        if self.extras:
            head.extras = {i: extra for i, extra in self.extras.items() if i < head.end}
            self.extras = {i: extra for i, extra in self.extras.items() if i >= head.end}
        parent.children.replace(name, head)
        del self.tokens[:size]
        del self.blocks[:num_blocks]
        self.parent, self.start, self.num_blocks = head, head.end, self.num_blocks - num_blocks
        head.add_child(self.child_name(block_size), self)
        return head
