"""What does a window keep of a block, and what does a sequence hold of it?

::

    content   one block's worth of a prefix, by digest      one per prefix
    └── copies   7, 12                                      one per block that holds it
    table     null null 9 4 | 5                             one per sequence and window
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from ostinato.cache.block import CacheEntry
from ostinato.core.identity import Identity
from ostinato.core.ids import BlockDigest, BlockId


class WindowContent:
    """One block's worth of a prefix, as a window layer holds it."""

    __slots__ = ("copies", "digest", "full", "identity", "name", "num_tokens")

    def __init__(
        self, identity: Identity, digest: BlockDigest, name: bytes, num_tokens: int, full: bool
    ) -> None:
        """Note a content without copies.

        Args:
            identity: What sequences must agree on to find it.
            digest: Of it and everything before it.
            name: Its packed tokens and extras.
            num_tokens: Tokens that a copy holds: all of its block, but for a partial one.
            full: False for a partial block.
        """
        self.identity = identity
        self.digest = digest
        self.name = name
        self.num_tokens = num_tokens
        self.full = full
        self.copies: list[WindowCopy] = []


class WindowCopy(CacheEntry):
    """One block that holds a content; nothing depends on it."""

    __slots__ = ("block", "content")

    def __init__(self, block: int, content: WindowContent, born_s: float) -> None:
        """Add a copy to a content, held by one sequence."""
        super().__init__(content.identity)
        self.block = BlockId(block)
        self.content = content
        self.ref_count, self.born_s = 1, born_s
        content.copies.append(self)

    @property
    def blocks(self) -> Sequence[int]:
        """Its block."""
        return (self.block,)

    @property
    def num_blocks(self) -> int:
        """One, until it is evicted."""
        return int(self in self.content.copies)

    @property
    def is_leaf(self) -> bool:
        """Always: a hit needs a run of blocks, not their ancestors."""
        return True


@dataclass(slots=True, eq=False)
class WindowTable:
    """The blocks that one sequence holds in one window group.

    Attributes:
        tenant: Whose sequence it is.
        blocks: Block ids by place in the sequence, ``null_block`` where none is held.
        copies: The published copy at each place; None where the block is private or null.
        first: Places before it hold nothing any more.
        num_published: Places before it are published, or were.
        first_published: First place that this step published; None if it published none.
        tail: Source of a copy, held until the step has run.
    """

    tenant: bytes
    blocks: "array[int]"
    copies: list[WindowCopy | None]
    first: int
    num_published: int
    first_published: int | None = None
    tail: WindowCopy | None = None

    @property
    def num_shared(self) -> int:
        """Leading places whose blocks, if any, are published and held."""
        return max(self.first, self.num_published)

    @property
    def private_blocks(self) -> "array[int]":
        """Held blocks that are not published, in token order."""
        places = range(self.first, len(self.blocks))
        return array("i", [self.blocks[i] for i in places if self.copies[i] is None])
