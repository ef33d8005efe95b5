"""Blocks that hold the same content: an entry each, the oldest first; here and in ``hybrid``."""

from dataclasses import dataclass, field
from typing import Any

from ostinato.cache.block import CacheEntry
from ostinato.cache.child_index import ChildIndex
from ostinato.core.identity import BlockKey, Identity
from ostinato.core.ids import BlockDigest, BlockId


class BlockContent:
    """What one block holds."""

    __slots__ = ("copies", "digest", "identity", "name")

    def __init__(self, identity: Identity, digest: BlockDigest | None, name: bytes) -> None:
        """Make a content without copies."""
        self.identity = identity  # what sequences must agree on to find it
        self.digest = digest  # of it and all before it; None if it is found otherwise
        self.name = name  # its packed tokens and extra
        self.copies: list[Any] = []  # the blocks that hold it, oldest first


class BlockCopy(CacheEntry):
    """One block that holds a content; nothing needs it if it is one of several."""

    __slots__ = ("block", "content")

    def __init__(self, block: int, content: BlockContent, born_s: float, uses: int = 1) -> None:
        """Add a copy to a content, held by one request."""
        super().__init__(content.identity)
        self.block = BlockId(block)
        self.blocks, self.num_blocks = (self.block,), 1
        self.content: Any = content
        self.ref_count, self.born_s, self.uses = 1, born_s, uses
        content.copies.append(self)

    def remove(self) -> None:
        """Remove it from its content: its block is evicted or retracted."""
        self.content.copies.remove(self)
        self.num_blocks = 0


class CachedContent(BlockContent):
    """What one block of the hash index holds: its tokens and, through its parent, all before."""

    __slots__ = ("children", "key", "num_paths", "parent", "start")

    def __init__(
        self,
        parent: "CachedContent | None",
        digest: BlockDigest | None,
        key: BlockKey,
        identity: Identity,
    ) -> None:
        """Make a content without copies; without a digest it is a partial block."""
        super().__init__(identity, digest, key.name)
        self.parent = parent  # None for a root, which has no tokens
        self.key = key
        self.start: int = 0 if parent is None or parent.parent is None else parent.start + 1
        self.children: ChildIndex[CachedContent] = ChildIndex()
        self.num_paths = 0  # that begin at a root


class HashCopy(BlockCopy):
    """One block that holds a content of the hash index."""

    __slots__ = ()

    content: CachedContent

    @property
    def is_leaf(self) -> bool:
        """Whether no cached content needs this copy."""
        return len(self.content.copies) > 1 or not self.content.children

    def block_key(self, index: int, block_size: int) -> BlockKey:
        """Return what identifies its block among continuations of its prefix."""
        return self.content.key

    def run_from(self, first: int) -> tuple[int, bytes]:
        """Return the place and the packed tokens of its block, or of what follows it."""
        return self.content.start + first, b"" if first else self.content.key.tokens


@dataclass(slots=True)
class HashPath:
    """What one request holds in the hash index: a root, and a copy per block."""

    root: CachedContent
    copies: list[HashCopy] = field(default_factory=list)

    @property
    def last(self) -> CachedContent:
        """The content that the next block continues."""
        return self.copies[-1].content if self.copies else self.root
