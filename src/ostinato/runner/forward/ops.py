"""How does Python call what lies between the products of a layer?

``native/include/ostinato_ops.h`` is the other side; the structures here are its structures. C++
checks nothing, so everything is checked here. A call costs some microseconds.
"""

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

DTYPES = {torch.float32: 0, torch.bfloat16: 1}
"""Formats that the operations know, and their numbers in ``ost_dtype``."""


class Matrix(ctypes.Structure):
    """``ost_matrix``: where rows begin, and how far apart they are."""

    _fields_ = (("data", ctypes.c_void_p), ("stride", ctypes.c_int64))

    @classmethod
    def of(cls, tensor: Tensor) -> "Matrix":
        """Describe a tensor of two dimensions whose rows' numbers are side by side."""
        return cls(tensor.data_ptr(), tensor.stride(0))


class _AddNorm(ctypes.Structure):
    _fields_ = (
        ("residual", Matrix),
        ("addend", Matrix),
        ("output", Matrix),
        ("weight", ctypes.c_void_p),
        ("num_rows", ctypes.c_int64),
        ("width", ctypes.c_int32),
        ("dtype", ctypes.c_int32),
        ("epsilon", ctypes.c_float),
        ("num_threads", ctypes.c_int32),
    )


class _Heads(ctypes.Structure):
    _fields_ = (
        ("projected", Matrix),
        ("queries", Matrix),
        ("keys", Matrix),
        ("values", Matrix),
        ("cosines", Matrix),
        ("sines", Matrix),
        ("query_weight", ctypes.c_void_p),
        ("key_weight", ctypes.c_void_p),
        ("num_rows", ctypes.c_int64),
        ("num_heads", ctypes.c_int32),
        ("num_kv_heads", ctypes.c_int32),
        ("head_dim", ctypes.c_int32),
        ("dtype", ctypes.c_int32),
        ("epsilon", ctypes.c_float),
        ("num_threads", ctypes.c_int32),
    )


class _Gated(ctypes.Structure):
    _fields_ = (
        ("gate_up", Matrix),
        ("output", Matrix),
        ("num_rows", ctypes.c_int64),
        ("width", ctypes.c_int32),
        ("dtype", ctypes.c_int32),
        ("num_threads", ctypes.c_int32),
    )


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
    """How a row of projected numbers is cut into heads.

    Attributes:
        num_heads: Heads of queries.
        num_kv_heads: Heads of keys, and of values.
        dim: Numbers of a head, even.
        query_norm: Norm of each query head; None is none.
        key_norm: Norm of each key head, there where ``query_norm`` is.
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
    """Where the heads of a step lie, one row per token.

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
class Turns:
    """The angles of a step's positions (RoPE; Su et al., arXiv 2104.09864).

    Attributes:
        cosines: Shape (num_tokens, dim), the dtype of the queries.
        sines: Likewise.
    """

    cosines: Tensor
    sines: Tensor

    def rows(self, first: int, last: int) -> "Turns":
        """Return a view of some rows."""
        return Turns(self.cosines[first:last], self.sines[first:last])


