"""The operations between the products of a layer, and C structures for their arguments.

``native/include/ostinato_ops.h`` is the other side. C++ checks nothing, so everything is checked
here, when a record is made. A record points into tensors, which the caller keeps alive.
"""

import ctypes
import enum
from dataclasses import dataclass

import torch
from torch import Tensor

from ostinato.runner.native.ctypes_api import floats, int32s, int64s, pointers
from ostinato.runner.native.packed import Matrix

DTYPES = {torch.float32: 0, torch.bfloat16: 1}
"""Formats that the operations support, and their numbers in ``ost_dtype``."""


class Activation(enum.IntEnum):
    """``ost_activation``: what a gate opens by."""

    SILU = 0
    GELU = 1
    GELU_TANH = 2
    RELU = 3
    RELU_SQUARED = 4


class RopeKind(enum.IntEnum):
    """``ost_rope``: which numbers of a head are turned as a pair."""

    NONE = 0
    HALVES = 1
    NEIGHBOURS = 2


@dataclass(frozen=True, slots=True)
class Norm:
    """An RMSNorm (arXiv 1910.07467) or a LayerNorm (arXiv 1607.06450).

    Attributes:
        weight: Shape (width,), or (num_heads, width) for heads that are weighed apart; None is 1.
        epsilon: Added to the mean of squares.
        bias: Shape (width,); None is 0.
        offset: Added to the weight (Gemma).
        is_centered: Whether the mean is subtracted.
        is_rounded: Whether numbers are rounded before they are weighed, too.
    """

    weight: Tensor | None
    epsilon: float
    bias: Tensor | None = None
    offset: float = 0.0
    is_centered: bool = False
    is_rounded: bool = True


@dataclass(frozen=True, slots=True)
class Rope:
    """How queries and keys are turned by their position (RoPE; Su et al., arXiv 2104.09864).

    Attributes:
        kind: Which numbers are a pair.
        dim: Numbers of a head that are turned, even; those after them stay as they are.
        are_rounded: Whether products with cosines and sines are rounded before they are added.
    """

    kind: RopeKind = RopeKind.NONE
    dim: int = 0
    are_rounded: bool = True


@dataclass(frozen=True, slots=True)
class HeadShape:
    """How a row of projected numbers becomes heads.

    Attributes:
        num_heads: Heads of queries.
        num_kv_heads: Heads of keys, and of values.
        dim: Numbers of a head.
        query_norm: Norm of queries; None is none.
        key_norm: Norm of keys; given exactly if ``query_norm`` is.
        rope: How they are turned.
        is_interleaved: Whether each head's query, key and value are beside each other (GPT-NeoX);
            else there are all queries, then all keys, then all values.
        is_norm_last: Whether heads are turned before they are normed.
        is_norm_of_all: Whether a norm is over all heads at once (OLMo 2).
        is_gated: Whether each query has a gate of its size beside it (Qwen3-Next).
    """

    num_heads: int
    num_kv_heads: int
    dim: int
    query_norm: Norm | None = None
    key_norm: Norm | None = None
    rope: Rope = Rope()
    is_interleaved: bool = False
    is_norm_last: bool = False
    is_norm_of_all: bool = False
    is_gated: bool = False

    @property
    def num_projected(self) -> int:
        """Numbers of a projected row."""
        return ((1 + self.is_gated) * self.num_heads + 2 * self.num_kv_heads) * self.dim

    def places(self) -> tuple[int, int, int, int]:
        """Return the strides of queries and of keys and values, and the first key and value."""
        dim = self.dim
        if self.is_interleaved:
            return 3 * dim, 3 * dim, dim, 2 * dim
        stride = (1 + self.is_gated) * dim
        first_key = self.num_heads * stride
        return stride, dim, first_key, first_key + self.num_kv_heads * dim


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


class NormRecord(ctypes.Structure):
    """``ost_norm``; zeros for none."""

    _fields_ = (
        *pointers("weight", "bias"),
        *floats("epsilon", "offset"),
        *int32s("kind", "is_rounded"),
    )

    @classmethod
    def of(cls, norm: Norm | None, like: Tensor, width: int) -> "NormRecord":
        """Check and describe; the norm is of ``width`` numbers, with one weight for each."""
        if norm is None:
            return cls()
        for part in (norm.weight, norm.bias):
            if part is not None:
                assert part.numel() == width and part.dtype == like.dtype, (part.shape, part.dtype)
                assert part.is_contiguous() and part.device.type == "cpu", "contiguous, on a CPU"
        weight, bias = (None if p is None else p.data_ptr() for p in (norm.weight, norm.bias))
        return cls(weight, bias, norm.epsilon, norm.offset, 1 + norm.is_centered, norm.is_rounded)


