"""Blocks that hold the same content: an entry each, the oldest first."""

from collections.abc import Sequence
from typing import Any

from ostinato.cache.block import CacheEntry
from ostinato.core.identity import Identity
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
        self.content: Any = content
        self.ref_count, self.born_s, self.uses = 1, born_s, uses
        content.copies.append(self)

    @property
    def blocks(self) -> Sequence[int]:
        """Its block."""
        return (self.block,)

    @property
    def num_blocks(self) -> int:
        """One, until it is evicted."""
        return int(self in self.content.copies)

    def name_of(self, index: int, block_size: int) -> bytes:
        """Return the packed tokens and the extra of its block."""
        name: bytes = self.content.name
        return name
