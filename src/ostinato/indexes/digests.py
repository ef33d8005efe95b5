"""Digest functions by name."""

import secrets

from ostinato.cache.block_hash import DigestFunction, sha256
from ostinato.core.config import DigestName


def make_xxh3_128() -> DigestFunction:
    """Return a fast digest, 16 bytes, with a random seed of this process.

    It is no match for an attacker, so digests differ between processes; the hash index
    compares tokens anyway.
    """
    import xxhash  # imported here: an embedded cache needs NumPy alone

    seed = secrets.randbits(64)
    return lambda data: xxhash.xxh3_128_digest(data, seed)


def make_digest(name: DigestName) -> DigestFunction:
    """Return the digest function of that name."""
    return sha256 if name == "sha256" else make_xxh3_128()
