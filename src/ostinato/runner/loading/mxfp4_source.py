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
from ostinato.runner.loading.weight_source import CheckpointWeight, PlainWeight
from ostinato.runner.native.code_packing import MXFP4_PAIRS

_GROUP = 32
_INTERLEAVED = "gate_up_proj"
_PLACES = (*range(8, 16), *range(7, -1, -1))
"""The place in the table of each nibble: a sign, and a size."""


class Mxfp4Experts(CheckpointWeight):
    """A weight of all experts as blocks and scales; its inputs are before its outputs."""

    kind = "MXFP4"

    def __init__(self, blocks: PlainWeight, scales: PlainWeight, num_parts: int) -> None:
        """Take two parts that take turns, gates and ups, or one."""
        num_experts, self._outputs, self._groups, _ = blocks.shape
        shape = num_experts, self._groups * _GROUP, self._outputs
        super().__init__(shape, (blocks.where, scales.where))
        self._num_parts = num_parts

    def plain(self, dtype: torch.dtype, num_rows: int | None = None) -> Tensor:
        """Return the weight, or as many whole experts."""
        num_outputs = self._outputs
        numbers = torch.empty((num_rows or self.shape[0], *self.shape[1:]), dtype=dtype)
        table = torch.tensor(TABLES["mxfp4"], dtype=torch.float32)[list(_PLACES)] / 2
        for expert in range(len(numbers)):
            rows = torch.from_numpy(self._rows(expert, 0, 1, 0, num_outputs))
            blocks = rows.view(num_outputs, -1, 1 + _GROUP // 2)
            nibbles = torch.stack((blocks[..., 1:] & 15, blocks[..., 1:] >> 4), -1).flatten(2)
            exponents = blocks[..., :1].int() - 127
            numbers[expert] = torch.ldexp(table[nibbles.int()], exponents).flatten(1).T
        return numbers

    def codes(self, num_rows: int | None = None) -> list[BlockRows]:
        """Return of each expert gates and ups, or what leads back."""
        count, num_parts = self._outputs // self._num_parts, self._num_parts
        return [
            BlockRows(
                MXFP4_PAIRS, count, self.shape[1], partial(self._rows, expert, part, num_parts)
            )
            for expert in range(num_rows or self.shape[0])
            for part in range(num_parts)
        ]

    def _rows(
        self, expert: int, part: int, num_parts: int, first: int, last: int
    ) -> NDArray[np.uint8]:
        """Read rows of an expert's part: before the bytes of each block, its scale."""
        blocks, scales = self.ranges
        groups, size = self._groups, _GROUP // 2
        begin, count = expert * self._outputs + first * num_parts, (last - first) * num_parts
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
        weights[weight] = Mxfp4Experts(blocks, scales, 1 + name.count(_INTERLEAVED))
    return weights