class NativeOps:
    """The operations of the native library; all tensors on the CPU, of one dtype of ``DTYPES``."""

    def __init__(self, library: ctypes.CDLL) -> None:
        """Find the functions."""
        self._add_norm = library.ost_ops_add_norm
        self._heads = library.ost_ops_heads
        self._gated = library.ost_ops_gated
        for function in (self._add_norm, self._heads, self._gated):
            function.restype = None
            function.argtypes = (ctypes.c_void_p,)

    def add_norm(self, residual: Tensor, addend: Tensor | None, norm: Norm, output: Tensor) -> None:
        """Add to a residual stream, and norm it.

        Args:
            residual: Shape (num_rows, width).
            addend: What is added to it first, of that shape; None adds nothing.
            norm: Of that width.
            output: Gets the normed rows; of that shape.

        Effects: writes ``residual`` where there is an addend, and ``output``.
        """
        num_rows, width = residual.shape
        _check(residual, output, *([] if addend is None else [addend]), shape=(num_rows, width))
        _check_weight(norm.weight, residual, width)
        operation = _AddNorm(
            Matrix.of(residual),
            Matrix() if addend is None else Matrix.of(addend),
            Matrix.of(output),
            norm.weight.data_ptr(),
            num_rows,
            width,
            DTYPES[residual.dtype],
            norm.epsilon,
            torch.get_num_threads(),
        )
        self._add_norm(ctypes.byref(operation))

    def heads(self, projected: Tensor, shape: HeadShape, turns: Turns, heads: Heads) -> None:
        """Take projected rows apart, norm queries and keys, and turn them by their position.

        Args:
            projected: Queries, keys and values of each row, shape (num_rows, num_projected).
            shape: How they are cut.
            turns: Angles of these rows.
            heads: Gets them; ``num_rows`` rows each.

        Effects: writes ``heads``.
        """
        num_rows, dim = projected.shape[0], shape.dim
        _check(projected, shape=(num_rows, shape.num_projected))
        _check(heads.queries, shape=(num_rows, shape.num_heads * dim))
        _check(heads.keys, heads.values, shape=(num_rows, shape.num_kv_heads * dim))
        _check(turns.cosines, turns.sines, shape=(num_rows, dim))
        assert dim % 2 == 0 and projected.dtype == turns.cosines.dtype == heads.queries.dtype
        assert heads.keys.dtype == heads.values.dtype == turns.sines.dtype == projected.dtype
        assert (shape.query_norm is None) == (shape.key_norm is None), "both or none"
        operation = _Heads(
            *map(Matrix.of, (projected, heads.queries, heads.keys, heads.values)),
            *map(Matrix.of, (turns.cosines, turns.sines)),
            _head_weight(shape.query_norm, projected, dim),
            _head_weight(shape.key_norm, projected, dim),
            num_rows,
            shape.num_heads,
            shape.num_kv_heads,
            dim,
            DTYPES[projected.dtype],
            0.0 if shape.query_norm is None else shape.query_norm.epsilon,
            torch.get_num_threads(),
        )
        self._heads(ctypes.byref(operation))

    def gated(self, gate_up: Tensor, output: Tensor) -> None:
        """Multiply ``silu(gate)`` with ``up`` (SwiGLU; Shazeer, arXiv 2002.05202).

        Args:
            gate_up: Both beside each other, shape (num_rows, 2 * width).
            output: Gets the product, shape (num_rows, width).

        Effects: writes ``output``.
        """
        num_rows, width = output.shape
        _check(gate_up, shape=(num_rows, 2 * width))
        _check(output, shape=(num_rows, width))
        assert gate_up.dtype == output.dtype, "one dtype"
        operation = _Gated(
            Matrix.of(gate_up),
            Matrix.of(output),
            num_rows,
            width,
            DTYPES[output.dtype],
            torch.get_num_threads(),
        )
        self._gated(ctypes.byref(operation))


def _check(*tensors: Tensor, shape: tuple[int, int]) -> None:
    """Assert what C++ takes for granted."""
    for tensor in tensors:
        assert tensor.shape == shape and tensor.dtype == tensors[0].dtype, (tensor.shape, shape)
        assert tensor.stride(1) == 1 and tensor.device.type == "cpu", "rows side by side, on a CPU"


def _check_weight(weight: Tensor, like: Tensor, width: int) -> None:
    assert weight.shape == (width,) and weight.dtype == like.dtype, (weight.shape, weight.dtype)
    assert weight.is_contiguous() and weight.device.type == "cpu", "a plain vector on a CPU"


def _head_weight(norm: Norm | None, like: Tensor, dim: int) -> int | None:
    if norm is None:
        return None
    _check_weight(norm.weight, like, dim)
    return norm.weight.data_ptr()
