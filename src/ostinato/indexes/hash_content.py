"""What the hash index keeps: contents, the blocks that hold them, and what one request holds."""

from dataclasses import dataclass, field

from ostinato.cache.child_index import ChildIndex, child_name
from ostinato.core.identity import BlockExtra, Identity
from ostinato.core.ids import BlockDigest
from ostinato.indexes.block_copy import BlockContent, BlockCopy


class CachedContent(BlockContent):
    """What one block holds: its tokens and, through its parent, all before them.

    Attributes:
        parent: The content before it; None for a root, which has no tokens.
        start: Blocks before it.
        run: Its packed tokens.
        extra: What images and boundaries add to them.
        children: What may follow it.
    """

    __slots__ = ("children", "extra", "parent", "run", "start")

    def __init__(
        self,
        parent: "CachedContent | None",
        digest: BlockDigest | None,
        run: bytes,
        extra: BlockExtra | None,
        identity: Identity,
    ) -> None:
        """Make a content without copies; without a digest it is a partial block."""
        super().__init__(identity, digest, run if extra is None else run + extra.encoded)
        self.parent, self.run, self.extra = parent, run, extra
        self.start: int = 0 if parent is None or parent.parent is None else parent.start + 1
        self.children: ChildIndex[CachedContent] = ChildIndex()

    @property
    def child_name(self) -> bytes:
        """The name that its parent finds it by."""
        return self.run if self.extra is None else child_name(self.run, self.extra)


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
        return self.content.start + first, b"" if first else self.content.run


@dataclass(slots=True)
class HashPath:
    """What one request holds: a root, and a copy per block."""

    root: CachedContent
    copies: list[HashCopy] = field(default_factory=list)

    @property
    def last(self) -> CachedContent:
        """The content that the next block continues."""
        return self.copies[-1].content if self.copies else self.root
