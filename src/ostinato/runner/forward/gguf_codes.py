"""Blocks of a GGUF file as codes of ours.

A block has codes of some bits with a scale, and often a minimum, for 16 or 32 inputs. So most
formats become codes without any loss, and without a dequantized weight::

    Q4_0, Q4_1, Q2_K, Q3_K, Q4_K             4 bits; with minima where the file has them
    MXFP4, IQ4_NL, IQ4_XS                    4 bits, places in a table
    Q5_0, Q5_1, Q8_0, Q5_K, Q6_K             8 bits; with minima likewise
    others                                   8 bits in groups of 32 inputs, the nearest

Scales of K blocks stay as they are, a byte for a group and a factor for 256 inputs. The native
library makes codes of blocks, all but those of rare formats.

Source: the layouts are those of ``ggml-common.h`` in llama.cpp.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import gguf
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ostinato.runner.forward.codes import CodeFormat, Codes, encode
from ostinato.runner.native.code_packing import BLOCK_KINDS, CodeTiles
from ostinato.runner.native.scale_tiles import TILE_OUTPUTS

PLAIN_KINDS = {"F32", "F16", "BF16", "F64"}
NEAREST = CodeFormat(bits=8, group_size=32)
_SLICE_NUMBERS = 2**23

_PACKED_NUMBERS = 2**19
"""Numbers that are read and packed at once: their bytes stay in a core's cache meanwhile, and are
few enough that malloc returns the same memory for each read, see ``malloc_tuning``."""

Blocks = NDArray[np.uint8]
"""Shape (num_rows, bytes of a row)."""


@dataclass(frozen=True, slots=True, eq=False)
class BlockRows:
    """A weight in the blocks of a file, which are read when it is packed.

    Attributes:
        kind: Format of the blocks, none of ``PLAIN_KINDS``.
        num_rows: Outputs.
        num_columns: Inputs.
        read: Returns the blocks of some rows of the file, by the first and the one behind the last.
        order: The row of the file that each output is, int64; None if they are in order.
    """

    kind: str
    num_rows: int
    num_columns: int
    read: Callable[[int, int], Blocks]
    order: Tensor | None = None

    @property
    def is_packed_directly(self) -> bool:
        """Whether the library packs the blocks; others become numbers first."""
        return self.kind in BLOCK_KINDS

    @property
    def format(self) -> CodeFormat:
        """The format of the codes."""
        known = BLOCK_KINDS.get(self.kind)
        if known is None:
            return NEAREST
        return CodeFormat(known.bits, known.group_size, known.has_minima, table=known.table)

    @property
    def scale_dtype(self) -> torch.dtype:
        """A dtype in which scales and minima are exact, or ``SUPERBLOCKS``."""
        known = BLOCK_KINDS.get(self.kind)
        return torch.bfloat16 if known is None else known.scale_dtype

    def pack_into(self, memory: CodeTiles, first: int) -> None:
        """Read and pack, some rows at a time, on several threads.

        Args:
            memory: A weight whose format represents these codes.
            first: The output that the first row becomes.
        """
        step = self.num_rows
        if self.order is None:
            tile_numbers = TILE_OUTPUTS * self.num_columns
            step = max(1, _PACKED_NUMBERS // tile_numbers) * TILE_OUTPUTS

        def pack(begin: int, end: int) -> None:
            for row in range(begin, end, step):
                blocks = torch.from_numpy(self.read(row, min(row + step, end)))
                memory.put_blocks(first + row, blocks, self.kind, self.order)

        # Two threads may not write into one tile.
        _on_threads(pack, self.num_rows, step if first % TILE_OUTPUTS == 0 else self.num_rows)

    def as_codes(self, dtype: torch.dtype) -> Codes:
        """Read, and return the nearest codes of the numbers in a dtype."""
        kind = gguf.GGMLQuantizationType[self.kind]
        numbers = dequantized(self.read(0, self.num_rows), kind, dtype)
        return encode(numbers if self.order is None else numbers[self.order], NEAREST)


def dequantized(data: Blocks, kind: gguf.GGMLQuantizationType, dtype: torch.dtype) -> Tensor:
    """Return the numbers of rows, converted slice by slice on several threads."""
    num_numbers, num_bytes = gguf.GGML_QUANT_SIZES[kind]
    width = data.shape[1] // num_bytes * num_numbers
    numbers = torch.empty(len(data), width, dtype=dtype)
    step = max(1, _SLICE_NUMBERS // width)

    def convert(begin: int, end: int) -> None:
        for first in range(begin, end, step):
            rows = slice(first, min(first + step, end))
            part = gguf.dequantize(data[rows], kind)
            numbers[rows] = torch.from_numpy(np.ascontiguousarray(part))

    _on_threads(convert, len(data), 1)
    return numbers


def _on_threads(work: Callable[[int, int], object], end: int, unit: int) -> None:
    """Call ``work(first, last)`` on as many threads as torch has, each with one span of the range.

    Args:
        work: Begins and ends where it is told; what it raises is raised here.
        end: The range is from 0 to here.
        unit: Spans begin at multiples of it.
    """
    step = -(-end // (torch.get_num_threads() * unit)) * unit
    if step >= end:
        work(0, end)
        return
    with ThreadPoolExecutor() as threads:
        list(threads.map(lambda first: work(first, min(first + step, end)), range(0, end, step)))
