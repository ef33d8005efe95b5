"""Layers with a state as operations: which are, and what a sequence gets beside others.

That tokens are those of ``generate`` is tested in ``tests/exactness``.
"""

from dataclasses import replace
from types import MethodType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ostinato.core.plan import ScheduledSequence
from ostinato.runner.attention.native_backend import NativeAttention
from ostinato.runner.forward.decoder import Attention, StateMixer
from ostinato.runner.forward.mixer_stand_ins import mixer_of
from ostinato.runner.forward.stand_ins import Unknown
from ostinato.runner.forward.structure import describe_decoder
from ostinato.runner.loaded_model import LoadedModel
from ostinato.runner.model_loader import load_model
from ostinato.runner.native.packed import required_library
from tests.runner.bench import Bench, greedy, random_prompt
from tests.runner.conftest import Served
from tests.support.instruction_sets import needs_library, threads_in_use
from tests.support.models.checkpoints import Checkpoints

pytestmark = needs_library
MIXED = (
    "qwen3_next",
    "qwen3_5_text",
    "qwen3_5_moe_text",
    "olmo_hybrid",
    "granitemoehybrid",
    "bamba",
    "nemotron_h",
    "mamba2",
)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", MIXED)
def test_no_layer_with_a_state_is_called(family: str, dtype: Any, served: Served):
    loaded = served(family, dtype)

    assert loaded.fused is not None, loaded.forward.reason
    parts = list(loaded.fused.decoder.parts())
    assert any(isinstance(part, StateMixer) for part in parts)
    assert not any(call.mixes for call in loaded.fused.decoder.calls)
    gated = [part.gating for part in parts if isinstance(part, Attention) and part.gating]
    assert bool(gated) == family.startswith("qwen3")


def test_a_device_calls_layers_with_a_state_and_gated_attention(checkpoints: Checkpoints):
    loaded = load_model(checkpoints.path("qwen3_5_text"), "float32", forward="plain")
    parts = list(describe_decoder(loaded.model, for_device=True).parts())
    assert not any(isinstance(part, StateMixer | Attention) for part in parts)


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["qwen3_next", "granitemoehybrid", "mamba2"])
def test_a_sequence_has_the_same_bits_alone_beside_others_and_in_chunks(
    family: str, dtype: Any, served: Served
):
    """Chunks end at multiples of 64; beside them others begin, go on and decode, on two threads."""
    loaded, prompts = served(family, dtype), [random_prompt(i, n) for i, n in ((1, 150), (2, 70))]
    alone = [_logits(_bench(loaded, 1), prompt) for prompt in prompts]
    bench = _bench(loaded, 4)
    one, two = (bench.sequence([*p, 5, 6], state_slot=3 - i) for i, p in enumerate(prompts))
    new, decoding = (bench.sequence(random_prompt(3, 9), state_slot=i) for i in (0, 1))
    bench.step(decoding.next(8))

    with threads_in_use(2):
        steps = [
            (decoding.next(1), one.next(64), two.next(64)),
            (one.next(64), two.next(6), new.next(5)),
            (two.next(1), one.next(22)),
            (two.next(1), one.next(1), new.next(1)),
            (one.next(1),),
        ]
        got = [bench.logits(*map(_sampled, step)) for step in steps]

    assert torch.equal(torch.stack([got[2][1], got[3][1], got[4][0]]), alone[0])
    assert torch.equal(torch.stack([got[1][1], got[2][0], got[3][0]]), alone[1])


CHANGES: dict[str, Any] = {
    "a decay that heads share": lambda m: setattr(m, "A_log", nn.Parameter(m.A_log[:1])),
    "a gate that is not projected": lambda m: setattr(
        m.norm, "forward", MethodType(lambda own, rows, gate: rows * gate.exp(), m.norm)
    ),
    "another activation": lambda m: setattr(m, "activation", "gelu"),
    "a norm in between": lambda m: setattr(m, "in_proj_z", nn.Sequential(m.in_proj_z)),
    "no norm": lambda m: setattr(m, "norm", nn.Identity()),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_a_module_computes_otherwise_is_not_described(change: str, served: Served):
    module = served("qwen3_5_text").model.model.layers[0].linear_attn
    twin = type(module)(served("qwen3_5_text").config.get_text_config(), 0).float()
    assert mixer_of(twin, "", torch.float32).shape.is_delta

    CHANGES[change](twin)

    with pytest.raises(Unknown):
        mixer_of(twin, "", torch.float32)


def _bench(loaded: LoadedModel, num_slots: int) -> Bench:
    attention = NativeAttention(required_library())
    return Bench(loaded, block_size=16, attention=attention, num_state_slots=num_slots)


def _sampled(scheduled: ScheduledSequence) -> ScheduledSequence:
    return replace(scheduled, sample=greedy())


def _logits(bench: Bench, prompt: list[int]) -> Tensor:
    """Return the logits behind a prompt and behind each of two tokens after it."""
    sequence = bench.sequence([*prompt, 5, 6], state_slot=0)
    steps = (len(prompt), 1, 1)
    return torch.cat([bench.logits(_sampled(sequence.next(number))) for number in steps])
