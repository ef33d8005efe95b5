"""Packs rows of blocks, numbers or codes as the tiles of a quantized weight, on all threads.

Rows are read where they are. Their bounds are checked here, since the library trusts its arguments:
see ``ost_pack_codes`` in ``native/include/ostinato_ops.h``.
"""

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import gguf
import torch
from torch import Tensor

from ostinato.runner.native.ctypes_api import DTYPES, int32s, int64s, pointers
from ostinato.runner.native.library import current_isa
from ostinato.runner.native.packed import padded_width, required_library
from ostinato.runner.native.scale_tiles import (
    MIN_GROUP,
    SUPER_INPUTS,
    SUPERBLOCKS,
    TILE_OUTPUTS,
    is_group_size,
    scale_format,
    scales_shape,
)

TableName = Literal["", "mxfp4", "iq4"]
"""A table in which codes of 4 bits are places, see ``codes.TABLES``; empty if codes are numbers."""

_FORMATS: Mapping[tuple[int, TableName], int] = {
    (8, ""): 1,
    (4, ""): 2,
    (4, "mxfp4"): 5,
    (4, "iq4"): 6,
}
_IN_BLOCKS = 2  # added to a format

_CODES, _NUMBERS = 0, 1


@dataclass(frozen=True, slots=True)
class BlockKind:
    """How blocks of a GGUF file are packed.

    Attributes:
        number: ``ost_row_kind``.
        bits: 8 or 4.
        has_minima: Whether groups have a minimum.
        scale_dtype: Dtype in which scales and minima are exact, or ``SUPERBLOCKS``.
        group_size: Inputs of a group.
        table: The table in which codes are places.
        block: Inputs and bytes of a block that is none of a GGUF file.
    """

    number: int
    bits: Literal[4, 8]
    has_minima: bool
    scale_dtype: torch.dtype = SUPERBLOCKS
    group_size: int = 32
    table: TableName = ""
    block: tuple[int, int] | None = None

    @property
    def bits_per_weight(self) -> float:
        """Bits that a weight takes when it is packed, with its share of scales and minima."""
        num_kinds = 1 + self.has_minima
        if self.scale_dtype is SUPERBLOCKS:  # a byte for a group, and a factor for all of them
            return self.bits + num_kinds * (8 / self.group_size + 16 / SUPER_INPUTS)
        return self.bits + num_kinds * 8 * self.scale_dtype.itemsize / self.group_size

    def represents(self, tiles: "CodeTiles") -> bool:
        """Return whether a weight takes the blocks' codes without loss."""
        return tiles.bits == 8 or (tiles.bits, tiles.table) == (self.bits, self.table)


MXFP4_PAIRS = "MXFP4 in pairs"
"""Blocks of MXFP4 whose bytes have neighbouring inputs: those of gpt-oss, each behind its scale."""

BLOCK_KINDS: Mapping[str, BlockKind] = {
    "Q4_0": BlockKind(2, 4, False, torch.float16),
    "Q4_1": BlockKind(3, 4, True, torch.float16),
    "Q5_0": BlockKind(4, 8, False, torch.float16),
    "Q5_1": BlockKind(5, 8, True, torch.float16),
    "Q8_0": BlockKind(6, 8, False, torch.float16),
    "Q4_K": BlockKind(7, 4, True),
    "Q5_K": BlockKind(8, 8, True),
    "Q6_K": BlockKind(9, 8, False, group_size=MIN_GROUP),
    "Q2_K": BlockKind(10, 4, True, group_size=MIN_GROUP),
    "Q3_K": BlockKind(11, 4, False, group_size=MIN_GROUP),
    "IQ4_NL": BlockKind(12, 4, False, torch.float16, table="iq4"),
    "IQ4_XS": BlockKind(13, 4, False, table="iq4"),
    "MXFP4": BlockKind(14, 4, False, torch.bfloat16, table="mxfp4"),
    MXFP4_PAIRS: BlockKind(15, 4, False, torch.bfloat16, table="mxfp4", block=(32, 17)),
}
"""Formats that the library packs, all without loss."""


def packs_blocks() -> bool:
    """Return whether codes are best packed in blocks, for the instruction set in use."""
    return current_isa(required_library()).multiplies_blocks


def weight_format(bits: int, is_in_blocks: bool, table: TableName = "") -> int:
    """Return the ``ost_weight_format`` of codes."""
    return _FORMATS[bits, table] + _IN_BLOCKS * is_in_blocks


class CodePacking(ctypes.Structure):
    """``ost_code_packing``."""

    _fields_ = (
        *pointers("tiles", "scales", "minima", "rows", "order"),
        *int64s("row_bytes", "first_output", "num_rows"),
        *int32s("num_inputs", "row_kind", "dtype", "weight_format", "scale_dtype"),
        *int32s("group_size", "padding", "num_threads"),
    )


