"""Keys and values in 8 bits: a code for each element, and a scale for each token and head.

A row (the key or value of one token and head) is stored as its codes, followed by its scale::

    | c0 c1 c2 ... c(dim-1) | scale |      element = code * scale, scale = largest size / 127
      int8 each               float32

The error of an element is at most half a scale: 0.4 % of the row's largest element. The native
library computes the same codes (``native/src/kv/codes.h``), and returns rows in this order.

Source: symmetric absmax quantization of vectors, Dettmers et al. 2022, arXiv 2208.07339, section 3.
"""

import torch
from torch import Tensor

SCALE_BYTES = 4
_MAX_CODE = 127.0
_MIN_SIZE = 1e-33  # smaller rows are 0


def row_bytes(dim: int, dtype: torch.dtype) -> int:
    """Return the bytes that a key or a value of ``dim`` elements takes in a store."""
    return dim * dtype.itemsize + (SCALE_BYTES if dtype == torch.int8 else 0)


def encode(rows: Tensor) -> Tensor:
    """Return rows as codes and scales.

    Args:
        rows: Shape (num_tokens, num_heads, dim), of any format.

    Returns:
        Shape (num_tokens, num_heads, dim + 4), int8. A row with an element that is not finite
        decodes to NaN.
    """
    rows = rows.float()
    sizes = rows.abs().amax(dim=-1, keepdim=True)  # (num_tokens, num_heads, 1)
    sizes = torch.where(sizes.isfinite(), sizes, torch.nan)
    per_unit = torch.where(
        sizes >= _MIN_SIZE, torch.full_like(sizes, _MAX_CODE) / sizes, torch.zeros_like(sizes)
    )
    codes = (rows * per_unit).nan_to_num_(nan=0.0).round_().to(torch.int8)
    scales = (sizes / _MAX_CODE).view(torch.int8)  # (num_tokens, num_heads, 4)
    return torch.cat((codes, scales), dim=-1)


def decode(rows: Tensor) -> Tensor:
    """Return the values of encoded rows, shape (..., dim), float32."""
    # A copy, since four bytes within a tensor need not be aligned as a float is.
    scales = rows[..., -SCALE_BYTES:].clone(memory_format=torch.contiguous_format)
    return rows[..., :-SCALE_BYTES].float() * scales.view(torch.float32)
