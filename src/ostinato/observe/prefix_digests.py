"""Digests of a sequence's prefixes, for sequences whose tokens may not be kept.

Of a request with ``cache_write=False`` no token is kept. An explanation can still say that a later
prompt would have hit: digests of some of its prefixes are kept, under a random key that never
leaves the process.
"""

import hashlib
import secrets
from collections.abc import Iterator
from dataclasses import dataclass

from ostinato.core.tokens import TOKEN_BYTES

MAX_DIGESTS = 256
"""Digested prefixes per sequence; of a longer one every second, fourth, .. block ends one."""


@dataclass(frozen=True, slots=True)
class PrefixDigests:
    """Digests of prefixes, each ``step`` bytes of tokens longer than the one before."""

    step: int
    digests: tuple[bytes, ...]


class DigestKey:
    """Makes and compares digests."""

    def __init__(self) -> None:
        """Draw a random key."""
        self._key = secrets.token_bytes(16)

    def digests(self, tokens: bytes, block_size: int) -> PrefixDigests:
        """Return digests of a sequence's prefixes, at ends of blocks."""
        size = block_size * TOKEN_BYTES
        step = size * -(-len(tokens) // (size * MAX_DIGESTS)) if tokens else size
        return PrefixDigests(step, tuple(self._walk(tokens, step)))

    def num_common_tokens(self, known: PrefixDigests, tokens: bytes) -> int:
        """Count the tokens that a sequence certainly has in common with a digested one."""
        count = 0
        for known_digest, digest in zip(
            known.digests, self._walk(tokens, known.step), strict=False
        ):
            if known_digest != digest:
                break
            count += 1
        return count * known.step // TOKEN_BYTES

    def _walk(self, tokens: bytes, step: int) -> Iterator[bytes]:
        hasher = hashlib.blake2b(key=self._key, digest_size=16)
        for start in range(0, len(tokens) - step + 1, step):
            hasher.update(tokens[start : start + step])
            yield hasher.copy().digest()
