"""Experts in GPTQ, AWQ and compressed-tensors run from the codes of their checkpoint."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from ostinato.errors import BrokenCheckpoint, UnsupportedModel
from ostinato.runner.forward.codes import BY_TOKEN, PLAIN
from ostinato.runner.forward.quantized import QuantizedWeight
from ostinato.runner.loaded_model import LoadedModel
from ostinato.runner.loading.word_source import WordWeight
from ostinato.runner.model_loader import load_model
from ostinato.runner.native.library import Isa
from tests.runner.bench import (
    has_same_bits_in_any_steps,
    own_logits,
    packed_experts,
    random_prompt,
)
from tests.support.instruction_sets import needs_library
from tests.support.models.checkpoints import edit_config
from tests.support.models.model_families import HYBRIDS
from tests.support.models.quantized import BY_TOKEN as BY_TOKENS
from tests.support.models.quantized import STATIC, save_w4a16, save_w8a8
from tests.support.models.word_checkpoints import KINDS, save_words

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
    "qwen3_next": {**HYBRIDS["qwen3_next"], "moe_intermediate_size": 64},
    "minimax_m2": {"num_local_experts": 8, "num_hidden_layers": 4, "num_experts_per_tok": 2},
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


def check(path: Path, plain: dict[str, Tensor], error: float = 1e-5) -> LoadedModel:
    """Compare weights with the definition, and logits with those that it gives in float64."""
    loaded = load_model(path, "float32", weight_cache_bytes=0)
    own = stacked(plain, loaded.model.state_dict())
    for name, weight in plain.items():  # a code times a scale of 16 bits is exact in float32
        assert torch.equal(own[name], weight.float()), name
    exact = load_model(path, "float64", forward="plain", weight_cache_bytes=0)
    state = exact.model.state_dict()
    for name, weight in stacked(plain, state).items():
        assert torch.equal(weight, plain[name].float().double()), name
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
        ("qwen3_next", "GPTQ v2 in 8 bits"),
        ("minimax_m2", "AWQ"),
    ],
)
def test_experts_are_codes_of_the_checkpoint(family: str, kind: str, tmp_path: Path):
    plain = save_words(tmp_path, family=family, changes=FAMILIES[family], **KINDS[kind])
    assert any(".experts.0." in name for name in plain)
    loaded = check(tmp_path, plain)
    bits = KINDS[kind].get("bits", 4)
    for packed in packed_experts(loaded):
        assert isinstance(packed, QuantizedWeight) and packed.format.bits == bits
        assert packed.format.has_zeros == ("symmetric" not in kind)
    assert packed_experts(loaded)
    method = kind.split()[0].strip(",")
    assert loaded.weight_format == f"codes of the file ({method} W{bits}A16)"
    assert loaded.forward.name == "fused"


@pytest.mark.parametrize("kind", ["W4A16", "W4A16 with zeros", "W8A16", "W8A8"])
def test_experts_are_codes_of_a_checkpoint_of_compressed_tensors(kind: str, tmp_path: Path):
    """Weights by channel or in groups, and activations that are rounded by token."""
    pytest.importorskip("compressed_tensors")
    sizes = {**QWEN, "hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
    if kind.startswith("W4"):
        plain = save_w4a16(
            tmp_path, has_zeros="zeros" in kind, family="qwen3_moe", dtype="float32", **sizes
        )
    else:
        activations = BY_TOKENS if kind == "W8A8" else None
        save_w8a8(tmp_path, "qwen3_moe", activations, dtype="float32", **sizes)
        plain = exact_w8(tmp_path)
    edit_config(tmp_path, dtype="float32")
    loaded = load_model(tmp_path, "float32", weight_cache_bytes=0)

    assert loaded.weight_format == f"codes of the file (compressed-tensors {kind[:5].strip()})"
    assert (loaded.forward.name, loaded.forward.reason) == ("fused", "")
    assert {packed.activations for packed in packed_experts(loaded)} == {
        BY_TOKEN if kind == "W8A8" else PLAIN
    }
    assert {packed.format.bits for packed in packed_experts(loaded)} == {int(kind[1])}
    check(tmp_path, plain, 0.15 if kind == "W8A8" else 1e-5)


def exact_w8(path: Path) -> dict[str, Tensor]:
    """Return what the weights are in float64, by name: codes of 8 bits by their output's scale."""
    state = load_file(path / "model.safetensors")
    plain = {}
    for name in [name.removesuffix("_scale") for name in state if name.endswith("_scale")]:
        codes = state.get(name)
        if codes is None:
            codes = (state[f"{name}_packed"].view(torch.uint8).int() - 128).view(
                *state[f"{name}_shape"]
            )
        plain[name] = codes.double() * state[f"{name}_scale"].double()
    return plain


@pytest.mark.parametrize(
    ("kept", "wide", "formats"),
    [
        (r"layers\.0\..*experts", "^$", [None, None, 4, 4]),
        ("down_proj", "^$", [4, None, 4, None]),
        (r"layers\.0\..*experts\.3\.up_proj", "^$", [None, 4, 4, 4]),
        (r"self_attn|shared_expert\.", r"experts\.[13]\.down", [4, 8, 4, 8]),
    ],
)
def test_layers_may_stay_plain_or_have_8_bits(
    kept: str, wide: str, formats: list[int | None], tmp_path: Path
):
    """A layer, a part of each expert, or one of a stack, which then is plain or in 8 bits."""
    changes = FAMILIES["qwen2_moe"]
    plain = save_words(tmp_path, "gptq", family="qwen2_moe", changes=changes, kept=kept, wide=wide)
    loaded = check(tmp_path, plain)
    own = [
        packed.format.bits if isinstance(packed, QuantizedWeight) else None
        for packed in packed_experts(loaded)
    ]
    assert own == formats


