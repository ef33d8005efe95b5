"""A weight in the memory layout that the native library multiplies with.

A plain weight is stored output by output; the kernels read one input of many outputs at a time. So
a weight is packed once, into the tiles of ``native/src/weights/tiles.h``, and the plain one is
freed: the memory is the same. All instruction sets use one layout
of plain weights.

Linear layers with the same input share a packed weight, and one product computes them::

    q_proj ┐  rows 0 .. 2047
    k_proj ├─ rows 2048 .. 3071
    v_proj ┘  rows 3072 .. 4095

A row's product has the same bits alone and in a batch of any size.
"""

import ctypes
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from ostinato.runner.huge_pages import zeros
from ostinato.runner.native.ctypes_api import DTYPES, int32s, int64s, pointers
from ostinato.runner.native.library import library

INPUT_STEP = 32
"""Rows of inputs are read up to a multiple of this many numbers."""

_CACHE_ALIAS = 1024
"""Rows at a multiple of this stride, in numbers, compete for few sets of the processor's caches."""

_CACHE_OFFSET = 32
"""Numbers added to such a stride."""


def padded_width(num_columns: int) -> int:
    """Return how many numbers of a row a product reads."""
    return -(-num_columns // INPUT_STEP) * INPUT_STEP


def row_stride(width: int) -> int:
    """Return the stride at which to store rows that products read, in numbers."""
    padded = padded_width(width)
    return padded if padded % _CACHE_ALIAS else padded + _CACHE_OFFSET


def packed_size(num_rows: int, num_columns: int) -> int:
    """Return how many numbers a packed weight has, padding of tiles included."""
    return int(required_library().ost_packed_size(num_rows, num_columns))


def required_library() -> ctypes.CDLL:
    """Return the native library, without which no weight is packed."""
    native = library()
    assert native is not None, "weights are packed only where the native library is"
    return native


class Matrix(ctypes.Structure):
    """``ost_matrix``: the address of the first row, and the stride of rows."""

    _fields_ = (*pointers("data"), *int64s("stride"))

    @classmethod
    def of(cls, tensor: Tensor) -> "Matrix":
        """Describe a tensor of two dimensions with contiguous rows."""
        return cls(tensor.data_ptr(), tensor.stride(0))


class Packing(ctypes.Structure):
    """``ost_packing``: rows of a weight and their place in a packed one."""

    _fields_ = (
        *pointers("tiles"),
        ("rows", Matrix),
        *int64s("first_output", "num_rows"),
        *int32s("num_inputs", "dtype", "num_threads"),
    )


class Product(ctypes.Structure):
    """``ost_product``: multiply rows with a packed weight; see ``PackedWeight.record``."""

    _fields_ = (
        ("inputs", Matrix),
        ("outputs", Matrix),
        *pointers("tiles", "bias"),
        *int32s("num_rows", "num_inputs", "num_outputs", "dtype", "num_threads", "weight_format"),
        *pointers("scales", "minima", "zeros", "order"),
        *int32s("scale_dtype", "group_size", "used_inputs", "activation_bits", "activation_group"),
    )


class PackedWeight:
    """A weight of shape (num_rows, num_columns) in tiles.

    Attributes:
        num_rows: Outputs.
        num_columns: Inputs.
        dtype: Format of the weight, the inputs and the products.
    """

    def __init__(self, parts: Sequence[Tensor], tiles: Tensor | None = None) -> None:
        """Pack weights with the same input below each other.

        Args:
            parts: Each of shape (its rows, num_columns), of a dtype of the native library.
            tiles: Memory to pack into, ``packed_size`` zeros; None allocates it.
        """
        self._native = required_library()
        self.num_rows = sum(part.shape[0] for part in parts)
        self.num_columns = parts[0].shape[1]
        self.dtype = parts[0].dtype
        size = packed_size(self.num_rows, self.num_columns)
        self._tiles = zeros((size,), self.dtype) if tiles is None else tiles
        assert self._tiles.shape == (size,) and self._tiles.dtype == self.dtype, size
        first = 0
        for part in parts:
            self.replace(first, part.detach())
            first += part.shape[0]

    @classmethod
    def of_memory(
        cls, num_rows: int, num_columns: int, dtype: torch.dtype, memory: Mapping[str, Tensor]
    ) -> "PackedWeight":
        """Return a weight that was packed before; see ``memory``."""
        weight = cls.__new__(cls)
        weight._native = required_library()
        weight.num_rows, weight.num_columns, weight.dtype = num_rows, num_columns, dtype
        weight.use_memory(memory)
        return weight

    def memory(self) -> dict[str, Tensor]:
        """Return everything that the weight consists of, by name; not copied."""
        return {"tiles": self._tiles}

    def use_memory(self, memory: Mapping[str, Tensor]) -> None:
        """Keep the same numbers in other memory, before any program points to the weight."""
        tiles, size = memory["tiles"], packed_size(self.num_rows, self.num_columns)
        assert tiles.shape == (size,) and tiles.dtype == self.dtype, (tiles.shape, size)
        self._tiles = tiles

    @property
    def nbytes(self) -> int:
        """Bytes of memory."""
        return self._tiles.nbytes

    @property
    def address(self) -> int:
        """Address of the tiles."""
        return self._tiles.data_ptr()

    def multiply(self, rows: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return ``rows @ weight.T + bias``, a new tensor whose rows may have gaps between them.

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
            rows: Shape (num_tokens, num_columns), contiguous rows, each followed by finite numbers
                up to a multiple of ``INPUT_STEP``.
            bias: Shape (num_rows,), contiguous.
            outputs: Gets the product, shape (num_tokens, num_rows), contiguous rows.
        """
        num_rows, width = rows.shape[0], padded_width(self.num_columns)
        assert rows.shape == (num_rows, self.num_columns), rows.shape
        assert outputs.shape == (num_rows, self.num_rows), outputs.shape
        for tensor in (rows, outputs):
            assert tensor.dtype == self.dtype and tensor.device.type == "cpu", tensor.dtype
            assert tensor.stride(1) == 1, "contiguous rows"
        last = rows.storage_offset() + (num_rows - 1) * rows.stride(0) + width
        assert last * rows.itemsize <= rows.untyped_storage().nbytes(), "a row's end is read"
        if bias is not None:
            assert bias.shape == (self.num_rows,) and bias.dtype == self.dtype, bias.shape
            assert bias.is_contiguous() and bias.device.type == "cpu", "a contiguous vector"
        product = self.template(bias)
        product.inputs, product.outputs = Matrix.of(rows), Matrix.of(outputs)
        product.num_rows = num_rows
        return product

    def template(self, bias: Tensor | None) -> Product:
        """Describe a product of no rows; for several of one weight, see ``record``."""
        return Product(
            tiles=self._tiles.data_ptr(),
            bias=None if bias is None else bias.data_ptr(),
            num_inputs=padded_width(self.num_columns),
            num_outputs=self.num_rows,
            dtype=DTYPES[self.dtype],
            num_threads=torch.get_num_threads(),
        )

    def plain(self, first: int = 0, last: int | None = None) -> Tensor:
        """Return a copy of some rows in the layout of ``nn.Linear``; all by default."""
        num_rows = (self.num_rows if last is None else last) - first
        rows = torch.empty(num_rows, self.num_columns, dtype=self.dtype)
        self._native.ost_unpack(ctypes.byref(self._packing(first, rows)))
        return rows

    def replace(self, first: int, rows: Tensor) -> None:
        """Replace some rows, from ``first`` on.

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
