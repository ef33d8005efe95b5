"""The operations between the products of a layer, and C structures for their arguments.

``native/include/ostinato_ops.h`` is the other side. C++ checks nothing, so everything is checked
here, when a record is made. A record points into tensors, which the caller keeps alive.
"""

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

from ostinato.runner.native.ctypes_api import floats, int32s, int64s, pointers
from ostinato.runner.native.packed import Matrix

DTYPES = {torch.float32: 0, torch.bfloat16: 1}
"""Formats that the operations support, and their numbers in ``ost_dtype``."""


@dataclass(frozen=True, slots=True)
class Norm:
    """An RMSNorm (Zhang and Sennrich, arXiv 1910.07467).

    Attributes:
        weight: Shape (width,).
        epsilon: Added to the mean of squares.
    """

    weight: Tensor
    epsilon: float


@dataclass(frozen=True, slots=True)
class HeadShape:
    """How a row of projected numbers is split into heads.

    Attributes:
        num_heads: Heads of queries.
        num_kv_heads: Heads of keys, and of values.
        dim: Numbers of a head, even.
        query_norm: Norm of each query head; None is none.
        key_norm: Norm of each key head; given exactly if ``query_norm`` is.
    """

    num_heads: int
    num_kv_heads: int
    dim: int
    query_norm: Norm | None
    key_norm: Norm | None

    @property
    def num_projected(self) -> int:
        """Numbers of a projected row."""
        return (self.num_heads + 2 * self.num_kv_heads) * self.dim


@dataclass(frozen=True, slots=True)
class Heads:
    """The heads of a step, one row per token.

    Attributes:
        queries: Shape (num_tokens, num_heads * dim).
        keys: Shape (num_tokens, num_kv_heads * dim).
        values: Likewise.
    """

    queries: Tensor
    keys: Tensor
    values: Tensor

    def rows(self, first: int, last: int) -> "Heads":
        """Return a view of some rows."""
        return Heads(self.queries[first:last], self.keys[first:last], self.values[first:last])


@dataclass(frozen=True, slots=True)
class RopeAngles:
    """The angles of a step's positions (RoPE; Su et al., arXiv 2104.09864).

    Attributes:
        cosines: Shape (num_tokens, dim), the dtype of the queries.
        sines: Likewise.
    """

    cosines: Tensor
    sines: Tensor

    def rows(self, first: int, last: int) -> "RopeAngles":
        """Return a view of some rows."""
        return RopeAngles(self.cosines[first:last], self.sines[first:last])


class AddNorm(ctypes.Structure):
    """``ost_add_norm``: add to the residual stream, and norm it."""

    _fields_ = (
        *((name, Matrix) for name in ("residual", "addend", "output")),
        *pointers("weight"),
        *int64s("num_rows"),
        *int32s("width", "dtype"),
        *floats("epsilon"),
        *int32s("num_threads"),
    )

    @classmethod
    def of(cls, residual: Tensor, addend: Tensor | None, norm: Norm, output: Tensor) -> "AddNorm":
        """Check and describe.

        Args:
            residual: Shape (num_rows, width); overwritten with the sum if there is an addend.
            addend: What is added to it first, of that shape; None adds nothing.
            norm: A norm of that width.
            output: Gets the normed rows; of that shape.
        """
        num_rows, width = residual.shape
        _check(residual, output, *([] if addend is None else [addend]), shape=(num_rows, width))
        return cls(
            Matrix.of(residual),
            Matrix() if addend is None else Matrix.of(addend),
            Matrix.of(output),
            _weight(norm, residual, width),
            num_rows,
            width,
            DTYPES[residual.dtype],
            norm.epsilon,
            torch.get_num_threads(),
        )


