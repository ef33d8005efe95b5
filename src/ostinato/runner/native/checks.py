"""Checks arguments before the library gets a pointer.

Shapes, strides and dtypes of tensors are checked in each call, in about a microsecond; slots and
block ids once per step. An error here is a bug of this package, not a mistake of the user.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from ostinato.runner.native.ctypes_api import DTYPES, Rows

Ints = npt.NDArray[np.int64]

_INT64 = np.dtype(np.int64)
_FEW = 128


@dataclass(frozen=True, slots=True)
class Slots:
    """Slots that were checked to be within a store.

    Attributes:
        ids: Shape (num_slots,), contiguous.
        address: Address of the first element.
    """

    ids: Ints
    address: int

    @classmethod
    def within(cls, slots: Ints, num_slots: int) -> "Slots":
        """Check slots, shape (n,).

        Raises:
            ValueError: One of them is not within the store.
        """
        if slots.dtype is not _INT64 or slots.ndim != 1:
            _require(slots.dtype == _INT64 and slots.ndim == 1, "slots are a row of int64")
        ids = slots if slots.flags.c_contiguous else np.ascontiguousarray(slots)
        if not within(ids, num_slots):
            _require(False, f"slots are between 0 and {num_slots}")
        return cls(ids, address_of(ids))

    def __len__(self) -> int:
        return len(self.ids)


def within(numbers: Ints, stop: int) -> bool:
    """Return whether all numbers are in ``0 .. stop - 1``.

    A few numbers are compared in Python: after a forward pass, NumPy's code would have to be
    fetched first. Negative numbers are large if they are read as unsigned.
    """
    if len(numbers) <= _FEW:
        few = numbers.tolist()
        return not few or (min(few) >= 0 and max(few) < stop)
    return int(numbers.view(np.uint64).max()) < stop


def address_of(numbers: npt.NDArray[Any]) -> int:
    """Return the address of an array, three times as fast as ``ctypes.data``."""
    address: int = numbers.__array_interface__["data"][0]
    return address


def fill_rows(rows: Rows, tensor: Tensor, num_tokens: int, num_heads: int, dim: int) -> Tensor:
    """Fill in ``rows`` for a tensor of shape (num_tokens, num_heads, dim), any strides.

    Returns:
        The tensor that ``rows`` points into, to be kept alive until after the call; a copy if
        heads were not contiguous.

    Raises:
        ValueError: The tensor has another shape, device or dtype.
    """
    if tensor.shape != (num_tokens, num_heads, dim) or tensor.device.type != "cpu":
        _require(
            False, f"{tuple(tensor.shape)} on {tensor.device} is {(num_tokens, num_heads, dim)}"
        )
    dtype = DTYPES.get(tensor.dtype)
    _require(dtype is not None, f"{tensor.dtype} is one of {', '.join(map(str, DTYPES))}")
    token_stride, head_stride, stride = tensor.stride()
    if stride != 1 and dim != 1:
        tensor = tensor.contiguous()
        token_stride, head_stride, _ = tensor.stride()
    rows.data, rows.dtype = tensor.data_ptr(), dtype
    rows.token_stride, rows.head_stride = token_stride, head_stride
    return tensor


def _require(condition: bool, what: str) -> None:
    if not condition:
        raise ValueError(f"the native library needs that {what}")
