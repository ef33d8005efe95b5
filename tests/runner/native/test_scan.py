"""Many tokens through a scan or a convolution: as transformers computes them in float64."""

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import softplus
from transformers.models.bamba.modeling_bamba import mamba2_chunk_scan
from transformers.models.qwen3_next.modeling_qwen3_next import (
    causal_conv1d_fn,
    torch_chunk_gated_delta_rule,
)

from ostinato.runner.native.library import library
from ostinato.runner.states.recurrence import MixerCall, State
from ostinato.runner.states.recurrences import GatedDeltaRule, Mamba2Scan, ShortConvolution

NATIVE = library()
pytestmark = [
    pytest.mark.usefixtures("isa"),
    pytest.mark.skipif(NATIVE is None, reason="there is no native library"),
]
TOKENS = {**GatedDeltaRule.axes, **Mamba2Scan.axes}
"""Arguments with a row per token."""

Arguments = dict[str, Any]


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape)).float()


def delta(count: int, num_tokens: int, key_dim: int = 24, value_dim: int = 37) -> Arguments:
    """Two keys for six heads, as projections leave them: parts of wider rows."""
    rows = count, num_tokens
    query, key = draw(*rows, 4, key_dim).split(2, dim=2)
    gates = {"g": -softplus(draw(*rows, 6, seed=2)), "beta": draw(*rows, 6, seed=3).sigmoid()}
    value = draw(*rows, 6, value_dim, seed=1)
    return {"query": query, "key": key, "value": value, **gates, "use_qk_l2norm_in_kernel": True}


def mamba(count: int, num_tokens: int, key_dim: int = 24, value_dim: int = 37) -> Arguments:
    rows = count, num_tokens
    keys, queries = (draw(*rows, 4, key_dim, seed=4) / key_dim**0.5).split(2, dim=2)
    return {
        "hidden_states": draw(*rows, 6, value_dim), "dt": draw(*rows, 6, seed=1), "B": keys,
        "C": queries, "A": -draw(6, seed=2).exp(), "D": draw(6, seed=3), "dt_bias": draw(6, seed=5),
        "chunk_size": 256, "dt_softplus": True, "dt_limit": (0.1, 1.5),
    }  # fmt: skip


SCANS = {
    "delta": (GatedDeltaRule(), torch_chunk_gated_delta_rule, delta),
    "mamba": (Mamba2Scan(), mamba2_chunk_scan, mamba),
}


@pytest.fixture(params=SCANS)
def scan(request: pytest.FixtureRequest) -> "Scanned":
    return Scanned(*SCANS[request.param])


class Scanned:
    """One of ``SCANS``."""

    def __init__(self, recurrence: Any, function: Callable[..., Any], draw_inputs: Any) -> None:
        self._recurrence, self._function, self.draw = recurrence, function, draw_inputs

    def run(self, arguments: Arguments, state: State | None = None) -> tuple[Tensor, State]:
        call = MixerCall(self._function, (), arguments, (), {})
        output, after = self._recurrence.chunk(call, state)
        return output, after

    def by_torch(self, arguments: Arguments) -> tuple[Tensor, State]:
        with patch("ostinato.runner.states.recurrences.native_for", return_value=None):
            return self.run(arguments)


def changed(
    arguments: Arguments, change: Callable[[Tensor], Tensor], names: Any = None
) -> Arguments:
    return {
        name: change(value) if isinstance(value, Tensor) and name in (names or arguments) else value
        for name, value in arguments.items()
    }


@pytest.mark.parametrize("num_tokens", [1, 9, 64, 150])
@pytest.mark.parametrize("dims", [(24, 37), (8, 64), (128, 128)])
def test_a_scan_agrees_with_transformers(scan: Scanned, num_tokens: int, dims: tuple[int, int]):
    """From nothing and from a state, which stays as it was."""
    inputs = scan.draw(2, num_tokens, *dims)
    _, state = scan.run(scan.draw(2, 70, *dims))
    before = state.clone()

    for initial in (None, state):
        output, after = scan.run(inputs, initial)

        wide = None if initial is None else initial.double()
        expected = scan.run(changed(inputs, Tensor.double), wide)
        assert output.dtype == after.dtype == torch.float32
        torch.testing.assert_close(output.double(), expected[0].double(), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(after.double(), expected[1].double(), rtol=1e-4, atol=1e-5)
    assert torch.equal(state, before)


def test_inputs_of_16_bits_are_rounded_as_in_transformers(scan: Scanned):
    """So are time steps, and the delta rule's outputs; all between is float32."""
    short = changed(scan.draw(1, 100), Tensor.bfloat16, TOKENS.keys() - {"g", "beta"})

    output, after = scan.run(short)

    expected, state = scan.by_torch(short)
    assert output.dtype == expected.dtype
    torch.testing.assert_close(after, state, rtol=1e-4, atol=1e-5)
    rounding = 2**-7 if output.dtype == torch.bfloat16 else 1e-4
    torch.testing.assert_close(output, expected, rtol=rounding, atol=1e-5)


def test_a_sequence_has_the_same_bits_in_chunks_and_among_others(scan: Scanned):
    inputs = scan.draw(3, 200)
    output, after = scan.run(inputs)

    alone = changed(inputs, lambda value: value[1:2], TOKENS)
    state, parts = None, []
    for start, length in ((0, 64), (64, 128), (192, 8)):
        cut = partial(Tensor.narrow, dim=1, start=start, length=length)
        part, state = scan.run(changed(alone, cut, TOKENS), state)
        parts.append(part)

    assert torch.equal(torch.cat(parts, dim=1), output[1:2])
    assert torch.equal(state, after[1:2])


@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_convolution_continues(activation: str | None, has_bias: bool):
    """In pieces shorter than what it keeps and longer, in both orders of memory."""
    inputs, weight = draw(2, 50, 37).transpose(1, 2), draw(37, 4, seed=1)
    bias = draw(37, seed=2) if has_bias else None
    wide = (each if each is None else each.double() for each in (inputs, weight, bias))
    expected = causal_conv1d_fn(*wide, activation)

    state, parts = None, []
    for piece in (inputs[..., :2], inputs[..., 2:3].contiguous(), inputs[..., 3:]):
        arguments = {
            "hidden_states": piece,
            "weight": weight,
            "bias": bias,
            "activation": activation,
        }
        call = MixerCall(causal_conv1d_fn, (), arguments, (), {})
        part, state = ShortConvolution().chunk(call, state)
        parts.append(part)

    torch.testing.assert_close(torch.cat(parts, -1).double(), expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(state, inputs[..., -3:])


def test_a_convolution_rounds_as_transformers():
    """Before its activation as well, in 16 bits."""
    inputs, weight = draw(1, 70, 32).bfloat16().transpose(1, 2), draw(32, 4, seed=1).bfloat16()
    names = "hidden_states", "weight", "bias", "activation"
    call = MixerCall(causal_conv1d_fn, (inputs, weight, None, "silu"), {}, names, {})

    output, _ = ShortConvolution().chunk(call, None)

    assert output.dtype == torch.bfloat16
    torch.testing.assert_close(output, call.run(), rtol=2**-7, atol=1e-6)
