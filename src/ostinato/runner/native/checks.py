"""Checks arguments before the library gets a pointer.

Shapes, strides and dtypes of tensors are checked in each call, in about a microsecond; slots and
block ids once per step. An error here is a bug of this package, not a mistake of the user.
"""

import numpy as np
import numpy.typing as npt
from torch import Tensor

from ostinato.runner.native.ctypes_api import DTYPES, Rows

Ints = npt.NDArray[np.int64]

_FEW = 128


def within(numbers: Ints, stop: int) -> bool:
    """Return whether all numbers are in ``0 .. stop - 1``.

    A few numbers are compared in Python: after a forward pass, NumPy's code would have to be
    fetched first. Negative numbers are large if they are read as unsigned.
    """
    if len(numbers) <= _FEW:
        few = numbers.tolist()
        return not few or (min(few) >= 0 and max(few) < stop)
    return int(numbers.view(np.uint64).max()) < stop


def fill_rows(rows: Rows, tensor: Tensor, num_tokens: int, num_heads: int, dim: int) -> Tensor:
    """Fill in ``rows`` for a tensor of shape (num_tokens, num_heads, dim), any strides.

    Returns:
        The tensor that ``rows`` points into, to be kept alive until after the call; a copy if
        heads were not contiguous.

    Raises:
        ValueError: The tensor has another shape, device or dtype.
    """
    if tensor.shape != (num_tokens, num_heads, dim) or tensor.device.type != "cpu":
        shape, expected = tuple(tensor.shape), (num_tokens, num_heads, dim)
        raise ValueError(
            f"the native library needs that {shape} on {tensor.device} is {expected} on a CPU"
        )
    dtype = DTYPES.get(tensor.dtype)
    if dtype is None:
        raise ValueError(
            f"the native library needs that {tensor.dtype} is one of {', '.join(map(str, DTYPES))}"
        )
    token_stride, head_stride, stride = tensor.stride()
    if stride != 1 and dim != 1:
        tensor = tensor.contiguous()
        token_stride, head_stride, _ = tensor.stride()
    rows.data, rows.dtype = tensor.data_ptr(), dtype
    rows.token_stride, rows.head_stride = token_stride, head_stride
    return tensor
