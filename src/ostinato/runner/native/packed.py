"""A weight in the order in which the native library multiplies with it.

A plain weight has its outputs one after the other; the kernels want many outputs of one input side
by side. So a weight is packed once, into the tiles of ``native/src/weight_tiles.h``, and the plain
one is dropped: the memory is the same. One order serves every instruction set.

Several linear layers that read one input share a packed weight, and one product computes them::

    q_proj ┐  rows 0 .. 2047
    k_proj ├─ rows 2048 .. 3071
    v_proj ┘  rows 3072 .. 4095

A row's product is the same, to the bit, alone and in a batch of any size.
"""

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from ostinato.runner.huge_pages import expect_block, into_huge_pages
from ostinato.runner.native.ctypes_api import DTYPES
from ostinato.runner.native.library import library

INPUT_STEP = 32
"""Rows that are multiplied are read up to a multiple of so many numbers."""

_CROWDED = 1024
"""Rows so many numbers apart, or a multiple of that, share few sets of the processor's caches."""

_LINE = 32
"""Numbers by which they are moved apart."""


def padded_width(num_columns: int) -> int:
    """Return how many numbers of a row a product reads."""
    return -(-num_columns // INPUT_STEP) * INPUT_STEP


def row_stride(width: int) -> int:
    """Return how far apart rows of some numbers should be: room for a product to read them."""
    padded = padded_width(width)
    return padded if padded % _CROWDED else padded + _LINE


def packed_size(num_rows: int, num_columns: int) -> int:
    """Return the numbers of a packed weight, with those that only fill tiles up."""
    native = library()
    assert native is not None, "weights are packed where the native library is"
    return int(native.ost_packed_size(num_rows, num_columns))


def allocate_tiles(size: int, dtype: torch.dtype) -> Tensor:
    """Return that many zeros, in large pages where they fill some."""
    expect_block(size * dtype.itemsize)
    tiles = torch.zeros(size, dtype=dtype)
    into_huge_pages(tiles.data_ptr(), tiles.nbytes)
    return tiles


class Matrix(ctypes.Structure):
    """``ost_matrix``: where rows begin, and how far apart they are."""

    _fields_ = (("data", ctypes.c_void_p), ("stride", ctypes.c_int64))

    @classmethod
    def of(cls, tensor: Tensor) -> "Matrix":
        """Describe a tensor of two dimensions whose rows' numbers are side by side."""
        return cls(tensor.data_ptr(), tensor.stride(0))


class Packing(ctypes.Structure):
    """``ost_packing``: rows of a weight and their place in a packed one."""

    _fields_ = (
        ("tiles", ctypes.c_void_p),
        ("rows", Matrix),
        ("first_output", ctypes.c_int64),
        ("num_rows", ctypes.c_int64),
        ("num_inputs", ctypes.c_int32),
        ("dtype", ctypes.c_int32),
        ("num_threads", ctypes.c_int32),
    )


class Product(ctypes.Structure):
    """``ost_product``: multiply rows with a packed weight; see ``PackedWeight.record``."""

    _fields_ = (
        ("inputs", Matrix),
        ("outputs", Matrix),
        ("tiles", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("num_rows", ctypes.c_int32),
        ("num_inputs", ctypes.c_int32),
        ("num_outputs", ctypes.c_int32),
        ("dtype", ctypes.c_int32),
        ("num_threads", ctypes.c_int32),
        ("weight_format", ctypes.c_int32),
        ("scales", ctypes.c_void_p),
        ("minima", ctypes.c_void_p),
        ("zeros", ctypes.c_void_p),
        ("order", ctypes.c_void_p),
        ("scale_dtype", ctypes.c_int32),
        ("group_size", ctypes.c_int32),
        ("used_inputs", ctypes.c_int32),
        ("activation_bits", ctypes.c_int32),
    )


class PackedWeight:
    """A weight of shape (num_rows, num_columns) in tiles.

    Attributes:
        num_rows: Outputs.
        num_columns: Inputs.
        dtype: Format of the weight, of what it is multiplied with and of products.
    """

    def __init__(self, parts: Sequence[Tensor], tiles: Tensor | None = None) -> None:
        """Pack weights that read one input, the rows of each below those of the one before.

        Args:
            parts: Each of shape (its rows, num_columns), of a dtype of the native library.
            tiles: Where to, zero, of ``packed_size`` numbers; None allocates it.
        """
        native = library()
        assert native is not None, "weights are packed where the native library is"
        self._native = native
        self.num_rows = sum(part.shape[0] for part in parts)
        self.num_columns = parts[0].shape[1]
        self.dtype = parts[0].dtype
        size = packed_size(self.num_rows, self.num_columns)
        self._tiles = allocate_tiles(size, self.dtype) if tiles is None else tiles
        assert self._tiles.shape == (size,) and self._tiles.dtype == self.dtype, size
        first = 0
        for part in parts:
            self.replace(first, part.detach())
            first += part.shape[0]

    @property
    def nbytes(self) -> int:
        """Bytes of memory."""
        return self._tiles.nbytes

    @property
    def address(self) -> int:
        """Where its tiles are."""
        return self._tiles.data_ptr()

    def multiply(self, rows: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return ``rows @ weight.T + bias``, a fresh tensor; between its rows there may be gaps.

        Args:
            rows: Shape (num_tokens, num_columns).
            bias: Shape (num_rows,).

        Returns:
            Shape (num_tokens, num_rows); sums are in float32.
        """
        num_tokens = rows.shape[0]
        width = padded_width(self.num_columns)
        if width != self.num_columns:
            rows = functional.pad(rows, (0, width - self.num_columns))[:, : self.num_columns]
        elif rows.stride(1) != 1:
            rows = rows.contiguous()
        outputs = rows.new_empty(num_tokens, row_stride(self.num_rows))[:, : self.num_rows]
        bias = None if bias is None else bias.contiguous()
        if num_tokens:
            self._native.ost_ops_product(ctypes.byref(self.record(rows, bias, outputs)))
        return outputs

    def record(self, rows: Tensor, bias: Tensor | None, outputs: Tensor) -> Product:
        """Check and describe a product, which points into the tensors and into this weight.

        Args:
            rows: Shape (num_rows, num_columns), each row's numbers side by side, and behind them,
                up to a multiple of ``INPUT_STEP``, any finite numbers.
            bias: Shape (num_rows,), contiguous.
            outputs: Gets the product, shape (num_rows, num_rows); like ``rows``, but without
                numbers behind a row.
        """
        num_rows, width = rows.shape[0], padded_width(self.num_columns)
        assert rows.shape == (num_rows, self.num_columns), rows.shape
        assert outputs.shape == (num_rows, self.num_rows), outputs.shape
        for tensor in (rows, outputs):
            assert tensor.dtype == self.dtype and tensor.device.type == "cpu", tensor.dtype
            assert tensor.stride(1) == 1, "rows side by side"
        last = rows.storage_offset() + (num_rows - 1) * rows.stride(0) + width
        assert last * rows.itemsize <= rows.untyped_storage().nbytes(), "a row's end is read"
        if bias is not None:
            assert bias.shape == (self.num_rows,) and bias.dtype == self.dtype, bias.shape
            assert bias.is_contiguous() and bias.device.type == "cpu", "a plain vector"
        return Product(
            Matrix.of(rows),
            Matrix.of(outputs),
            self._tiles.data_ptr(),
            None if bias is None else bias.data_ptr(),
            num_rows,
            width,
            self.num_rows,
            DTYPES[self.dtype],
            torch.get_num_threads(),
        )

    def plain(self, first: int = 0, last: int | None = None) -> Tensor:
        """Return a fresh copy of some rows as ``nn.Linear`` holds them; all by default."""
        num_rows = (self.num_rows if last is None else last) - first
        rows = torch.empty(num_rows, self.num_columns, dtype=self.dtype)
        self._native.ost_unpack(ctypes.byref(self._packing(first, rows)))
        return rows

    def replace(self, first: int, rows: Tensor) -> None:
        """Put other numbers into some rows, from ``first`` on.

        Effects: overwrites the tiles in place, since programs point to them.
        """
        rows = rows.to(self.dtype).contiguous()
        self._native.ost_pack(ctypes.byref(self._packing(first, rows)))

    def _packing(self, first: int, rows: Tensor) -> Packing:
        num_rows = rows.shape[0]
        assert rows.shape == (num_rows, self.num_columns) and rows.device.type == "cpu", rows.shape
        assert 0 <= first <= first + num_rows <= self.num_rows, (first, num_rows)
        return Packing(
            self._tiles.data_ptr(),
            Matrix.of(rows),
            first,
            num_rows,
            self.num_columns,
            DTYPES[self.dtype],
            torch.get_num_threads(),
        )
