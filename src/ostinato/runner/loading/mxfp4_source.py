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

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ostinato.errors import BrokenCheckpoint
from ostinato.runner.forward.codes import TABLES
from ostinato.runner.forward.gguf_codes import BlockRows
from ostinato.runner.loading.weight_source import FileRange, SafetensorsSource
from ostinato.runner.native.code_packing import MXFP4_PAIRS

_GROUP = 32
_INTERLEAVED = "gate_up_proj"
_PLACES = (*range(8, 16), *range(7, -1, -1))
"""The place in the table of each nibble: a sign, and a size."""


class Mxfp4Source(SafetensorsSource):
    """Weights whose experts have blocks and scales; see ``WeightSource``."""

    def __init__(self, files: Iterable[Path]) -> None:
        """Read the files' headers.

        Raises:
            BrokenCheckpoint: Blocks have no scales, or do not fit them.
        """
        super().__init__(files)
        self._blocks: dict[str, tuple[FileRange, FileRange, tuple[int, ...]]] = {}
        for name in [name for name in self._ranges if name.endswith("_blocks")]:
            weight = name.removesuffix("_blocks")
            blocks, kind, shape = self._ranges.pop(name)
            scales, *of_scales = self._ranges.pop(f"{weight}_scales", (blocks, "", ()))
            if (kind, *of_scales) != ("U8", "U8", shape[:-1]) or shape[3:] != (_GROUP // 2,):
                raise BrokenCheckpoint(
                    f"{blocks.path}: {name} of shape {shape} needs {weight}_scales of shape "
                    f"{shape[:-1]}, both of bytes"
                )
            self._blocks[weight] = blocks, scales, shape

    @cached_property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shapes of all weights by name, as models have them: inputs before outputs."""
        shapes = {name: shape for name, (_, _, shape) in self._ranges.items()}
        for name, (_, _, (experts, outputs, groups, _)) in self._blocks.items():
            shapes[name] = experts, groups * _GROUP, outputs
        return shapes

    @property
    def num_bytes(self) -> int:
        """Bytes of all weights in the files."""
        parts = [part for blocks, scales, _ in self._blocks.values() for part in (blocks, scales)]
        return super().num_bytes + sum(part.num_bytes for part in parts)

    @property
    def kinds(self) -> Mapping[str, str]:
        """Formats of the quantized weights, which are all experts."""
        return dict.fromkeys(self._blocks, "MXFP4")

    def are_equal(self, names: Sequence[str]) -> bool:
        """Return whether several weights are the same bytes in the files."""
        return not any(name in self._blocks for name in names) and super().are_equal(names)

    def plain(self, name: str, dtype: torch.dtype, num_rows: int | None = None) -> Tensor:
        """Return a weight, or its first rows; of experts, as many whole ones."""
        if name not in self._blocks:
            return super().plain(name, dtype, num_rows)
        shape = self.shapes[name]
        numbers = torch.empty((num_rows or shape[0], *shape[1:]), dtype=dtype)
        table = torch.tensor(TABLES["mxfp4"], dtype=torch.float32)[list(_PLACES)] / 2
        for expert in range(len(numbers)):
            rows = torch.from_numpy(self._rows(name, expert, 0, 1, 0, shape[2]))
            blocks = rows.view(shape[2], -1, 1 + _GROUP // 2)
            nibbles = torch.stack((blocks[..., 1:] & 15, blocks[..., 1:] >> 4), -1).flatten(2)
            exponents = blocks[..., :1].int() - 127
            numbers[expert] = torch.ldexp(table[nibbles.int()], exponents).flatten(1).T
        return numbers

    def experts(self, name: str) -> list[BlockRows]:
        """Return a weight of experts: of each, gates and ups or what leads back."""
        _, width, outputs = self.shapes[name]
        num_parts = 2 if name.endswith(_INTERLEAVED) else 1
        return [
            BlockRows(
                MXFP4_PAIRS,
                outputs // num_parts,
                width,
                partial(self._rows, name, expert, part, num_parts),
            )
            for expert in range(self.shapes[name][0])
            for part in range(num_parts)
        ]

    def _rows(
        self, name: str, expert: int, part: int, num_parts: int, first: int, last: int
    ) -> NDArray[np.uint8]:
        """Read rows of an expert's part: before the bytes of each block, its scale."""
        blocks, scales, (_, outputs, groups, size) = self._blocks[name]
        begin, count = expert * outputs + first * num_parts, (last - first) * num_parts
        rows = np.empty((last - first, groups, 1 + size), np.uint8)
        for where, width, to in ((scales, 1, rows[..., :1]), (blocks, size, rows[..., 1:])):
            content = where.read(begin * groups * width, count * groups * width)
            self.on_read(content.nbytes // num_parts)
            to[...] = content.reshape(-1, num_parts, groups, width)[:, part]
        return rows.reshape(last - first, -1)
