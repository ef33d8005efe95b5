"""Scales, or minima, of the groups of a packed weight of codes (``weights/scale_tiles.h``).

::

    plain         (num_tiles, num_groups, 32)               float16, bfloat16 or float32
    superblocks   (num_tiles, num_superblocks, num_bytes)   uint8

A superblock is 256 inputs of a tile: a float16 factor of each output, then a signed byte for each
of its groups and outputs. So K blocks of a GGUF file keep their scales as they are, in 9 bits in
place of the 32 in which they are exact.
"""

import functools
from collections.abc import Iterable

import torch
from torch import Tensor

from ostinato.runner.native.ctypes_api import DTYPES

TILE_OUTPUTS = 32
"""Outputs of a tile."""

SUPERBLOCKS = torch.uint8
"""Dtype of memory that has superblocks."""

SUPER_INPUTS, MIN_GROUP = 256, 16
_FACTOR_BYTES = 2 * TILE_OUTPUTS
_SUPERBLOCK_GROUPS = (MIN_GROUP, 32)
_SUPERBLOCK_FORMAT = 4


def is_group_size(size: int) -> bool:
    """Return whether the library multiplies groups of this size."""
    return size == MIN_GROUP or size % TILE_OUTPUTS == 0


def scale_format(scales: Tensor) -> int:
    """Return the ``ost_dtype`` of scales, or ``OST_SUPERBLOCKS``."""
    return _SUPERBLOCK_FORMAT if scales.dtype == SUPERBLOCKS else DTYPES[scales.dtype]


def joined_dtype(dtypes: Iterable[torch.dtype]) -> torch.dtype:
    """Return a dtype in which scales of several weights are exact."""
    each = set(dtypes)
    if each == {SUPERBLOCKS}:
        return SUPERBLOCKS
    plain = (torch.float32 if dtype == SUPERBLOCKS else dtype for dtype in each)
    return functools.reduce(torch.promote_types, plain)


def scales_shape(
    num_tiles: int, num_groups: int, group_size: int, dtype: torch.dtype
) -> tuple[int, int, int]:
    """Return the shape of memory for scales of a dtype."""
    if dtype != SUPERBLOCKS:
        return num_tiles, num_groups, TILE_OUTPUTS
    assert group_size in _SUPERBLOCK_GROUPS, group_size
    groups = SUPER_INPUTS // group_size
    assert num_groups % groups == 0, "whole superblocks"
    return num_tiles, num_groups // groups, _FACTOR_BYTES + groups * TILE_OUTPUTS


def numbers_of(scales: Tensor) -> Tensor:
    """Return scales as numbers by row, shape (num_tiles * 32, num_groups), a copy."""
    if scales.dtype == SUPERBLOCKS:
        factors, groups = _parts(scales)
        scales = (groups * factors.float().unsqueeze(2)).flatten(1, 2)
    return scales.transpose(1, 2).reshape(-1, scales.shape[1])


def put_numbers(scales: Tensor, outputs: Tensor, numbers: Tensor) -> None:
    """Write the scales of some outputs.

    Args:
        scales: Written to; superblocks get the nearest bytes of their largest number.
        outputs: Shape (num_rows,).
        numbers: Shape (num_rows, num_groups).
    """
    tiles, places = outputs // TILE_OUTPUTS, outputs % TILE_OUTPUTS
    if scales.dtype != SUPERBLOCKS:
        scales[tiles, :, places] = numbers.to(scales.dtype)
        return
    factors, groups = _parts(scales)
    own = numbers.float().unflatten(1, (scales.shape[1], -1))
    largest = (own.abs().amax(2) / 127).half()
    nearest = torch.where(largest[..., None] == 0, 0.0, own / largest[..., None].float())
    factors[tiles, :, places] = largest
    groups[tiles, :, :, places] = nearest.round_().clamp_(-127, 127).to(torch.int8)


def _parts(scales: Tensor) -> tuple[Tensor, Tensor]:
    """Return the factors and the bytes of superblocks, which share their memory."""
    factors = scales[..., :_FACTOR_BYTES].view(torch.float16)
    groups = scales[..., _FACTOR_BYTES:].view(torch.int8)
    return factors, groups.unflatten(2, (-1, TILE_OUTPUTS))
