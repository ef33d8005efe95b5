"""Pads decodes to few sizes, so that few captured steps serve all batches.

Padding rows have slot -1, which is not written, and position -1: their parts have one key, the
first of the step, which they do not see, so that their result is zero. Padding parts have no rows,
and padding merges no row.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from ostinato.runner.gpu.read_parts import PART_FIELDS, Ints32, PartLimits, ReadParts

MAX_PADDED_ROWS = 256
"""Larger steps of decodes run as they are: launching them takes less time than they do."""

_NO_ROW = -1


def padded_rows(num_rows: int) -> int:
    """Return the size of a batch: 1, 2, 4, 8, then multiples of 8."""
    return 1 << (num_rows - 1).bit_length() if num_rows <= 8 else -(-num_rows // 8) * 8


def padded_size(size: int) -> int:
    """Return the size of a table: 0, or a power of two."""
    return 0 if size == 0 else 1 << (size - 1).bit_length()


def pad(array: npt.NDArray[Any], size: int, value: int) -> npt.NDArray[Any]:
    """Append a value until there are ``size`` numbers."""
    return np.append(array, np.full(size - len(array), value, dtype=array.dtype))


def pad_parts(parts: ReadParts, limits: PartLimits, num_rows: int) -> ReadParts:
    """Pad a plan of decodes to ``num_rows`` rows, and its tables to their sizes."""
    real, per_tile = len(parts.tokens), limits.narrow_rows // limits.group
    firsts = np.arange(real, num_rows, per_tile)
    empty = _padding_parts(len(firsts))
    empty[:, 0], empty[:, 1] = firsts, np.minimum(per_tile, num_rows - firsts)
    num_merges = padded_size(len(parts.merge_tokens))
    starts = parts.merge_starts
    return ReadParts(
        padded_size(parts.num_partials),
        parts.keys_fetched,
        parts.keys_issued,
        np.append(parts.tokens, np.arange(real, num_rows, dtype=np.int32)),
        pad(parts.positions, num_rows, _NO_ROW),
        _with_no_rows(np.concatenate((parts.narrow, empty))),
        _with_no_rows(parts.wide),
        pad(parts.merge_tokens, num_merges, _NO_ROW),
        pad(starts, num_merges + 1, int(starts[-1])),
        pad(parts.merge_partials, padded_size(len(parts.merge_partials)), 0),
    )


def _with_no_rows(parts: Ints32) -> Ints32:
    return np.concatenate((parts, _padding_parts(padded_size(len(parts)) - len(parts))))


def _padding_parts(count: int) -> Ints32:
    """Return parts of no rows, the first key, and no partial result."""
    parts = np.zeros((count, PART_FIELDS), dtype=np.int32)
    parts[:, 4], parts[:, 5] = 1, -1
    return parts
