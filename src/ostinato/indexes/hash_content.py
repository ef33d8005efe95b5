"""What the hash index keeps: contents, the blocks that hold them, and what one request holds."""

from dataclasses import dataclass, field

from ostinato.cache.child_index import ChildIndex
from ostinato.core.identity import BlockKey, Identity
from ostinato.core.ids import BlockDigest
from ostinato.indexes.block_copy import BlockContent, BlockCopy


class CachedContent(BlockContent):
    """What one block holds: its tokens and, through its parent, all before them."""

    __slots__ = ("children", "key", "num_paths", "parent", "start")

    def __init__(
        self,
        parent: "CachedContent | None",
        digest: BlockDigest | None,
        key: BlockKey,
        identity: Identity,
    ) -> None:
        """Make a content without copies; without a digest it is a partial block."""
        super().__init__(identity, digest, key.name if key.spans else key.tokens)
        self.parent = parent  # None for a root, which has no tokens
        self.key = key
        self.start: int = 0 if parent is None or parent.parent is None else parent.start + 1
        self.children: ChildIndex[CachedContent] = ChildIndex()
        self.num_paths = 0  # that begin at a root


class HashCopy(BlockCopy):
    """One block that holds a content of the index."""

    __slots__ = ()

    content: CachedContent

    @property
    def is_leaf(self) -> bool:
        """Whether no cached content needs this copy."""
        return len(self.content.copies) > 1 or not self.content.children

    def run_from(self, first: int) -> tuple[int, bytes]:
        """Return the place and the packed tokens of its block, or of what follows it."""
        return self.content.start + first, b"" if first else self.content.key.tokens


@dataclass(slots=True)
class HashPath:
    """What one request holds: a root, and a copy per block."""

    root: CachedContent
    copies: list[HashCopy] = field(default_factory=list)

    @property
    def last(self) -> CachedContent:
        """The content that the next block continues."""
        return self.copies[-1].content if self.copies else self.root
