"""The operations between products, from Python: the definition in float64, and torch's bits."""

import ctypes
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from ostinato.runner.forward.ops import (
    Activation,
    AddNorm,
    Gated,
    Heads,
    HeadShape,
    Norm,
    Rope,
    RopeKind,
    SplitHeads,
)
from ostinato.runner.forward.stand_ins import apply_norm
from ostinato.runner.native.library import library
from tests.support.instruction_sets import ISAS, isa_in_use

NATIVE = library()
EPSILON = 1e-6


class NativeOps:
    """Calls the operations one by one."""

    def add_norm(self, *arguments: Any) -> None:
        self._run("add_norm", AddNorm.of(*arguments))

    def heads(self, *arguments: Any) -> None:
        self._run("heads", SplitHeads.of(*arguments))

    def gated(
        self,
        gate_up: Tensor,
        output: Tensor,
        activation: Activation = Activation.SILU,
        has_up: bool = True,
    ) -> None:
        self._run("gated", Gated.of(gate_up, output, activation, has_up))

    def _run(self, name: str, record: ctypes.Structure) -> None:
        assert NATIVE is not None
        getattr(NATIVE, f"ost_ops_{name}")(ctypes.byref(record))


@pytest.fixture(params=ISAS, ids=lambda isa: isa.name.lower(), scope="module")
def ops(request: pytest.FixtureRequest) -> Iterator[NativeOps]:
    """The operations on one instruction set."""
    assert NATIVE is not None
    with isa_in_use(request.param):
        yield NativeOps()


def normed(rows: Tensor, weight: Tensor) -> Tensor:
    """The norm as ``transformers`` writes it."""
    wide = rows.to(torch.promote_types(rows.dtype, torch.float32))
    factor = torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPSILON)
    return weight * (wide * factor).to(rows.dtype)


