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


def takes(rows: Tensor) -> bool:
    """Whether the library supports these rows."""
    return rows.device.type == "cpu" and rows.dtype in DTYPES and rows.shape[1] > 0


def argmax(scores: Tensor) -> list[int]:
    """Return the place of each row's largest number, the first of several.

    -1 for a row whose largest number is not finite, or with a NaN.
    """
    native = library()
    if native is None or not takes(scores):
        return _argmax_in_python(scores)
    if scores.stride(1) != 1:
        scores = scores.contiguous()
    places = np.empty(len(scores), dtype=np.int64)
    best = _Best(
        scores.data_ptr(),
        scores.stride(0),
        places.ctypes.data,
        *scores.shape,
        DTYPES[scores.dtype],
        torch.get_num_threads(),
    )
    native.ost_ops_best(ctypes.byref(best))
    ids: list[int] = places.tolist()
    return ids


def _argmax_in_python(scores: Tensor) -> list[int]:
    """Return the same by NumPy on a CPU, where ``torch.argmax`` compares one number at a time."""
    if scores.device.type != "cpu":
        best = scores.argmax(-1, keepdim=True)
        return torch.where(scores.gather(1, best).isfinite(), best, NONE)[:, 0].tolist()
    wide = scores.to(torch.promote_types(scores.dtype, torch.float32)).numpy()
    places = wide.argmax(-1)  # of a NaN, if there is one, as with torch
    highest = np.take_along_axis(wide, places[:, None], -1)[:, 0]
    ids: list[int] = np.where(np.isfinite(highest), places, NONE).tolist()
    return ids
