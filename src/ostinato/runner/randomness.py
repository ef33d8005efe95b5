"""Random numbers for sampling.

A sampler with a generator has a state that every draw moves on, so what one request gets
depends on how often its neighbours drew, and on whether it was preempted and came back. Here
there is no state: the number behind a token is a keyed hash of two things that belong to the
sequence alone, its seed and how many tokens it has. So the same seed gives the same numbers in
any batch, in any order, after preemption or a restart, and on any device.

This is counter-based random number generation (Salmon et al., "Parallel random numbers: as easy
as 1, 2, 3", SC 2011) with a cryptographic hash as the mixer: one call of about a microsecond per
token, next to a forward pass of milliseconds, and seeds 1 and 2 are as unlike as any other two.
"""

import hashlib

_DOMAIN = b"ostinato.sample"
_FRACTION_BITS = 53
"""Bits of a float64 fraction; more would be rounded, perhaps up to 1."""


def uniform(seed: int, num_output_tokens: int) -> float:
    """Return the random number behind one token, uniform in [0, 1).

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
