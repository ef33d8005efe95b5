"""Checks token ids and packs them.

A prompt arrives as a list, a tuple or a NumPy array, and is kept as an ``array("I")``: four bytes
a token, little-endian, sliceable and comparable at the speed of ``memcmp``. The same ids give the
same bytes from every container.
"""

import sys
from array import array
from collections.abc import Iterable
from contextlib import suppress

import numpy as np

from ostinato.core.errors import TokenOutOfRange

TOKEN_BYTES = 4  # of one packed id
MAX_TOKEN_ID = 2**32 - 1

assert array("I").itemsize == TOKEN_BYTES and sys.byteorder == "little", "needs 4-byte LE ints"


def pack_tokens(tokens: Iterable[int]) -> "array[int]":
    """Pack token ids, Python or NumPy integers, into a new array of four bytes each.

    Raises:
        TokenOutOfRange: An id is no integer, or not in ``0 .. 2**32 - 1``.

    Cost: O(num_tokens) in C for lists, tuples and integer NumPy arrays.
    """
    if isinstance(tokens, array) and tokens.typecode == "I":
        return tokens[:]
    if isinstance(tokens, np.ndarray):
        return _pack_numpy(tokens)
    packed = array("I")
    tokens = tokens if isinstance(tokens, list) else list(tokens)
    try:
        packed.fromlist(tokens)  # a third less than array("I", tokens): no reference per id
        return packed
    except (OverflowError, TypeError) as error:
        raise _first_invalid(tokens) from error


def num_common_tokens(left: bytes | memoryview, right: bytes | memoryview) -> int:
    """Return the length of the longest common prefix of two packed runs, in tokens.

    Cost: O(common bytes) in C, one step in Python per doubling.
    """
    if left[:TOKEN_BYTES] != right[:TOKEN_BYTES]:
        return 0  # the common case among siblings
    end = min(len(left), len(right))
    start, width = 0, 256
    while start < end:
        stop = min(end, start + width)
        a, b = bytes(left[start:stop]), bytes(right[start:stop])
        if a != b:
            differing = int.from_bytes(a, "little") ^ int.from_bytes(b, "little")
            low_bit = (differing & -differing).bit_length() - 1
            return (start + low_bit // 8) // TOKEN_BYTES
        start, width = stop, width * 2
    return end // TOKEN_BYTES


def _pack_numpy(tokens: "np.ndarray[tuple[int, ...], np.dtype[np.generic]]") -> "array[int]":
    """Pack an integer array, shape (num_tokens,), without a Python int per token."""
    if tokens.ndim != 1 or not np.issubdtype(tokens.dtype, np.integer):
        row = f"{tokens.dtype} of shape {tokens.shape}"
        raise TokenOutOfRange(f"token ids must be one row of integers, not {row}")
    if tokens.size and (int(tokens.min()) < 0 or int(tokens.max()) > MAX_TOKEN_ID):
        raise _first_invalid(tokens.tolist())
    return array("I", np.asarray(tokens, dtype="<u4").tobytes())


def _first_invalid(tokens: list[int]) -> TokenOutOfRange:
    """Return the error that names the first invalid id; there is one."""
    valid = array("I")
    with suppress(OverflowError, TypeError):
        valid.extend(tokens)  # up to the first that is not
    what = f"token id {tokens[len(valid)]!r} at position {len(valid)}"
    return TokenOutOfRange(f"{what} is not an integer from 0 to {MAX_TOKEN_ID}")
