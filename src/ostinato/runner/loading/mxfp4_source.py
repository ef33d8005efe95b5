"""Checkpoints of gpt-oss as published: experts in MXFP4, everything else plain.

::

    experts.gate_up_proj_blocks  (experts, 2 * inner, width / 32, 16)
    experts.gate_up_proj_scales  (experts, 2 * inner, width / 32)
    experts.down_proj_*          (experts, width, inner / 32, ...)

A byte has two inputs, the first in its low half, and a scale is an exponent of two, 127 more. Gates
and ups take turns.

Source: the Open Compute Project's Microscaling Formats (MX) 1.0, and ``integrations/mxfp4.py`` of
``transformers``.
"""

from collections.abc import Mapping
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ostinato.errors import BrokenCheckpoint
from ostinato.runner.forward.codes import TABLES
from ostinato.runner.forward.gguf_codes import BlockRows
from ostinato.runner.loading.merged_experts import MergedExperts
from ostinato.runner.loading.weight_source import CheckpointWeight, FileRange, PlainWeight
from ostinato.runner.native.code_packing import MXFP4_PAIRS

_GROUP = 32
_INTERLEAVED = "gate_up_proj"
_PLACES = (*range(8, 16), *range(7, -1, -1))
"""The place in the table of each nibble: a sign, and a size."""


class Mxfp4Weight(CheckpointWeight):
    """An expert's weight as blocks and scales."""

    kind = "MXFP4"

    def __init__(
        self, blocks: FileRange, scales: FileRange, shape: tuple[int, int], num_parts: int
    ) -> None:
        """Take two parts that take turns, gates and ups, or one."""
        super().__init__(shape, (blocks, scales))
        self._num_parts, self._groups = num_parts, shape[1] // _GROUP

    def plain(self, dtype: torch.dtype, num_rows: int | None = None) -> Tensor:
        """Return the weight, or its first rows."""
        table = torch.tensor(TABLES["mxfp4"], dtype=torch.float32)[list(_PLACES)] / 2
        rows = torch.from_numpy(self._rows(0, 1, 0, num_rows or self.shape[0]))
        blocks = rows.view(len(rows), -1, 1 + _GROUP // 2)
        nibbles = torch.stack((blocks[..., 1:] & 15, blocks[..., 1:] >> 4), -1).flatten(2)
        exponents = blocks[..., :1].int() - 127
        return torch.ldexp(table[nibbles.int()], exponents).flatten(1).to(dtype)

    def codes(self, num_rows: int | None = None) -> list[BlockRows]:
        """Return gates and ups, or what leads back, to be read when they are packed."""
        num_parts, (num_outputs, num_inputs) = self._num_parts, self.shape
        count = num_outputs // num_parts
        reads = [partial(self._rows, part, num_parts) for part in range(num_parts)]
        return [BlockRows(MXFP4_PAIRS, count, num_inputs, read) for read in reads]

    def _rows(self, part: int, num_parts: int, first: int, last: int) -> NDArray[np.uint8]:
        """Read rows of a part: before the bytes of each block, its scale."""
        blocks, scales = self.ranges
        groups, size = self._groups, _GROUP // 2
        begin, count = first * num_parts, (last - first) * num_parts
        rows = np.empty((last - first, groups, 1 + size), np.uint8)
        for where, width, to in ((scales, 1, rows[..., :1]), (blocks, size, rows[..., 1:])):
            content = where.read(begin * groups * width, count * groups * width, num_parts)
            to[...] = content.reshape(-1, num_parts, groups, width)[:, part]
        return rows.reshape(last - first, -1)


def mxfp4_weights(stored: Mapping[str, PlainWeight]) -> dict[str, CheckpointWeight]:
    """Return the weights of a checkpoint, the blocks of experts together with their scales.

    Raises:
        BrokenCheckpoint: Blocks have no scales, or do not fit them.
    """
    weights: dict[str, CheckpointWeight] = dict(stored)
    for name, blocks in stored.items():
        if not name.endswith("_blocks"):
            continue
        weight, shape = name.removesuffix("_blocks"), blocks.shape
        scales = stored.get(f"{weight}_scales", blocks)
        are_bytes = blocks.format == scales.format == "U8"
        if not are_bytes or scales.shape != shape[:-1] or shape[3:] != (_GROUP // 2,):
            raise BrokenCheckpoint(
                f"{blocks.where.path}: {name} of shape {shape} needs {weight}_scales of shape "
                f"{shape[:-1]}, both of bytes"
            )
        del weights[name], weights[f"{weight}_scales"]
        num_experts, num_outputs, num_groups, _ = shape
        own = num_outputs, num_groups * _GROUP
        num_parts = 1 + name.count(_INTERLEAVED)
        experts = [
            [Mxfp4Weight(of_blocks, of_scales, own, num_parts)]
            for of_blocks, of_scales in zip(
                blocks.where.split(num_experts), scales.where.split(num_experts), strict=True
            )
        ]
        weights[weight] = MergedExperts(experts, is_transposed=True)
    return weights
