"""Experts in GPTQ, AWQ and compressed-tensors run from the codes of their checkpoint."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from ostinato.errors import UnsupportedModel
from ostinato.runner.attention.native_backend import NativeAttention
from ostinato.runner.experts.mixture import PackedExperts
from ostinato.runner.forward.codes import BY_TOKEN
from ostinato.runner.forward.quantized import QuantizedWeight
from ostinato.runner.loaded_model import LoadedModel
from ostinato.runner.loading.word_source import WordSource
from ostinato.runner.model_loader import load_model
from ostinato.runner.native.packed import required_library
from tests.runner.bench import Bench, logits_in_steps, own_logits, random_prompt
from tests.support.checkpoints import edit_config
from tests.support.instruction_sets import needs_library
from tests.support.quantized import STATIC, save_w4a16, save_w8a8
from tests.support.word_checkpoints import save_words

pytestmark = needs_library

PROMPT = random_prompt(1, 20)
QWEN: dict[str, Any] = {"moe_intermediate_size": 64, "num_experts": 24, "num_experts_per_tok": 4}
"""More experts than the trial takes."""

FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": QWEN,
    "qwen2_moe": {**QWEN, "shared_expert_intermediate_size": 96},
    "mixtral": {"num_local_experts": 20},
    "deepseek_v3": {
        "moe_intermediate_size": 64,
        "num_hidden_layers": 4,
        "v_head_dim": 16,
        "head_dim": 8,
    },
    "glm4_moe": {
        **{"moe_intermediate_size": 64, "num_hidden_layers": 4, "first_k_dense_replace": 1},
        **{"n_routed_experts": 8, "num_experts_per_tok": 2},
    },
}
KINDS: dict[str, dict[str, Any]] = {
    "GPTQ": {"method": "gptq"},
    "GPTQ, symmetric": {"method": "gptq", "is_symmetric": True},
    "GPTQ by columns": {"method": "gptq", "group_size": -1},
    "GPTQ in act-order": {"method": "gptq", "act_order": True},
    "GPTQ v2 in 8 bits": {"method": "gptq", "bits": 8, "checkpoint_format": "gptq_v2"},
    "AWQ": {"method": "awq", "version": "gemm", "zero_point": True},
}


def stacked(plain: dict[str, Tensor], own: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return each weight of a checkpoint as the model has it, by the checkpoint's name."""
    parts = {"gate_proj": 0, "up_proj": 1, "w1": 0, "w3": 1, "down_proj": None, "w2": None}
    weights = {}
    for name in plain:
        found = re.fullmatch(r"(.*\.experts)\.(\d+)\.(\w+)\.weight", name)
        if found is None:
            weights[name] = own[name]
            continue
        path, expert = found[1].replace("block_sparse_moe", "mlp"), int(found[2])
        half = parts[found[3]]
        if half is None:
            weights[name] = own[f"{path}.down_proj"][expert]
        else:
            weights[name] = own[f"{path}.gate_up_proj"][expert].chunk(2)[half]
    return weights


def packed_of(loaded: LoadedModel) -> list[Any]:
    return [
        part.packed
        for module in loaded.model.modules()
        if isinstance(module, PackedExperts)
        for part in module.parts.values()
    ]


def check(path: Path, plain: dict[str, Tensor], error: float = 1e-5) -> LoadedModel:
    """Compare weights with the definition, and logits with those that it gives in float64."""
    loaded = load_model(path, "float32", weight_cache_bytes=0)
    own = stacked(plain, loaded.model.state_dict())
    for name, weight in plain.items():  # a code times a scale of 16 bits is exact in float32
        assert torch.equal(own[name], weight.float()), name
    exact = load_model(path, "float64", forward="plain", weight_cache_bytes=0)
    state = exact.model.state_dict()
    for name, weight in stacked(plain, state).items():
        assert torch.equal(weight, plain[name]), name
    expected = own_logits(exact, PROMPT)
    away = (own_logits(loaded, PROMPT) - expected).square().mean().sqrt() / expected.std()
    assert away <= error, away
    return loaded


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        *(("qwen3_moe", kind) for kind in KINDS),
        ("qwen2_moe", "GPTQ"),
        ("mixtral", "GPTQ in act-order"),
        ("deepseek_v3", "AWQ"),
        ("glm4_moe", "GPTQ, symmetric"),
    ],
)
def test_experts_are_codes_of_the_checkpoint(family: str, kind: str, tmp_path: Path):
    plain = save_words(tmp_path, family=family, changes=FAMILIES[family], **KINDS[kind])
    assert any(".experts.0." in name for name in plain)
    loaded = check(tmp_path, plain)
    bits = KINDS[kind].get("bits", 4)
    for packed in packed_of(loaded):
        assert isinstance(packed, QuantizedWeight) and packed.format.bits == bits
        assert packed.format.has_zeros == ("symmetric" not in kind)
    assert packed_of(loaded)
    method = kind.split()[0].strip(",")
    assert loaded.weight_format == f"codes of the file ({method} W{bits}A16)"
    assert loaded.forward.name == "fused"
