"""A model that is read weight by weight is the model that ``transformers`` reads as a whole."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from ostinato.runner import model_loader
from ostinato.runner.attention.registration import register
from ostinato.runner.loaded_model import LoadedModel
from ostinato.runner.loading import streamed
from ostinato.runner.loading.model_support import check_attention_interface
from ostinato.runner.loading.skeleton import (
    build_skeleton,
    cut_to_trial,
    trial_config,
    trial_layers,
)
from ostinato.runner.loading.streamed import stream_model
from ostinato.runner.model_loader import load_model
from ostinato.runner.probe import observe_without_weights
from ostinato.runner.states.store import StateSpec
from tests.runner.bench import Bench, has_same_weights, random_prompt
from tests.support.models.checkpoints import Checkpoints, make_config
from tests.support.models.images import PROCESSORS, image_checkpoint, picture

STREAMED: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "mistral": {},
    "gemma2": {"num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2},
    "gemma3_text": {"num_hidden_layers": 3, "layer_types": ["sliding_attention"] * 3},
    "phi3": {},
    "granite": {},
    "glm": {},
    "qwen3_moe": {"num_experts": 40},
    "mixtral": {"num_local_experts": 8},
    "deepseek_v3": {"num_hidden_layers": 4},
    "glm4_moe": {"num_hidden_layers": 4, "moe_intermediate_size": 32, "n_routed_experts": 20},
    "qwen3_next": {},
    "qwen3_5_moe_text": {},
    "granitemoehybrid": {"num_hidden_layers": 6, "layer_types": ["mamba", "attention"] * 3},
    "falcon_h1": {"num_hidden_layers": 6},
    "lfm2": {},
    "nemotron_h": {
        "num_hidden_layers": 8,
        "layers_block_type": ["mamba", "moe", "attention", "mlp"] * 2,
    },
    "jamba": {},
}


def load_whole(path: Path, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> LoadedModel:
    with monkeypatch.context() as patch:
        patch.setattr(model_loader, "stream_model", lambda *_: None)
        return load_model(path, **settings)


def logits_of(loaded: LoadedModel) -> torch.Tensor:
    """Return the logits of a prompt in two steps, through blocks."""
    bench = Bench(loaded, num_state_slots=1)
    sequence = bench.sequence(random_prompt(1, 21), state_slot=0)
    return torch.cat([bench.logits(sequence.next(13)), bench.logits(sequence.rest())])


def vectors_of(loaded: LoadedModel) -> torch.Tensor:
    """Return what the encoder makes of a picture."""
    assert loaded.vision is not None
    return loaded.vision.encode(np.asarray(picture(1)))


def same(one: LoadedModel, other: LoadedModel) -> None:
    assert one.forward.name == other.forward.name and one.forward.reason == other.forward.reason
    assert one.kv_spec == other.kv_spec and one.state_spec == other.state_spec
    assert one.fingerprint == other.fingerprint
    assert one.eos_token_ids == other.eos_token_ids and one.weight_format == other.weight_format
    assert has_same_weights(one, other)
    assert one.size == other.size
    buffers = dict(other.model.named_buffers())
    assert all(torch.equal(buffer, buffers[name]) for name, buffer in one.model.named_buffers())
    assert torch.equal(logits_of(one), logits_of(other))


SETTINGS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("qwen3", {"tie_word_embeddings": True}, {"dtype": "bfloat16", "quantization": "int8"}),
    ("qwen3", {"tie_word_embeddings": False}, {"dtype": "bfloat16", "quantization": "int4"}),
    ("llama", {}, {"dtype": "float64", "forward": "plain"}),
    ("llama", {}, {"dtype": "float16", "forward": "packed"}),
]
"""Weights that are quantized while they are read, and models that are not fused."""


@pytest.mark.one_case_in(2)
@pytest.mark.parametrize(
    ("family", "changes", "settings"),
    [*((name, changes, {"dtype": "bfloat16"}) for name, changes in STREAMED.items()), *SETTINGS],
)
def test_every_family_is_read_as_a_whole_one_is(
    family: str,
    changes: dict[str, Any],
    settings: dict[str, Any],
    checkpoints: Checkpoints,
    monkeypatch: pytest.MonkeyPatch,
):
    path = checkpoints.path(family, **changes)
    whole = load_whole(path, monkeypatch, **settings)

    monkeypatch.setattr(model_loader, "read_whole", None)
    same(load_model(path, **settings), whole)


@pytest.mark.one_case_in(2)
@pytest.mark.parametrize("family", PROCESSORS)
def test_encoders_of_images_are_read_with_their_model(
    family: str, checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
):
    """Published checkpoints of these families name most weights otherwise than the model."""
    path = image_checkpoint(checkpoints, family)
    whole = load_whole(path, monkeypatch, dtype="bfloat16")

    monkeypatch.setattr(model_loader, "read_whole", None)
    loaded = load_model(path, "bfloat16")

    same(loaded, whole)
    assert torch.equal(vectors_of(loaded), vectors_of(whole))


@pytest.mark.parametrize("change", [0.0, 1.0])
def test_a_tied_head_that_is_there_as_well_is_read_if_it_is_the_embedding(
    change: float,
    checkpoints: Checkpoints,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    """Many published checkpoints have both; with other numbers it is for ``transformers``."""
    tied = checkpoints.path("qwen3", tie_word_embeddings=True)
    path = Path(shutil.copytree(tied, tmp_path / "both"))
    weights = load_file(path / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone() + change
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    streamed: list[bool] = []

    def stream(*arguments: Any) -> Any:
        built = stream_model(*arguments)
        streamed.append(built is not None)
        return built

    monkeypatch.setattr(model_loader, "stream_model", stream)
    loaded = load_model(path, "bfloat16")

    assert streamed == [change == 0.0]
    same(loaded, load_whole(path, monkeypatch, dtype="bfloat16"))


@pytest.mark.parametrize(
    ("family", "experts", "kept"),
    [
        ("qwen3_moe", {"num_experts": 128, "num_experts_per_tok": 8}, 16),
        ("qwen3_moe", {"num_experts": 128, "num_experts_per_tok": 20}, 40),
        ("mixtral", {"num_local_experts": 8}, 8),
        ("deepseek_v3", {"n_routed_experts": 64, "n_group": 8}, 64),
    ],
)
def test_a_trial_has_few_experts_unless_they_are_in_groups(
    family: str, experts: dict[str, Any], kept: int
):
    config = make_config(family, **experts)
    name, count = next(iter(experts.items()))

    assert getattr(trial_config(config), name) == kept
    assert getattr(config, name) == count, "the model keeps all of them"


def test_a_trial_has_the_first_layer_of_each_kind():
    kinds_of_layers = ["sliding_attention"] * 2 + ["full_attention"] + ["sliding_attention"] * 3
    config = make_config("gemma3_text", num_hidden_layers=6, layer_types=kinds_of_layers)
    register()
    observed = observe_without_weights(check_attention_interface(config))
    assert observed is not None

    model = build_skeleton(config, torch.bfloat16)

    assert trial_layers(model, *observed) == 3
    cut_to_trial(model, 3)
    assert len(model.get_decoder().layers) == 3 == model.config.num_hidden_layers
    assert config.num_hidden_layers == 6, "the config of the model stays"
    assert all(parameter.is_meta for parameter in model.parameters())


@pytest.mark.parametrize(("quantization", "forward"), [(None, "plain"), ("int4", "auto")])
def test_packed_weights_count_among_the_parameters(
    quantization: Any, forward: Any, checkpoints: Checkpoints
):
    """How long a load from a tier may take is estimated by them."""
    path = checkpoints.path("qwen3", tie_word_embeddings=True)
    parameters = load_file(path / "model.safetensors").values()

    loaded = load_model(path, "bfloat16", forward=forward, quantization=quantization)

    assert loaded.size.num_parameters == sum(each.numel() for each in parameters)


def test_states_that_only_a_model_without_weights_has_are_not_believed(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
):
    """Then all layers are looked at with their weights."""

    def observe(model: Any) -> Any:
        observed = observe_without_weights(model)
        assert observed is not None
        spec, states, styles = observed
        wider = {n: (replace(shapes[0], shape=(1,)),) for n, shapes in states.layers.items()}
        return spec, StateSpec(wider), styles

    path = checkpoints.path("lfm2")
    whole = load_whole(path, monkeypatch, dtype="bfloat16")
    monkeypatch.setattr(streamed, "observe_without_weights", observe)

    same(load_model(path, "bfloat16"), whole)