@dataclass(frozen=True, slots=True, eq=False)
class CodeTiles:
    """Memory of a quantized weight.

    Attributes:
        num_rows: Outputs.
        num_columns: Inputs.
        bits: 8 or 4.
        group_size: Inputs of a group.
        is_in_blocks: Whether codes are in blocks; else in pairs.
        padding: The code of inputs that only fill up the last step.
        tiles: Codes, shape (num_tiles, bytes of a tile).
        scales: See ``scale_tiles``.
        minima: Likewise, or None.
        table: The table in which codes are places; empty if they are numbers.
    """

    num_rows: int
    num_columns: int
    bits: int
    group_size: int
    is_in_blocks: bool
    padding: int
    tiles: Tensor
    scales: Tensor
    minima: Tensor | None
    table: TableName = ""

    def put_codes(self, first: int, codes: Tensor) -> None:
        """Pack codes without their scales, bytes of shape (num_rows, num_columns)."""
        assert codes.itemsize == 1 and codes.shape[1] == self.num_columns, codes.shape
        self._pack(first, codes, _CODES, torch.float32)

    def put_numbers(self, first: int, numbers: Tensor) -> None:
        """Pack the nearest codes of numbers, shape (num_rows, num_columns), and their scales."""
        assert numbers.shape[1] == self.num_columns, numbers.shape
        assert self.bits == 8 or self.minima is not None, "of 4 bits, with minima"
        assert self.scales.dtype == torch.bfloat16, "scales are rounded to bfloat16"
        self._pack(first, numbers, _NUMBERS, numbers.dtype)

    def put_blocks(
        self, first: int, blocks: Tensor, kind: str, order: Tensor | None = None
    ) -> None:
        """Pack blocks of a GGUF file, codes and scales.

        Args:
            first: The output that the first row becomes.
            blocks: Bytes, shape (num_rows, bytes of a row).
            kind: One of ``BLOCK_KINDS``.
            order: Which row each output is, int64; None if they are in order.
        """
        known = BLOCK_KINDS[kind]
        numbers, size = known.block or gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
        assert blocks.dtype == torch.uint8 and self.num_columns % numbers == 0, kind
        assert blocks.shape[1] == self.num_columns // numbers * size, blocks.shape
        assert known.represents(self) and self.group_size in (MIN_GROUP, known.group_size), kind
        assert self.scales.dtype in (SUPERBLOCKS, torch.float32, known.scale_dtype), kind
        assert self.minima is not None or not known.has_minima, kind
        if order is not None:
            assert order.dtype == torch.int64 and order.shape == (len(blocks),), order.shape
            assert int(order.min()) >= 0 and int(order.max()) < len(blocks), "rows of the blocks"
            order = order.contiguous()
        self._pack(first, blocks, known.number, torch.float32, order)

    def check(self) -> None:
        """Check that shapes and dtypes fit each other; an error is a bug of this package."""
        num_tiles = -(-self.num_rows // TILE_OUTPUTS)
        tile_bytes = TILE_OUTPUTS * padded_width(self.num_columns) * self.bits // 8
        assert self.tiles.shape == (num_tiles, tile_bytes), self.tiles.shape
        num_groups, dtype = -(-self.num_columns // self.group_size), self.scales.dtype
        assert is_group_size(self.group_size), self.group_size
        shape = scales_shape(num_tiles, num_groups, self.group_size, dtype)
        for of_groups in (self.scales, self.minima):
            assert of_groups is None or of_groups.shape == shape, shape
            assert of_groups is None or of_groups.dtype == dtype, "one dtype"
        assert self.tiles.is_contiguous() and self.scales.is_contiguous(), "tiles side by side"

    def _pack(
        self, first: int, rows: Tensor, kind: int, dtype: torch.dtype, order: Tensor | None = None
    ) -> None:
        rows = rows.detach() if rows.stride(1) == 1 else rows.detach().contiguous()
        assert 0 <= first <= first + len(rows) <= self.num_rows, (first, len(rows))
        assert rows.device.type == "cpu" and dtype in DTYPES, (rows.device, dtype)
        self.check()
        has_scales = kind != _CODES
        record = CodePacking(
            self.tiles.data_ptr(),
            self.scales.data_ptr() if has_scales else None,
            self.minima.data_ptr() if has_scales and self.minima is not None else None,
            rows.data_ptr(),
            None if order is None else order.data_ptr(),
            rows.stride(0) * rows.itemsize,
            first,
            len(rows),
            self.num_columns,
            kind,
            DTYPES[dtype],
            weight_format(self.bits, self.is_in_blocks, self.table),
            scale_format(self.scales),
            self.group_size,
            self.padding,
            torch.get_num_threads(),
        )
        required_library().ost_pack_codes(ctypes.byref(record))
