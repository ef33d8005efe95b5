"""What does the hash index keep of a block, and of what a request holds?

::

    content   tokens of one block, behind its parent's   one per prefix
    └── copies   7, 12                                   one per block that holds it, oldest first
    path      a root, and a copy per block               one per request
"""

from dataclasses import dataclass, field

from ostinato.cache.block import CacheEntry
from ostinato.cache.child_index import ChildIndex
from ostinato.core.identity import Identity
from ostinato.core.ids import BlockDigest, BlockId


class Content:
    """What one block holds: its tokens and, through its parent, all before them."""

    __slots__ = (
        "children",
        "copies",
        "digest",
        "identity",
        "name",
        "parent",
        "start",
        "text",
    )

    def __init__(
        self,
        parent: "Content | None",
        digest: BlockDigest | None,
        name: bytes | None,
        text: bytes,
        identity: Identity,
    ) -> None:
        """Note a content; a root has no parent and no tokens, a sealed tail no digest."""
        self.parent = parent
        self.start: int = 0 if parent is None or parent.parent is None else parent.start + 1
        self.digest = digest
        self.name = name
        self.text = text
        self.identity = identity
        self.copies: list[Copy] = []
        self.children: ChildIndex[Content] = ChildIndex()


class Copy(CacheEntry):
    """One block that holds a content."""

    __slots__ = ("block", "content")

    def __init__(self, block: BlockId, content: Content) -> None:
        """Note that a block holds a content."""
        super().__init__(content.identity)
        self.block = block
        self.content = content

    @property
    def num_blocks(self) -> int:
        """One, until it is evicted."""
        return int(self in self.content.copies)

    @property
    def is_leaf(self) -> bool:
        """Whether no cached content needs this copy."""
        return len(self.content.copies) > 1 or not self.content.children

    @property
    def blocks_tail_first(self) -> list[BlockId]:
        """Its block."""
        return [self.block]

    @property
    def depth(self) -> int:
        """Blocks between the root and its end."""
        return self.content.start + 1

    def name_of(self, index: int, block_size: int) -> bytes:
        """Return the packed tokens and extras of its block."""
        return self.content.text if self.content.name is None else self.content.name

    def run_from(self, first: int) -> tuple[int, bytes]:
        """Return the place and the packed tokens of its block."""
        content = self.content
        return content.start, content.text if content.name is None else content.name


@dataclass(slots=True)
class HashPath:
    """What one request holds: a root, and a copy per block."""

    root: Content
    copies: list[Copy] = field(default_factory=list)

    @property
    def last(self) -> Content:
        """The content that the next block continues."""
        return self.copies[-1].content if self.copies else self.root
