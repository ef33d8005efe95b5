"""Random numbers for sampling.

A generator has a state that every draw changes, so the numbers of a request would depend on the
other requests of its batch, and on preemptions. Here there is no state: the number of a token is a
hash of the sequence's seed and its number of tokens. So the same seed gives the same numbers in any
batch, in any order, after preemption or a restart, and on any device.

This is counter-based random number generation (Salmon et al., "Parallel random numbers: as easy
as 1, 2, 3", SC 2011) with a cryptographic hash, which takes about a microsecond per token.
"""

import hashlib

_DOMAIN = b"ostinato.sample"
_FRACTION_BITS = 53
"""Bits of a float64 fraction; more would be rounded, perhaps up to 1."""


def uniform(seed: int, num_output_tokens: int) -> float:
    """Return the random number of one token, uniform in [0, 1).

    Args:
        seed: Seed of the sequence, -2**127 .. 2**127 - 1.
        num_output_tokens: Tokens that the sequence has generated so far.

    Returns:
        A multiple of 2**-53; the same arguments always give the same one.
    """
    message = seed.to_bytes(16, "little", signed=True) + num_output_tokens.to_bytes(8, "little")
    digest = hashlib.blake2b(message, digest_size=8, person=_DOMAIN).digest()
    high_bits = int.from_bytes(digest, "little") >> (64 - _FRACTION_BITS)
    return high_bits * 2.0**-_FRACTION_BITS
