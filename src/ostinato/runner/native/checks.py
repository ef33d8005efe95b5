"""Checks arguments before the library sees a pointer.

Shapes, strides and formats of each call's tensors, in a microsecond or so; slots and block ids
once per step. What is wrong here is a mistake of this package, not of its user.
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
    """Slots that are known to be in a store.

    Attributes:
        ids: Shape (num_slots,), contiguous.
        address: Address of the first element.
    """

    ids: Ints
    address: int

    @classmethod
    def within(cls, slots: Ints, num_slots: int) -> "Slots":
        """Check slots, shape (n,), against how many there are.

        Raises:
            ValueError: One of them is none.
        """
        if slots.dtype is not _INT64 or slots.ndim != 1:
            _require(slots.dtype == _INT64 and slots.ndim == 1, "slots are a row of int64")
        ids = slots if slots.flags.c_contiguous else np.ascontiguousarray(slots)
        _require(within(ids, num_slots), f"slots are between 0 and {num_slots}")
        return cls(ids, address_of(ids))

    def __len__(self) -> int:
        return len(self.ids)


def within(numbers: Ints, stop: int) -> bool:
    """Whether all numbers are between 0 and ``stop``.

    Few are looked at in Python: behind a forward, NumPy's code has to be fetched first. Of many,
    those that are negative are large as unsigned ones.
    """
    if len(numbers) <= _FEW:
        few = numbers.tolist()
        return not few or (min(few) >= 0 and max(few) < stop)
    return int(numbers.view(np.uint64).max()) < stop


def address_of(numbers: npt.NDArray[Any]) -> int:
    """Return where an array begins, at a third of the price of ``ctypes.data``."""
    address: int = numbers.__array_interface__["data"][0]
    return address


def fill_rows(rows: Rows, tensor: Tensor, num_tokens: int, num_heads: int, dim: int) -> Tensor:
    """Describe rows of tokens to the library.

    Args:
        rows: Filled in.
        tensor: Shape (num_tokens, num_heads, dim), any strides.
        num_tokens: How many there must be.
        num_heads: Likewise.
        dim: Likewise.

    Returns:
        What ``rows`` points into, to be kept until after the call: the tensor, or a copy of it
        whose rows are contiguous.

    Raises:
        ValueError: The tensor is another.
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
