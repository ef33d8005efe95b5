"""Keep keys and values in 8 bits: a code for each element, and a scale for each token and head.

A row, one head's key or value of one token, becomes its codes and behind them its scale::

    | c0 c1 c2 ... c(dim-1) | scale |      element = code * scale, scale = largest size / 127
      int8 each               float32

So an element is off by at most half a scale: 0.4 % of the row's largest element. The native library
makes the same codes (``native/src/kv_codes.h``), and its rows are read in this order.

Source: symmetric absmax quantization of vectors, Dettmers et al. 2022, arXiv 2208.07339, section 3.
"""

import torch
from torch import Tensor

SCALE_BYTES = 4
_MOST_CODE = 127.0
_SMALLEST_SIZE = 1e-33  # rows below it are 0


def row_bytes(dim: int, dtype: torch.dtype) -> int:
    """Return what a key or a value of so many elements takes in a store, in bytes."""
    return dim * dtype.itemsize + (SCALE_BYTES if dtype == torch.int8 else 0)


def encode(rows: Tensor) -> Tensor:
    """Return rows as codes and scales.

    Args:
        rows: Shape (num_tokens, num_heads, dim), of any format.

    Returns:
        Shape (num_tokens, num_heads, dim + 4), int8. A row with an element that is not finite
        reads as NaN.
    """
    rows = rows.float()
    sizes = rows.abs().amax(dim=-1, keepdim=True)  # (num_tokens, num_heads, 1)
    sizes = torch.where(sizes.isfinite(), sizes, torch.nan)
    per_unit = torch.where(
        sizes >= _SMALLEST_SIZE, torch.full_like(sizes, _MOST_CODE) / sizes, torch.zeros_like(sizes)
    )
    codes = (rows * per_unit).nan_to_num_(nan=0.0).round_().to(torch.int8)
    scales = (sizes / _MOST_CODE).view(torch.int8)  # (num_tokens, num_heads, 4)
    return torch.cat((codes, scales), dim=-1)


def decode(rows: Tensor) -> Tensor:
    """Return what encoded rows stand for, shape (..., dim), float32."""
    # A copy, since four bytes within a tensor need not be aligned as a float is.
    scales = rows[..., -SCALE_BYTES:].clone(memory_format=torch.contiguous_format)
    return rows[..., :-SCALE_BYTES].float() * scales.view(torch.float32)
