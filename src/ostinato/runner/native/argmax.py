"""The largest number of each row.

On a CPU ``torch.argmax`` compares one number at a time, and NumPy has no bfloat16: a megabyte of
logits takes most of a millisecond, and some 50 microseconds in the library.
"""

import ctypes

import numpy as np
import torch
from torch import Tensor

from ostinato.runner.native.ctypes_api import DTYPES, int32s, int64s, pointers
from ostinato.runner.native.library import library

NONE = -1
"""The token of a row from which none can be sampled."""


class _Best(ctypes.Structure):
    """``ost_best``, with the fields of its matrix."""

    _fields_ = (
        *pointers("numbers"),
        *int64s("stride"),
        *pointers("places"),
        *int64s("num_rows"),
        *int32s("width", "dtype", "num_threads"),
    )


def argmax(scores: Tensor) -> list[int]:
    """Return each row's most likely id, the lowest of several; -1 if it is not finite."""
    native = library()
    if native is not None and takes(scores):
        return best_places(native, scores)
    if scores.device.type == "cpu":
        return _argmax_by_numpy(scores)
    best = scores.argmax(-1, keepdim=True)
    return torch.where(scores.gather(1, best).isfinite(), best, NONE)[:, 0].tolist()


def _argmax_by_numpy(scores: Tensor) -> list[int]:
    """Return the same on a CPU, where ``torch.argmax`` compares one number at a time."""
    wide = scores.to(torch.promote_types(scores.dtype, torch.float32)).numpy()
    best = wide.argmax(-1)  # of a NaN, if there is one, as with torch
    highest = np.take_along_axis(wide, best[:, None], -1)[:, 0]
    ids: list[int] = np.where(np.isfinite(highest), best, NONE).tolist()
    return ids


def takes(rows: Tensor) -> bool:
    """Whether the library supports these rows."""
    return rows.device.type == "cpu" and rows.dtype in DTYPES and rows.shape[1] > 0


def best_places(native: ctypes.CDLL, rows: Tensor) -> list[int]:
    """Find the largest number of each row.

    Args:
        native: The library.
        rows: Shape (num_rows, width); ``takes`` is true for them.

    Returns:
        The first of the largest; -1 for a row whose largest number is not finite, or with a NaN.
    """
    if rows.stride(1) != 1:
        rows = rows.contiguous()
    places = np.empty(len(rows), dtype=np.int64)
    best = _Best(
        rows.data_ptr(),
        rows.stride(0),
        places.ctypes.data,
        *rows.shape,
        DTYPES[rows.dtype],
        torch.get_num_threads(),
    )
    native.ost_ops_best(ctypes.byref(best))
    ids: list[int] = places.tolist()
    return ids
