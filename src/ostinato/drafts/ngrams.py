"""Positions in a text by the digest of the tokens before them.

A table has a place per digest, and keeps the newest position of those that share one::

    text       a b c d e f g h i j k
    digest           └─ 4 tokens ─┘▲
                                   └─ position 11: where the text goes on

Positions are only hints: who looks one up compares the tokens before it. Digests are sums of
products with secret numbers, so that no sender can choose texts whose places coincide.
"""

import secrets
from array import array
from collections.abc import Iterator, Sequence
from operator import mul

import numpy as np
import numpy.typing as npt

LONG, SHORT = 8, 4
"""Tokens before a position that digests cover; the longer match is the better guess."""

_MASK = 2**64 - 1
_FACTORS = tuple(secrets.randbits(64) | 1 for _ in range(LONG))
_MIX = secrets.randbits(64) | 1
_ONES = [sum(_FACTORS[:count]) for count in range(LONG + 1)]  # so that token 0 counts
_NUMPY_FACTORS = np.array(_FACTORS, dtype=np.uint64)

Words = npt.NDArray[np.uint64]


def weigh(tokens: Sequence[int]) -> int:
    """Return the sum of products of some tokens, at most ``LONG``: a digest without its salt."""
    products: Iterator[int] = map(mul, tokens, _FACTORS)
    return sum(products) + _ONES[len(tokens)]


def salted(weight: int, salt: int = 0) -> int:
    """Return the digest of some tokens by their sum of products, below 2**64."""
    total = (weight + salt) & _MASK
    return ((total ^ total >> 29) * _MIX) & _MASK


def digests(tokens: npt.NDArray[np.uint32], length: int, salt: int = 0) -> Words:
    """Return the digests of all runs of ``length`` tokens, shape (num_tokens - length + 1,)."""
    count = len(tokens) - length + 1
    words = tokens.astype(np.uint64) + np.uint64(1)
    total = np.full(count, salt & _MASK, dtype=np.uint64)
    for place in range(length):
        total += words[place : place + count] * _NUMPY_FACTORS[place]
    total = (total ^ (total >> np.uint64(29))) * np.uint64(_MIX)
    return total


class NgramTable:
    """Newest position by digest; 0 where there is none.

    Attributes:
        length: Tokens that a digest covers.
        places: One position per place, shape (num_places,).
    """

    def __init__(self, length: int, num_places: int) -> None:
        """Make an empty table of places of 4 bytes, below 2**32 of them."""
        self.length = length
        self.places = array("I", bytes(4 * num_places))
        self._view = np.frombuffer(self.places, dtype=np.uint32)

    def get(self, digest: int) -> int:
        """Return the newest position with a digest, or of another one at the same place."""
        return self.places[(digest >> 32) * len(self.places) >> 32]

    def put(self, digest: int, position: int) -> None:
        """Note where the text goes on after the tokens of a digest."""
        self.places[(digest >> 32) * len(self.places) >> 32] = position

    def put_all(self, digests: Words, positions: npt.NDArray[np.integer]) -> None:
        """Note many positions, of which later ones replace earlier ones."""
        high, count = digests >> np.uint64(32), np.uint64(len(self.places))
        self._view[(high * count) >> np.uint64(32)] = positions

    def clear(self) -> None:
        """Forget all positions."""
        self._view[:] = 0
