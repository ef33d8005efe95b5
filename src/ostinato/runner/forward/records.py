"""C structures for what an operation works on.

``native/include/ostinato_ops.h`` is the other side; the structures here are its structures. C++
checks nothing, so everything is checked here, when a record is made. A record points into tensors,
which its maker keeps alive.
"""

import ctypes

import torch
from torch import Tensor

from ostinato.runner.forward.layer_specs import Heads, HeadShape, Norm, RopeAngles
from ostinato.runner.native.packed import Matrix

DTYPES = {torch.float32: 0, torch.bfloat16: 1}
"""Formats that the operations know, and their numbers in ``ost_dtype``."""


class AddNorm(ctypes.Structure):
    """``ost_add_norm``: add to a residual stream, and norm it."""

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

    @classmethod
    def of(cls, residual: Tensor, addend: Tensor | None, norm: Norm, output: Tensor) -> "AddNorm":
        """Check and describe; see ``NativeOps.add_norm``."""
        num_rows, width = residual.shape
        _check(residual, output, *([] if addend is None else [addend]), shape=(num_rows, width))
        _check_weight(norm.weight, residual, width)
        return cls(
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


class TakeApart(ctypes.Structure):
    """``ost_heads``: take projected rows apart into normed and turned heads."""

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

    @classmethod
    def of(
        cls, projected: Tensor, shape: HeadShape, turns: RopeAngles, heads: Heads
    ) -> "TakeApart":
        """Check and describe; see ``NativeOps.heads``."""
        num_rows, dim = projected.shape[0], shape.dim
        _check(projected, shape=(num_rows, shape.num_projected))
        _check(heads.queries, shape=(num_rows, shape.num_heads * dim))
        _check(heads.keys, heads.values, shape=(num_rows, shape.num_kv_heads * dim))
        _check(turns.cosines, turns.sines, shape=(num_rows, dim))
        assert dim % 2 == 0 and projected.dtype == turns.cosines.dtype == heads.queries.dtype
        assert heads.keys.dtype == heads.values.dtype == turns.sines.dtype == projected.dtype
        assert (shape.query_norm is None) == (shape.key_norm is None), "both or none"
        return cls(
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


class Gated(ctypes.Structure):
    """``ost_gated``: multiply ``silu(gate)`` with ``up``."""

    _fields_ = (
        ("gate_up", Matrix),
        ("output", Matrix),
        ("num_rows", ctypes.c_int64),
        ("width", ctypes.c_int32),
        ("dtype", ctypes.c_int32),
        ("num_threads", ctypes.c_int32),
    )

    @classmethod
    def of(cls, gate_up: Tensor, output: Tensor) -> "Gated":
        """Check and describe; see ``NativeOps.gated``."""
        num_rows, width = output.shape
        _check(gate_up, shape=(num_rows, 2 * width))
        _check(output, shape=(num_rows, width))
        assert gate_up.dtype == output.dtype, "one dtype"
        return cls(
            Matrix.of(gate_up),
            Matrix.of(output),
            num_rows,
            width,
            DTYPES[output.dtype],
            torch.get_num_threads(),
        )


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
