"""What is a radix node?

A run of blocks that always go together: whoever holds the first, holds all of them::

    root (identity)
    └── node  blocks 0 1 2     tokens ABCD EFGH IJKL
        ├── node  blocks 3     tokens MNOP
        └── node  blocks 5 6   tokens MNOX QRST
            └── sealed tail  block 7  tokens UV

The reference count is the node's, not the block's: holding a path of 2,048 blocks touches as
many nodes as it has branches. A node is split where a second request leaves it.

Source: the radix tree of RadixAttention, arXiv 2312.07104, section 3.
"""

from array import array
from collections.abc import Iterator, Sequence
from types import MappingProxyType
from typing import Any

from ostinato.cache.block import CacheEntry
from ostinato.cache.siblings import Siblings
from ostinato.core.identity import BlockExtra, Identity, PrefixKey
from ostinato.core.ids import BlockDigest, BlockId
from ostinato.core.tokens import TOKEN_BYTES, num_common_tokens

_NONE: Any = MappingProxyType({})
_NO_ROW: Any = ()
_NOBODY: "Siblings[Any]" = Siblings()
"""Most nodes have neither images nor sealed tails aside, and leaves have no children: what nobody
has is one object, so that making a node and walking past it touches little memory."""


class RadixNode(CacheEntry):
    """An edge of tokens and the blocks that hold them.

    Attributes:
        parent: The node before it; None for a root.
        start: Blocks between the root and this node.
        tokens: Packed tokens, ``block_size * 4`` bytes per block; fewer for a sealed tail.
        blocks: Block ids, shape (num_blocks,).
        num_blocks: Blocks of this node alone.
        end: Blocks between the root and this node's end.
        extras: Extras of the blocks that images touch, by distance from the root in blocks.
        children: What may follow the last block.
        hits: Requests whose hit ended within it or at its end, by distance of that end from the
            root in blocks; those that ended behind it in what is forgotten count for its end.
        digests: One per block if outsiders are told of them; empty otherwise.
        births: Ends, from the root in blocks, and times of publication of the runs before its
            last one, which ends with it and was born at ``born_s``.
        asides: Sealed tails that the run has overtaken, by the place where they begin.
        is_growing: Whether somebody who holds it has published the end of it.
        is_quoted: Whether anybody keeps its tokens for later: they may become more, but what is
            there is not touched any more.
    """

    __slots__ = (
        "asides",
        "births",
        "blocks",
        "children",
        "digests",
        "end",
        "extras",
        "hits",
        "is_growing",
        "is_quoted",
        "num_blocks",
        "parent",
        "start",
        "tokens",
    )

    num_blocks: int
    end: int

    def __init__(self, parent: "RadixNode | None", identity: Identity) -> None:
        """Make an empty node behind a parent, which does not know it yet; or a root."""
        super().__init__(identity)
        self.parent = parent
        self.start = self.end = 0 if parent is None else parent.end
        self.num_blocks = 0
        self.tokens = bytearray()
        self.blocks: array[int] = array("i")
        self.extras: dict[int, BlockExtra] = _NONE
        self.digests: list[BlockDigest] = _NO_ROW
        self.children: Siblings[RadixNode] = _NOBODY
        self.hits: dict[int, int] = _NONE
        self.births: list[tuple[int, float]] = _NO_ROW
        self.asides: dict[int, list[RadixNode]] = _NONE
        self.is_growing = self.is_quoted = False

    @property
    def is_root(self) -> bool:
        """Whether it is the root of an identity's tree, without blocks of its own."""
        return self.parent is None

    @property
    def is_leaf(self) -> bool:
        """Whether no cached content builds on it."""
        return not self.children.by_text and not self.asides

    @property
    def blocks_tail_first(self) -> list[BlockId]:
        """Block ids in the order in which they would be evicted."""
        return [BlockId(block) for block in reversed(self.blocks)]

    @property
    def depth(self) -> int:
        """Blocks between the root and its end."""
        return self.end

    def run_from(self, first: int) -> tuple[int, bytes]:
        """Return the place and the packed tokens of its blocks from its ``first``-th on."""
        size = len(self.tokens) // len(self.blocks)
        return self.start + first, bytes(self.tokens[first * size :])

    def is_sealed_tail(self, block_size: int) -> bool:
        """Whether it is the partial last block of a sequence that ended."""
        return len(self.tokens) < len(self.blocks) * block_size * TOKEN_BYTES

    def up(self) -> "Iterator[RadixNode]":
        """Walk from this node to its root, both included."""
        node: RadixNode | None = self
        while node is not None:
            yield node
            node = node.parent

    def names(self, block_size: int) -> tuple[bytes | None, bytes]:
        """Return what its parent finds it by: first block with extras, and first text."""
        name = self.name_of(0, block_size)
        text = self.text_of(0, block_size) if self.extras else name
        return None if self.is_sealed_tail(block_size) else name, text

    def append(self, key: PrefixKey, blocks: "array[int]", block_size: int) -> None:
        """Take over blocks of a sequence that continue this node."""
        first = self.end
        last = first + len(blocks)
        if key.has_extras:
            found = {
                index: key.extra(index * block_size, (index + 1) * block_size)
                for index in key.blocks_with_extras(first, last, block_size)
            }
            more = {index: extra for index, extra in found.items() if extra is not None}
            self.extras = {**self.extras, **more}
        self.tokens += memoryview(key.tokens)[first * block_size : last * block_size]
        self.add_blocks(blocks)

    def add_blocks(self, blocks: "array[int]") -> None:
        """Have more blocks behind those that it has; their tokens come with them."""
        self.blocks.extend(blocks)
        self.num_blocks += len(blocks)
        self.end += len(blocks)

    def num_common_blocks(
        self, key: PrefixKey, packed: memoryview, most: int, block_size: int
    ) -> int:
        """Count this node's blocks that a sequence agrees with.

        Args:
            key: The sequence.
            packed: Its tokens, byte by byte.
            most: Of how many to ask.
            block_size: Tokens per block.
        """
        offset, whole = self.start * block_size * TOKEN_BYTES, self.tokens
        theirs = packed[offset : offset + len(whole)]
        if most >= len(self.blocks) and whole.startswith(theirs) and len(theirs) == len(whole):
            common = len(self.blocks)
        else:
            most = min(most, len(self.blocks))
            size = most * block_size * TOKEN_BYTES
            mine = memoryview(whole)[:size]
            common = num_common_tokens(mine, theirs[:size]) // block_size
        if key.has_extras or self.extras:
            theirs_too = key.blocks_with_extras(self.start, self.start + common, block_size)
            for index in sorted({*self.extras, *theirs_too}):
                if index >= self.start + common:
                    break
                extra = self.extras.get(index)
                if extra != key.extra(index * block_size, (index + 1) * block_size):
                    return index - self.start
        return common

    def name_of(self, index: int, block_size: int) -> bytes:
        """Return the packed tokens and extras of its ``index``-th block."""
        size = block_size * TOKEN_BYTES
        extra = self.extras.get(self.start + index)
        tokens = bytes(self.tokens[index * size : (index + 1) * size])
        return tokens if extra is None else tokens + extra.encoded

    def text_of(self, index: int, block_size: int) -> bytes:
        """Return the packed tokens of its ``index``-th block before the first image."""
        size = block_size * TOKEN_BYTES
        extra = self.extras.get(self.start + index)
        text_tokens = block_size if extra is None else extra.num_text_tokens
        return bytes(self.tokens[index * size : index * size + text_tokens * TOKEN_BYTES])

    def keep_tokens(self, start: int, stop: int) -> None:
        """Forget its packed tokens but for those from one byte up to another."""
        if self.is_quoted:
            self.tokens, self.is_quoted = self.tokens[start:stop], False
        else:
            del self.tokens[stop:]
            del self.tokens[:start]

    def add_child(self, block: bytes | None, text: bytes, child: "RadixNode") -> None:
        """Know of a child, as ``Siblings.add`` does."""
        if self.children is _NOBODY:
            self.children = Siblings()
        self.children.add(block, text, child)

    def add_digests(self, digests: Sequence[BlockDigest]) -> None:
        """Name the last blocks to outsiders."""
        if self.digests:
            self.digests += digests
        else:
            self.digests = list(digests)

    def end_birth(self, now_s: float) -> None:
        """Note that what comes next is published now."""
        birth = (self.end, self.born_s)
        if self.births:
            self.num_of_one_birth()  # forgets the births of what was cut off
            birth = (self.end, self.born_s)
            self.births.append(birth)
        else:
            self.births = [birth]
        self.born_s = now_s

    def put_aside(self, tails: "list[RadixNode]") -> None:
        """Let its children, all of them sealed tails, hang where they are when it goes on."""
        if self.asides is _NONE:
            self.asides = {}
        self.asides[self.end] = tails
        self.children.clear()

    def birth_of(self, end: int) -> float:
        """Return when the block was published that ends so many blocks behind the root."""
        return next((born_s for last, born_s in self.births if last >= end), self.born_s)

    def num_of_one_birth(self) -> int:
        """Count the last blocks that were published at one time; what was cut off is forgotten."""
        while self.births and self.births[-1][0] >= self.end:
            self.born_s = self.births.pop()[1]
        return self.end - self.births[-1][0] if self.births else len(self.blocks)

    def disown(self, child: "RadixNode", block_size: int) -> None:
        """Know nothing more of a child, or of a sealed tail aside."""
        if child.start == self.end:
            self.children.remove(*child.names(block_size), child)
            return
        asides = self.asides[child.start]
        asides.remove(child)
        if not asides:
            del self.asides[child.start]

    def cut(self, num_blocks: int, block_size: int) -> "array[int]":
        """Drop all blocks but the first ``num_blocks``; return the dropped ids."""
        dropped = self.blocks[num_blocks:]
        del self.blocks[num_blocks:]
        self.num_blocks, self.end = num_blocks, self.start + num_blocks
        if self.digests:
            del self.digests[num_blocks:]
        self.keep_tokens(0, num_blocks * block_size * TOKEN_BYTES)
        end = self.end
        if self.extras:
            self.extras = {index: extra for index, extra in self.extras.items() if index < end}
        lost = sum(count for last, count in self.hits.items() if last > end)
        if lost:
            self.hits = {last: count for last, count in self.hits.items() if last <= end}
            self.count_hits(lost)
        return dropped

    def count_hits(self, count: int) -> None:
        """Note hits that ended at this node's end."""
        end = self.end
        if self.hits is _NONE:
            self.hits = {}
        self.hits[end] = self.hits.get(end, 0) + count

    def leave_hits(self, parent: "RadixNode") -> None:
        """Leave a node that stays all hits of this one, which goes; a root keeps none."""
        if self.hits and not parent.is_root:
            parent.count_hits(sum(self.hits.values()))

    def give_hits(self, head: "RadixNode") -> None:
        """Leave a node that was split off before this one the hits that ended in it."""
        if self.hits:
            end = head.end
            head.hits = {last: count for last, count in self.hits.items() if last <= end}
            self.hits = {last: count for last, count in self.hits.items() if last > end}
