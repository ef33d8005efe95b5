"""Lab 1: hash blocks and a chain of digests.

Fill the holes, then run ``ostinato labs check 1``.
"""

import struct
from collections.abc import Sequence
from hashlib import sha256

ROOT = sha256(b"lab 1: a model, version 1").digest()
"""The parent of every first block: it stands for all else that must agree, such as the model."""


def usable_tokens(num_tokens: int, block_size: int) -> int:
    """Return how many leading tokens of a prompt may hit, in whole blocks."""
    # Hole 1 (One token is always computed): the last token never hits, and only whole blocks do.
    return (num_tokens - 1) // block_size * block_size
    # End of hole 1.


def block_digest(parent: bytes, tokens: Sequence[int]) -> bytes:
    """Name a block after its tokens and, by its parent's name, all tokens before them."""
    # Hole 2 (A chain of digests): SHA-256 of the parent, then each token as four bytes.
    # struct.pack("<2I", 1, 2) packs two tokens; list and tuple must give one digest.
    return sha256(parent + struct.pack(f"<{len(tokens)}I", *tokens)).digest()
    # End of hole 2.


class HashIndex:
    """An index that finds blocks by digest."""

    def __init__(self, block_size: int) -> None:
        """Make an empty index."""
        self.block_size = block_size
        self.blocks: dict[bytes, int] = {}  # from digest to block

    def chain(self, tokens: Sequence[int]) -> list[bytes]:
        """Return the digests of the full blocks of a sequence, in order."""
        # Hole 3 (A chain of digests): each block's parent is the digest of the block before it.
        # What is left at the end is no full block and has no digest.
        digests, parent = [], ROOT
        for start in range(0, len(tokens) - self.block_size + 1, self.block_size):
            parent = block_digest(parent, tokens[start : start + self.block_size])
            digests.append(parent)
        return digests
        # End of hole 3.

    def match(self, tokens: Sequence[int]) -> list[int]:
        """Return the blocks of the longest cached prefix, in order; changes nothing."""
        # Hole 4 (Match, insert, remove): walk the chain until the first digest that is unknown.
        match = []
        for digest in self.chain(tokens):
            if digest not in self.blocks:
                break
            match.append(self.blocks[digest])
        return match
        # End of hole 4.

    def insert(self, tokens: Sequence[int], blocks: Sequence[int]) -> list[int]:
        """Add the full blocks of a sequence; return the block that holds each from now on."""
        # Hole 5 (Match, insert, remove): what is known already keeps its older block.
        pairs = zip(self.chain(tokens), blocks, strict=True)
        return [self.blocks.setdefault(digest, block) for digest, block in pairs]
        # End of hole 5.

    def remove(self, tokens: Sequence[int]) -> None:
        """Forget the last block of a sequence of full blocks."""
        # Hole 6 (Match, insert, remove): the blocks before it stay.
        del self.blocks[self.chain(tokens)[-1]]
        # End of hole 6.
