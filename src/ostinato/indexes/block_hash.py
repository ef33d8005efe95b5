"""Digests of blocks: chained, so that each covers everything before it, as in git.

::

    root    = H(identity, or that of the public prefix)
    block 0 = H(root      + tokens 0 .. B-1     + extra)
    block k = H(block k-1 + tokens kB .. kB+B-1 + extra)

Tokens are packed little-endian ``uint32``; the extra is what images and boundaries add to a block
(``core.identity``). What is hashed is bytes of fixed layout, never ``str()`` or ``pickle`` of
Python objects, so that lists, tuples and NumPy integers of the same ids give the same digest.
"""

import hashlib
import secrets
from collections.abc import Callable

from ostinato.core.identity import PrefixKey
from ostinato.core.ids import BlockDigest
from ostinato.settings import DigestName

DigestFunction = Callable[[bytes], bytes]
"""From any bytes to a digest of fixed length."""


def sha256(data: bytes) -> bytes:
    """Digest that cannot be forged; 32 bytes."""
    return hashlib.sha256(data).digest()


def make_digest(name: DigestName) -> DigestFunction:
    """Return a digest function: ``sha256``, or the faster ``xxh3_128`` with a random seed.

    XXH3 is not collision-resistant; the seed, which no other process has, makes collisions hard to
    prepare, and the hash index compares tokens anyway.
    """
    if name == "sha256":
        return sha256
    import xxhash  # imported here: an embedded cache needs NumPy alone

    seed = secrets.randbits(64)
    return lambda data: xxhash.xxh3_128_digest(data, seed)


class BlockHasher:
    """Digests of the full blocks of a sequence, computed once and remembered in its key."""

    def __init__(self, block_size: int, digest: DigestFunction) -> None:
        """Hash blocks of ``block_size`` tokens with ``digest``."""
        self.block_size = block_size
        self._digest = digest

    def digests(self, key: PrefixKey, num_blocks: int) -> list[BlockDigest]:
        """Return the key's memo of chained digests, with at least those of its first full blocks.

        Cost: one digest per block that is not in the memo yet.
        """
        memo = key.digests.setdefault(self, [])
        if len(memo) < num_blocks:
            parent = memo[-1] if memo else self._root(key)
            digest, name = self._digest, self.name
            for index in range(len(memo), num_blocks):
                parent = BlockDigest(digest(parent + name(key, index)))
                memo.append(parent)
        return memo

    def name(self, key: PrefixKey, index: int) -> bytes:
        """Return the ``BlockKey.name`` of a full block: mostly its tokens."""
        size = self.block_size
        start, stop = index * size, (index + 1) * size
        if key.spans:
            return key.block_key(start, stop).name
        return key.tokens[start:stop].tobytes()

    def child(self, key: PrefixKey, num_blocks: int, name: bytes) -> BlockDigest:
        """Return the digest of a block of that name after a sequence's first blocks."""
        parent = self.digests(key, num_blocks)[num_blocks - 1] if num_blocks else self._root(key)
        return BlockDigest(self._digest(parent + name))

    def _root(self, key: PrefixKey) -> BlockDigest:
        """Return the parent digest of a sequence's first block."""
        return BlockDigest(self._digest(key.identity.root.encoded))