@pytest.mark.parametrize("is_whole", [False, True])
def test_a_router_may_be_quantized(is_whole: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """As some quantizers do unless they are told otherwise; its numbers are plain here."""
    chosen = r"(proj|mlp\.gate)\.weight$"
    plain = save_words(tmp_path, "gptq", family="qwen3_moe", changes=QWEN, chosen=chosen)
    assert "model.layers.0.mlp.gate.weight" in plain
    if is_whole:
        monkeypatch.setattr("ostinato.runner.model_loader.stream_model", lambda *_: None)
    loaded = check(tmp_path, plain)
    assert loaded.forward.name == "fused"
    assert all(isinstance(packed, QuantizedWeight) for packed in packed_experts(loaded))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_sequence_has_the_same_logits_in_whatever_steps_it_is_computed(
    isa: Isa, dtype: Any, tmp_path: Path
):
    """Although a row meets an order of its inputs in each of its experts."""
    save_words(tmp_path, family="qwen3_moe", changes=QWEN, **KINDS["GPTQ in act-order"])
    assert has_same_bits_in_any_steps(load_model(tmp_path, dtype, weight_cache_bytes=0))


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "deepseek_v3", "glm4_moe"])
def test_no_more_than_the_trial_is_ever_plain(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Two layers, 16 experts in each; then codes are packed as they are read, one by one."""
    save_words(tmp_path, "awq", family=family, changes=FAMILIES[family])
    experts: set[str] = set()
    later: list[str] = []
    plain = WordWeight.plain

    def counted(self: WordWeight, *arguments: Any) -> Tensor:
        (later if self.name in experts else experts.add(self.name) or []).append(self.name)
        return plain(self, *arguments)

    monkeypatch.setattr(WordWeight, "plain", counted)
    monkeypatch.setattr("ostinato.runner.model_loader.read_whole", None)
    load_model(tmp_path, "bfloat16", weight_cache_bytes=0)

    assert not later
    stacks = {re.sub(r"\.experts\..*", "", name) for name in experts if ".experts." in name}
    assert len({name for name in experts if ".experts." in name}) <= 16 * 3 * len(stacks)


@pytest.mark.parametrize("quantization", ["int8", "w4a8"])
def test_a_setting_replaces_the_codes_of_the_checkpoint(quantization: Any, tmp_path: Path):
    save_words(tmp_path, "gptq", family="qwen3_moe", changes=QWEN)
    loaded = load_model(tmp_path, "bfloat16", quantization=quantization, weight_cache_bytes=0)
    plain = load_model(tmp_path, "bfloat16", forward="plain", weight_cache_bytes=0)

    assert loaded.weight_format.startswith(f"int{8 if quantization == 'int8' else 4}")
    own, exact = loaded.model.state_dict(), plain.model.state_dict()
    for name in [name for name in own if ".experts." in name]:
        away = (own[name].float() - exact[name].float()).norm() / exact[name].float().norm()
        assert away < (0.02 if quantization == "int8" else 0.2)


def test_gates_and_ups_in_different_orders_are_refused(tmp_path: Path):
    save_words(tmp_path, "gptq", family="qwen3_moe", changes=QWEN, act_order=True, orders_by="^$")
    with pytest.raises(UnsupportedModel, match=r"\(desc_act\).*gates.*quantization='int4'"):
        load_model(tmp_path, weight_cache_bytes=0)


def test_experts_of_other_schemes_are_refused(tmp_path: Path):
    """Activations with static scales, which compressed-tensors computes for linear layers."""
    save_w8a8(tmp_path, "qwen3_moe", STATIC)
    said = r"qwen3_moe, quantized by compressed-tensors: .*experts.* is part of an expert"
    with pytest.raises(UnsupportedModel, match=f"{said}.*quantization='int4'"):
        load_model(tmp_path, "bfloat16")


def test_layers_of_other_bits_are_refused_by_name(tmp_path: Path):
    save_words(tmp_path, "gptq", family="qwen3_moe", changes=QWEN)
    state = load_file(tmp_path / "model.safetensors")
    name = "model.layers.1.mlp.experts.5.up_proj.qzeros"
    state[name] = state[name][:, :4].contiguous()
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UnsupportedModel, match=r"layers\.1.*5\.up_proj is quantized .* in 2 bits"):
        load_model(tmp_path, "bfloat16")


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_biases_of_zeros_that_the_model_lacks_are_left_out(value: float, tmp_path: Path):
    """AutoGPTQ writes them for every layer."""
    plain = save_words(tmp_path, "gptq", family="mixtral", changes=FAMILIES["mixtral"])
    state = load_file(tmp_path / "model.safetensors")
    for name, weight in plain.items():
        state[name.replace(".weight", ".bias")] = torch.full((len(weight),), value).half()
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    if value:
        with pytest.raises(BrokenCheckpoint, match="unexpected keys"):
            load_model(tmp_path, "float32")
    else:
        check(tmp_path, plain)
