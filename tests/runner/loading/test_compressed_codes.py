"""Checkpoints of compressed-tensors with plain activations run from their own codes."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from ostinato.runner.forward import codes
from ostinato.runner.forward.packed_linear import PackedLinear
from ostinato.runner.forward.quantized import QuantizedWeight
from ostinato.runner.model_loader import load_model
from tests.runner.bench import own_logits, random_prompt
from tests.support.instruction_sets import needs_library
from tests.support.models.quantized import BY_TOKEN, STATIC, save_w4a16, save_w8a8

pytest.importorskip("compressed_tensors")
pytestmark = needs_library

DTYPES = ("float32", "bfloat16")
PROMPT = random_prompt(1, 20)
SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}


@pytest.mark.one_case_in(2)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["W8A16", "W4A16", "W8A8"])
def test_a_checkpoint_runs_from_its_own_codes(kind: str, dtype: Any, tmp_path: Path):
    path, activations = tmp_path / "model", BY_TOKEN if kind == "W8A8" else None
    if kind == "W4A16":
        save_w4a16(path, dtype=dtype, **SIZES)
    else:
        save_w8a8(path, activations=activations, dtype=dtype, **SIZES)
    theirs = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype))
    with torch.inference_mode():
        expected = theirs(torch.tensor([PROMPT])).logits[0]

    loaded = load_model(path, dtype)

    assert loaded.weight_format == f"codes of the file (compressed-tensors {kind})"
    assert loaded.fused is not None and loaded.forward.reason == ""
    layer = loaded.model.model.layers[0].mlp.up_proj
    assert isinstance(layer, PackedLinear) and isinstance(layer.packed, QuantizedWeight)
    assert layer.packed.format.bits == int(kind[1])
    assert layer.packed.activations == (codes.BY_TOKEN if "A8" in kind else codes.PLAIN)
    assert torch.equal(layer.weight, theirs.model.layers[0].mlp.up_proj.weight)
    away = (own_logits(loaded, PROMPT) - expected).square().mean().sqrt() / expected.std()
    # A token's scale in bfloat16 is another one, and a number in the middle may get either code.
    most = {"float32": 1e-4, "bfloat16": 0.1} if "A8" not in kind else dict.fromkeys(DTYPES, 0.15)
    assert away <= most[dtype]


def test_layers_with_static_scales_of_activations_compute_themselves(tmp_path: Path):
    loaded = load_model(save_w8a8(tmp_path / "model", activations=STATIC), "float32")
    assert loaded.quantization is None
    assert type(loaded.model.model.layers[0].mlp.up_proj) is nn.Linear