def turned(heads: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """RoPE as ``transformers`` writes it; heads (num_rows, num_heads, dim)."""
    first, second = heads.chunk(2, dim=-1)
    return heads * cosines[:, None] + torch.cat((-second, first), dim=-1) * sines[:, None]


def same(found: Tensor, definition: Tensor, in_torch: Tensor) -> bool:
    """Whether float32 is close to the definition in float64, or bfloat16 has torch's bits.

    A sum in another order may round the other way, which few numbers show.
    """
    size = definition.abs().amax(-1, keepdim=True) + 1
    if found.dtype == torch.float32:
        return bool(((found - definition).abs() <= 1e-5 * size).all())
    away = (found.double() - in_torch.double()).abs()
    few = int((away > 0).sum()) <= 4 + found.numel() // 50
    return few and bool((away <= 2**-6 * size).all())


SHAPES = {
    "dtype": st.sampled_from([torch.float32, torch.bfloat16]),
    "num_rows": st.integers(1, 40),
    "width": st.integers(1, 150),
    "gap": st.integers(0, 3),
    "seed": st.integers(0, 99),
}


def random_rows(num_rows: int, width: int, dtype: torch.dtype, gap: int = 0) -> Tensor:
    return torch.randn(num_rows, width + gap).to(dtype)[:, :width]


@settings(max_examples=15)
@given(**SHAPES, adds=st.booleans())
def test_add_and_norm(
    ops: NativeOps, dtype: torch.dtype, num_rows: int, width: int, gap: int, seed: int, adds: bool
):
    torch.manual_seed(seed)
    stream, addend = (random_rows(num_rows, width, dtype, gap) for _ in range(2))
    weight, output = torch.randn(width).to(dtype), random_rows(num_rows, width, dtype, gap)
    expected = stream + addend if adds else stream.clone()

    ops.add_norm(stream, addend if adds else None, Norm(weight, EPSILON), output)

    assert torch.equal(stream, expected)
    assert same(output, normed(expected.double(), weight.double()), normed(expected, weight))


@settings(max_examples=15)
@given(**SHAPES)
def test_gate_and_multiply(
    ops: NativeOps, dtype: torch.dtype, num_rows: int, width: int, gap: int, seed: int
):
    torch.manual_seed(seed)
    gate_up = 8 * random_rows(num_rows, 2 * width, dtype, gap)
    output = random_rows(num_rows, width, dtype, gap)

    ops.gated(gate_up, output)

    gate, up = gate_up[:, :width], gate_up[:, width:]
    definition = functional.silu(gate.double()) * up.double()
    assert same(output, definition, functional.silu(gate) * up)


@settings(max_examples=15)
@given(
    dtype=SHAPES["dtype"],
    num_rows=st.integers(1, 20),
    half=st.integers(1, 70),
    counts=st.tuples(st.integers(1, 4), st.integers(1, 3)),
    norms=st.booleans(),
    seed=st.integers(0, 99),
)
def test_heads_are_taken_apart_normed_and_turned(
    ops: NativeOps,
    dtype: torch.dtype,
    num_rows: int,
    half: int,
    counts: tuple[int, int],
    norms: bool,
    seed: int,
):
    torch.manual_seed(seed)
    dim, (num_heads, num_kv_heads) = 2 * half, counts
    weights = [torch.randn(dim).to(dtype) for _ in range(2)]
    query_norm, key_norm = (Norm(w, EPSILON) if norms else None for w in weights)
    shape = HeadShape(
        num_heads, num_kv_heads, dim, query_norm, key_norm, Rope(RopeKind.HALVES, dim)
    )
    projected = random_rows(num_rows, shape.num_projected, dtype)
    angles = torch.rand(num_rows, half) * 7
    pairs = [angles.cos().to(dtype), angles.sin().to(dtype)]
    turns = torch.cat(pairs, dim=1).float()
    cosines, sines = (torch.cat((each, each), dim=1) for each in pairs)
    widths = [n * dim for n in (num_heads, num_kv_heads, num_kv_heads)]
    heads = Heads(*(random_rows(num_rows, width, dtype) for width in widths))

    ops.heads(projected, shape, turns, heads)

    *both, values = projected.split(widths, dim=1)
    for rows, weight, found in zip(both, weights, (heads.queries, heads.keys), strict=True):
        expected = [
            turned(
                normed(part.unflatten(1, (-1, dim)), w) if norms else part.unflatten(1, (-1, dim)),
                cos,
                sin,
            ).flatten(1)
            for part, w, cos, sin in (
                (rows.double(), weight.double(), cosines.double(), sines.double()),
                (rows, weight, cosines, sines),
            )
        ]
        assert same(found, *expected)
    assert torch.equal(heads.values, values)


@settings(max_examples=15)
@given(**SHAPES, centered=st.booleans(), offset=st.sampled_from([0.0, 1.0]), rounds=st.booleans())
def test_norms_of_other_kinds_after_a_part_and_before_the_next(
    ops: NativeOps,
    dtype: torch.dtype,
    num_rows: int,
    width: int,
    gap: int,
    seed: int,
    centered: bool,
    offset: float,
    rounds: bool,
):
    """An addend is normed and scaled, and the sum normed: Gemma, OLMo 2, Granite, Cohere."""
    torch.manual_seed(seed)
    stream, addend = (random_rows(num_rows, width, dtype, gap) for _ in range(2))
    output = random_rows(num_rows, width, dtype, gap)
    weight, bias = (torch.randn(width).to(dtype) for _ in range(2))
    norm = Norm(weight, 1e-3, bias if centered else None, offset, centered, rounds)
    normed_addend = apply_norm(norm, addend)
    expected = stream + normed_addend * 0.5

    ops.add_norm(stream, addend, norm, output, norm, 0.5)

    assert same(stream, expected.double(), expected)
    assert same(output, apply_norm(norm, stream).double(), apply_norm(norm, stream))


ACTIVATIONS = {
    Activation.GELU: functional.gelu,
    Activation.GELU_TANH: lambda x: functional.gelu(x, approximate="tanh"),
    Activation.RELU: functional.relu,
    Activation.RELU_SQUARED: lambda x: functional.relu(x).square(),
}


@pytest.mark.parametrize("has_up", [True, False])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_other_activations_with_ups_and_without(
    ops: NativeOps, activation: Activation, has_up: bool
):
    torch.manual_seed(0)
    for dtype in (torch.float32, torch.bfloat16):
        gate_up = 4 * random_rows(9, 74 if has_up else 37, dtype)
        output = random_rows(9, 37, dtype)

        ops.gated(gate_up, output, activation, has_up)

        gate, up = gate_up[:, :37], gate_up[:, 37:]
        function = ACTIVATIONS[activation]
        opened = function(gate.double())
        definition = opened * (up.double() if has_up else 1)
        # Two roundings; torch's tails are coarser than the library's, so its bits are no measure.
        unit = 2.0**-20 if dtype == torch.float32 else 2.0**-7
        assert ((output - definition).abs() <= unit * definition.abs() + 1e-5).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_interleaved", [True, False])
def test_neighbours_are_turned_and_the_rest_of_a_head_stays(
    ops: NativeOps, dtype: torch.dtype, is_interleaved: bool
):
    """Cohere's and GLM's pairs, on a part of each head; queries, keys and values by head or not."""
    torch.manual_seed(1)
    rope = Rope(RopeKind.NEIGHBOURS, 6)
    shape = HeadShape(3, 3, 10, rope=rope, is_interleaved=is_interleaved)
    projected, angles = random_rows(4, 90, dtype), torch.rand(4, 3) * 7
    cosines, sines = angles.cos().to(dtype), angles.sin().to(dtype)
    heads = Heads(*(random_rows(4, 30, dtype) for _ in range(3)))

    ops.heads(projected, shape, torch.cat((cosines, sines), dim=1).float(), heads)

    if is_interleaved:
        parts = projected.view(4, 3, 3, 10).unbind(2)
    else:
        parts = projected.view(4, 3, 3, 10).unbind(1)
    for part, found in zip(parts[:2], (heads.queries, heads.keys), strict=True):
        first, second = part[..., 0:6:2], part[..., 1:6:2]
        cos, sin = cosines[:, None], sines[:, None]
        turns = torch.stack((first * cos - second * sin, second * cos + first * sin), dim=-1)
        expected = torch.cat((turns.flatten(-2), part[..., 6:]), dim=-1).flatten(1)
        assert same(found, expected.double(), expected)
    assert torch.equal(heads.values, parts[2].flatten(1))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_not_finite_stays_so(ops: NativeOps, dtype: torch.dtype, value: float):
    """The sampler says of such a row what is wrong with it."""
    rows = torch.ones(2, 40, dtype=dtype)
    rows[1, 3] = value
    output = torch.zeros_like(rows)

    ops.add_norm(rows, None, Norm(torch.ones(40, dtype=dtype), EPSILON), output)
    assert output[0].isfinite().all() and not output[1].isfinite().all()

    gated = torch.zeros(2, 20, dtype=dtype)
    ops.gated(rows, gated)
    assert gated[0].isfinite().all() and not gated[1].isfinite().all()


def test_what_does_not_fit_is_refused_before_the_call(ops: NativeOps):
    """C++ would write past the end."""
    norm, rows = Norm(torch.ones(8), EPSILON), torch.ones(3, 8)
    for run, *arguments in (
        (ops.add_norm, rows, None, norm, torch.ones(3, 7)),
        (ops.add_norm, rows, torch.ones(2, 8), norm, rows.clone()),
        (ops.add_norm, rows, None, norm, rows.bfloat16()),
        (ops.gated, torch.ones(3, 15), rows),
        (ops.gated, torch.ones(16, 3).T, rows),
    ):
        with pytest.raises(AssertionError):
            run(*arguments)