class SplitHeads(ctypes.Structure):
    """``ost_heads``: split projected rows into heads, norm queries and keys, and apply RoPE."""

    _fields_ = (
        *((name, Matrix) for name in ("projected", "queries", "keys", "values")),
        *((name, Matrix) for name in ("cosines", "sines")),
        *pointers("query_weight", "key_weight"),
        *int64s("num_rows"),
        *int32s("num_heads", "num_kv_heads", "head_dim", "dtype"),
        *floats("epsilon"),
        *int32s("num_threads"),
    )

    @classmethod
    def of(
        cls, projected: Tensor, shape: HeadShape, angles: RopeAngles, heads: Heads
    ) -> "SplitHeads":
        """Check and describe.

        Args:
            projected: Queries, keys and values of each row, shape (num_rows, num_projected).
            shape: How they are split.
            angles: Angles of these rows.
            heads: Gets them; ``num_rows`` rows each.
        """
        num_rows, dim = projected.shape[0], shape.dim
        _check(projected, shape=(num_rows, shape.num_projected))
        _check(heads.queries, shape=(num_rows, shape.num_heads * dim))
        _check(heads.keys, heads.values, shape=(num_rows, shape.num_kv_heads * dim))
        _check(angles.cosines, angles.sines, shape=(num_rows, dim))
        assert dim % 2 == 0 and projected.dtype == angles.cosines.dtype == heads.queries.dtype
        assert heads.keys.dtype == heads.values.dtype == angles.sines.dtype == projected.dtype
        assert (shape.query_norm is None) == (shape.key_norm is None), "both or none"
        return cls(
            *map(Matrix.of, (projected, heads.queries, heads.keys, heads.values)),
            *map(Matrix.of, (angles.cosines, angles.sines)),
            _weight(shape.query_norm, projected, dim),
            _weight(shape.key_norm, projected, dim),
            num_rows,
            shape.num_heads,
            shape.num_kv_heads,
            dim,
            DTYPES[projected.dtype],
            0.0 if shape.query_norm is None else shape.query_norm.epsilon,
            torch.get_num_threads(),
        )


class Gated(ctypes.Structure):
    """``ost_gated``: multiply ``silu(gate)`` with ``up`` (SwiGLU; Shazeer, arXiv 2002.05202)."""

    _fields_ = (
        *((name, Matrix) for name in ("gate_up", "output")),
        *int64s("num_rows"),
        *int32s("width", "dtype", "num_threads"),
    )

    @classmethod
    def of(cls, gate_up: Tensor, output: Tensor) -> "Gated":
        """Check and describe.

        Args:
            gate_up: Gates, and ups beside them, shape (num_rows, 2 * width).
            output: Gets the product, shape (num_rows, width).
        """
        num_rows, width = output.shape
        _check(gate_up, shape=(num_rows, 2 * width))
        _check(output, shape=(num_rows, width))
        assert gate_up.dtype == output.dtype, "one dtype"
        matrices = Matrix.of(gate_up), Matrix.of(output)
        return cls(*matrices, num_rows, width, DTYPES[output.dtype], torch.get_num_threads())


class NativeOps:
    """Calls the operations one by one; arguments as in the ``of`` of their records.

    Attributes:
        library: The native library.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        """Use the operations of the library."""
        self.library = library

    def add_norm(self, residual: Tensor, addend: Tensor | None, norm: Norm, output: Tensor) -> None:
        """Add to the residual stream, and norm it."""
        record = AddNorm.of(residual, addend, norm, output)
        self.library.ost_ops_add_norm(ctypes.byref(record))

    def heads(self, projected: Tensor, shape: HeadShape, angles: RopeAngles, heads: Heads) -> None:
        """Split projected rows into heads, norm queries and keys, and apply RoPE."""
        record = SplitHeads.of(projected, shape, angles, heads)
        self.library.ost_ops_heads(ctypes.byref(record))

    def gated(self, gate_up: Tensor, output: Tensor) -> None:
        """Multiply ``silu(gate)`` with ``up``."""
        self.library.ost_ops_gated(ctypes.byref(Gated.of(gate_up, output)))


def _check(*tensors: Tensor, shape: tuple[int, int]) -> None:
    """Assert what C++ does not check."""
    for tensor in tensors:
        assert tensor.shape == shape and tensor.dtype == tensors[0].dtype, (tensor.shape, shape)
        assert tensor.stride(1) == 1 and tensor.device.type == "cpu", "contiguous rows, on a CPU"


def _weight(norm: Norm | None, like: Tensor, width: int) -> int | None:
    """Return the address of a norm's weight."""
    if norm is None:
        return None
    weight = norm.weight
    assert weight.shape == (width,) and weight.dtype == like.dtype, (weight.shape, weight.dtype)
    assert weight.is_contiguous() and weight.device.type == "cpu", "a contiguous vector on a CPU"
    return weight.data_ptr()
