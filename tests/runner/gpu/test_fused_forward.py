"""The kernels around products, and whole forwards of them, beside torch and the modules.

In Triton's interpreter: it proves arithmetic and addresses, not layouts, races or speed.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.nn import functional

from ostinato.errors import ConfigError
from ostinato.runner.forward.codes import CodeFormat, encode
from ostinato.runner.forward.decoder import FeedForward
from ostinato.runner.forward.embedding_and_rope import AngleKind, AngleLayout
from ostinato.runner.forward.head_stand_ins import turn
from ostinato.runner.forward.ops import Activation, HeadShape, Norm, Rope, RopeKind
from ostinato.runner.forward.stand_ins import ACTIVATIONS, apply_norm
from ostinato.runner.gpu.availability import why_not_on_device
from ostinato.runner.gpu.device_forward import DeviceForward, activated, add_norm, turned
from ostinato.runner.gpu.device_weights import CodesOnDevice, TiledWeight
from ostinato.runner.model_loader import load_model
from tests.runner.gpu.test_attention import multiply_in_float64
from tests.support.models.checkpoints import Checkpoints, checkpoints
from tests.support.triton import needs_triton

__all__ = ["checkpoints"]

pytestmark = needs_triton

WIDTH = 20
NEAR = {torch.float32: 1e-5, torch.float16: 2e-3}


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


NORMS = {
    "rms": Norm(draw(WIDTH), 1e-5),
    "gemma": Norm(draw(WIDTH), 1e-6, offset=1.0, is_rounded=False),
    "layer": Norm(draw(WIDTH), 1e-5, draw(WIDTH, seed=1), is_centered=True, is_rounded=False),
    "bare": Norm(None, 1e-5),
}


def in_dtype(norm: Norm, dtype: torch.dtype) -> Norm:
    weight, bias = (None if p is None else p.to(dtype) for p in (norm.weight, norm.bias))
    return replace(norm, weight=weight, bias=bias)


@pytest.mark.parametrize("kind", NORMS)
@pytest.mark.parametrize("dtype", NEAR)
def test_the_stream_takes_an_addend_and_is_normed_in_one_kernel(kind: str, dtype: torch.dtype):
    """The addend is a view with other strides, as a product of several layers leaves it."""
    norm = in_dtype(NORMS[kind], dtype)
    stream, addend = draw(3, WIDTH, dtype=dtype), draw(3, 2 * WIDTH, seed=2, dtype=dtype)[:, 3:23]
    expected = stream + addend * 0.5

    result = add_norm(stream, addend, 0.5, norm)

    assert torch.equal(stream, expected)
    near = NEAR[dtype]
    torch.testing.assert_close(result, apply_norm(norm, expected), rtol=near, atol=near)
    assert add_norm(stream, None, 1.0, None) is stream


@pytest.mark.parametrize("activation", Activation)
def test_gates_open_as_in_torch(activation: Activation):
    gates, ups = draw(2, 1030).mul(3), draw(2, 1030, seed=1)
    part = FeedForward(None, activation, True, None)

    both = activated(part, torch.cat((gates, ups), dim=1))
    alone = activated(replace(part, has_up=False), gates)

    expected = ACTIVATIONS[activation](gates)
    torch.testing.assert_close(both, expected * ups, rtol=2e-5, atol=2e-6)
    torch.testing.assert_close(alone, expected, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("kind", [RopeKind.HALVES, RopeKind.NEIGHBOURS])
@pytest.mark.parametrize(
    ("norm", "is_last"), [(None, False), ("rms", False), ("layer", False), ("rms", True)]
)
def test_heads_are_normed_and_turned_in_one_kernel(kind: RopeKind, norm: str | None, is_last: bool):
    """12 of 20 numbers of a head are turned; keys stand behind the queries of a row."""
    rope, own = Rope(kind, 12), None if norm is None else NORMS[norm]
    shape = HeadShape(3, 2, WIDTH, own, own, rope, is_norm_last=is_last)
    projected = draw(2, shape.num_projected)
    halves = draw(2, 6, seed=5), draw(2, 6, seed=6)
    layout = AngleLayout.HALVES
    wide = tuple(torch.cat((each, each), dim=1)[None] for each in halves)
    keys = projected[:, 60:100].reshape(2, 2, WIDTH)
    for turn_now in (is_last, not is_last):
        if turn_now:
            keys = turn(keys, rope, wide)
        elif own is not None:
            keys = apply_norm(own, keys)

    pairs = tuple(layout.of_pairs(each[0]) for each in wide)
    result = turned(projected, 2, WIDTH, 60, own, shape, pairs)

    torch.testing.assert_close(result, keys, rtol=1e-5, atol=1e-5)
    assert AngleKind().layout is layout


FORMATS = {
    "numbers": None,
    "int8": CodeFormat(8, 32),
    "int4": CodeFormat(4, 32, has_minima=True),
    "int4 about a zero": CodeFormat(4, 64, has_zeros=True),
}


@pytest.mark.one_case_in(2)
@pytest.mark.parametrize("name", FORMATS)
def test_a_row_of_a_product_has_the_same_bits_alone_and_in_a_batch(
    name: str, monkeypatch: pytest.MonkeyPatch
):
    """Each of 1 to N rows, in neighbouring tiles; and the product is that of the numbers.

    BLAS adds a row's products in an order that depends on its place; tensor cores do not. In
    float64, rounded once, the interpreter does not either.
    """
    monkeypatch.setattr(np, "matmul", multiply_in_float64)
    weight, bias, rows = draw(70, 144), draw(70, seed=1), draw(35, 144, seed=2)
    format = FORMATS[name]
    packed = (
        TiledWeight([weight])
        if format is None
        else CodesOnDevice(encode(weight, format), torch.float32)
    )

    whole = packed.multiply(rows, bias)

    expected = functional.linear(rows, packed.plain(), bias)
    torch.testing.assert_close(whole, expected, rtol=1e-4, atol=1e-4)
    for count in (1, 2, 33):
        assert torch.equal(packed.multiply(rows[:count], bias), whole[:count])
    for row in (1, 31, 32, 34):
        assert torch.equal(packed.multiply(rows[row : row + 1], bias)[0], whole[row])


def test_codes_are_replaced_and_read_back():
    weight = draw(6, 64)
    for format in (CodeFormat(8, 32), CodeFormat(4, 32, has_minima=True)):
        packed = CodesOnDevice(encode(weight, format), torch.float32)
        assert torch.equal(packed.plain(), encode(weight, format).plain())
        new = draw(2, 64, seed=3)
        packed.replace(1, new)
        assert torch.equal(packed.plain(1, 3), encode(new, format).plain())
        assert packed.nbytes < weight.nbytes / 2


MIXTURES = ("qwen3_moe", "gpt_oss", "qwen2_moe", "granitemoeshared")


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("family", "quantization"),
    [
        *(("llama", None), ("llama", "int8"), ("llama", "int4"), ("phi3", "int4")),
        *((family, None) for family in ("gemma2", "qwen3", "olmo2", "gpt_neox", "cohere", "glm")),
        *((family, None) for family in MIXTURES),
    ],
)
def test_a_model_is_fused_where_its_logits_are_those_of_its_modules(
    checkpoints: Checkpoints, family: str, quantization: str | None
):
    """``choose_forward`` compares them, chunk by chunk in scattered blocks."""
    path = checkpoints.path(family)
    loaded = load_model(path, "float32", attention="triton", quantization=quantization)

    assert (loaded.forward.name, type(loaded.fused)) == ("fused", DeviceForward)
    has_experts = family in MIXTURES
    assert ("experts" in loaded.forward.reason) == has_experts


def test_what_a_device_does_not_quantize_is_named():
    """Activations in 8 bits; experts, which are called as modules."""
    for name, words in (("w8a8", "activations are not quantized on a GPU"), ("int4", None)):
        reason = why_not_on_device(torch.nn.Linear(2, 2), name)
        assert (reason or "").startswith(words or "")
        assert (reason is None) == (words is None)


@pytest.mark.nightly
def test_the_same_bits_of_experts_are_refused(checkpoints: Checkpoints):
    path = checkpoints.path("qwen3_moe")
    for settings, words in (
        ({"quantization": "int4"}, "experts are not quantized on a GPU"),
        ({"same_bits": True}, r"same_bits=True: .*experts"),
    ):
        with pytest.raises(ConfigError, match=words):
            load_model(path, "float32", attention="triton", **settings)
