"""The largest number of each row.

``torch.argmax`` looks at one number at a time on a CPU, and NumPy knows no bfloat16: a megabyte of
logits took most of a millisecond, and takes some 50 microseconds by the library.
"""

import ctypes

import numpy as np
import torch
from torch import Tensor

from ostinato.runner.native.ctypes_api import DTYPES


class _Best(ctypes.Structure):
    """``ost_best``; its matrix is spelled out."""

    _fields_ = (
        ("numbers", ctypes.c_void_p),
        ("stride", ctypes.c_int64),
        ("places", ctypes.c_void_p),
        ("num_rows", ctypes.c_int64),
        ("width", ctypes.c_int32),
        ("dtype", ctypes.c_int32),
        ("num_threads", ctypes.c_int32),
    )


def takes(rows: Tensor) -> bool:
    """Whether the library can look through these rows."""
    return rows.device.type == "cpu" and rows.dtype in DTYPES and rows.shape[1] > 0


def best_places(native: ctypes.CDLL, rows: Tensor) -> list[int]:
    """Find the largest number of each row.

    Args:
        native: The library.
        rows: Such as it ``takes``, shape (num_rows, width), at least one number in a row.

    Returns:
        The first of the largest; -1 for one whose largest number is not finite, or that has a NaN.
    """
    assert takes(rows), (rows.shape, rows.dtype, rows.device)
    if rows.stride(1) != 1:
        rows = rows.contiguous()
    places = np.empty(len(rows), dtype=np.int64)
    native.ost_ops_best(
        ctypes.byref(
            _Best(
                rows.data_ptr(),
                rows.stride(0),
                places.ctypes.data,
                len(rows),
                rows.shape[1],
                DTYPES[rows.dtype],
                torch.get_num_threads(),
            )
        )
    )
    found: list[int] = places.tolist()
    return found
