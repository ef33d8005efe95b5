"""Blocks that hold the same content: an entry each, the oldest first."""

from collections.abc import Sequence
from typing import Any

from ostinato.cache.block import CacheEntry
from ostinato.core.identity import Identity
from ostinato.core.ids import BlockDigest, BlockId


class BlockContent:
    """What one block holds.

    Attributes:
        identity: What sequences must agree on to find it.
        digest: Of it and everything before it; None if it is found otherwise.
        name: Its packed tokens and extras.
        copies: The blocks that hold it, oldest first.
    """

    __slots__ = ("copies", "digest", "identity", "name")

    def __init__(self, identity: Identity, digest: BlockDigest | None, name: bytes) -> None:
        """Make a content without copies."""
        self.identity = identity
        self.digest = digest
        self.name = name
        self.copies: list[Any] = []


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
        """Return the packed tokens and extras of its block."""
        name: bytes = self.content.name
        return name
