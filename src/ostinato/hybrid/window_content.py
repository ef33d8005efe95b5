"""What a window keeps of a block, and what a sequence holds of it.

::

    content   one block's worth of a prefix, by digest      one per prefix
    └── copies   7, 12                                      one per block that holds it
    table     null null 9 4 | 5                             one per sequence and window
"""

from array import array
from dataclasses import dataclass

from ostinato.indexes.block_copy import BlockCopy


class WindowCopy(BlockCopy):
    """One block that holds a content; a leaf, since a hit needs a run of blocks, not ancestors."""

    __slots__ = ()

    def run_from(self, first: int) -> tuple[int, bytes]:
        """Return the packed tokens of its block; its place is not known."""
        return 0, self.content.name


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