class AddNorm(ctypes.Structure):
    """``ost_add_norm``: add to the residual stream, and norm it."""

    _fields_ = (
        *((name, Matrix) for name in ("residual", "addend", "output")),
        *((name, NormRecord) for name in ("norm", "addend_norm")),
        *int64s("num_rows"),
        *int32s("width", "dtype"),
        *floats("scale"),
        *int32s("num_threads"),
        ("gates", Matrix),
    )

    @classmethod
    def of(
        cls,
        residual: Tensor,
        addend: Tensor | None,
        norm: Norm | None,
        output: Tensor | None,
        addend_norm: Norm | None = None,
        scale: float = 1.0,
        gates: Tensor | None = None,
    ) -> "AddNorm":
        """Check and describe.

        Args:
            residual: Shape (num_rows, width); overwritten with the sum if there is an addend.
            addend: What is added to it first, of that shape; None adds nothing.
            norm: A norm of that width; given exactly if ``output`` is.
            output: Gets the normed rows; of that shape, or None.
            addend_norm: Norm of the addend; None is none.
            scale: Factor on the addend, after its norm and gate.
            gates: Shape (num_rows, 1): their sigmoids are factors on the addend; None is none.
        """
        num_rows, width = residual.shape
        others = [tensor for tensor in (addend, output) if tensor is not None]
        _check(residual, *others, shape=(num_rows, width))
        assert (norm is None) == (output is None), "a norm for an output"
        if gates is not None:
            _check(gates, shape=(num_rows, 1))
            assert gates.dtype == residual.dtype, "one dtype"
        return cls(
            Matrix.of(residual),
            Matrix() if addend is None else Matrix.of(addend),
            Matrix() if output is None else Matrix.of(output),
            NormRecord.of(norm, residual, width),
            NormRecord.of(addend_norm, residual, width),
            num_rows,
            width,
            DTYPES[residual.dtype],
            scale,
            torch.get_num_threads(),
            Matrix() if gates is None else Matrix.of(gates),
        )


class SplitHeads(ctypes.Structure):
    """``ost_heads``: split projected rows into heads, norm queries and keys, and apply RoPE."""

    _fields_ = (
        *((name, Matrix) for name in ("projected", "queries", "keys", "values", "angles")),
        *((name, NormRecord) for name in ("query_norm", "key_norm")),
        *int64s("num_rows"),
        *int32s("num_heads", "num_kv_heads", "head_dim", "rotary_dim"),
        *int32s("query_stride", "kv_stride", "key_offset", "value_offset"),
        *int32s("rope", "are_rounded", "is_norm_last", "weight_stride", "is_norm_of_all"),
        *int32s("dtype", "num_threads"),
    )

    @classmethod
    def of(
        cls, projected: Tensor, shape: HeadShape, angles: Tensor | None, heads: Heads
    ) -> "SplitHeads":
        """Check and describe.

        Args:
            projected: Queries, keys and values of each row, shape (num_rows, num_projected).
            shape: How they are split.
            angles: Cosines and then sines of each pair, shape (num_rows, rope.dim), float32; None
                exactly if nothing is turned.
            heads: Gets them; ``num_rows`` rows each.
        """
        num_rows, dim, rope = projected.shape[0], shape.dim, shape.rope
        _check(projected, shape=(num_rows, shape.num_projected))
        _check(heads.queries, shape=(num_rows, shape.num_heads * dim))
        _check(heads.keys, heads.values, shape=(num_rows, shape.num_kv_heads * dim))
        assert projected.dtype == heads.queries.dtype == heads.keys.dtype, "one dtype"
        assert (rope.kind == RopeKind.NONE) == (angles is None) and rope.dim % 2 == 0, rope
        if angles is not None:
            _check(angles, shape=(num_rows, rope.dim))
            assert angles.dtype == torch.float32 and rope.dim <= dim, "angles are floats"
        query, key = shape.query_norm, shape.key_norm
        assert (query is None) == (key is None), "both or none"
        assert not shape.is_interleaved or shape.num_heads == shape.num_kv_heads, "one for each"
        has_own = query is not None and query.weight is not None and query.weight.dim() == 2
        of_heads = has_own or shape.is_norm_of_all
        widths = [n * dim if of_heads else dim for n in (shape.num_heads, shape.num_kv_heads)]
        return cls(
            *map(Matrix.of, (projected, heads.queries, heads.keys, heads.values)),
            Matrix() if angles is None else Matrix.of(angles),
            NormRecord.of(query, projected, widths[0]),
            NormRecord.of(key, projected, widths[1]),
            num_rows,
            shape.num_heads,
            shape.num_kv_heads,
            dim,
            rope.dim,
            *shape.places(),
            rope.kind,
            rope.are_rounded,
            shape.is_norm_last,
            dim if has_own else 0,
            shape.is_norm_of_all,
            DTYPES[projected.dtype],
            torch.get_num_threads(),
        )


class Gated(ctypes.Structure):
    """``ost_gated``: ``activation(gate) * up`` (Shazeer, arXiv 2002.05202), or without ups."""

    _fields_ = (
        *((name, Matrix) for name in ("gate_up", "output")),
        *int64s("num_rows"),
        *int32s("width", "dtype", "activation", "has_up", "num_threads"),
    )

    @classmethod
    def of(
        cls, gate_up: Tensor, output: Tensor, activation: Activation, has_up: bool = True
    ) -> "Gated":
        """Check and describe.

        Args:
            gate_up: Gates, and ups beside them, shape (num_rows, 2 * width); (num_rows, width)
                without ups.
            output: Gets the product, shape (num_rows, width).
            activation: What gates open by.
            has_up: Whether there are ups.
        """
        num_rows, width = output.shape
        _check(gate_up, shape=(num_rows, (1 + has_up) * width))
        _check(output, shape=(num_rows, width))
        assert gate_up.dtype == output.dtype, "one dtype"
        numbers = num_rows, width, DTYPES[output.dtype], activation, has_up
        return cls(Matrix.of(gate_up), Matrix.of(output), *numbers, torch.get_num_threads())


def _check(*tensors: Tensor, shape: tuple[int, int]) -> None:
    """Assert what C++ does not check."""
    for tensor in tensors:
        assert tensor.shape == shape and tensor.dtype == tensors[0].dtype, (tensor.shape, shape)
        assert tensor.stride(1) == 1 and tensor.device.type == "cpu", "contiguous rows, on a CPU"
