"""Models that can be served correctly; all others are refused at load, with the reason."""

from typing import Any

import pytest
import torch
from torch import nn
from transformers import BloomConfig

from ostinato.errors import UnsupportedModel
from ostinato.runner.loaded_model import LoadedModel
from ostinato.runner.loading.model_support import UNLIMITED_TOKENS, check_config, length_limit
from ostinato.runner.model_call import ModelCall
from ostinato.runner.model_loader import load_model
from ostinato.runner.probe import probe_model
from tests.runner.conftest import Served
from tests.support.models.checkpoints import Checkpoints, make_config
from tests.support.models.model_families import MAX_LENGTH

LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 6,
    "long_factor": [3.0] * 6,
    "original_max_position_embeddings": 64,
}


@pytest.mark.parametrize(
    ("family", "said"),
    [
        ("t5", "encoder-decoder"),
        ("rwkv", "or carry a state that Ostinato knows"),
        ("bloom", "attend through the attention interface"),
        ("falcon", "does not call its attention through the interface"),
        ("mpt", "does not call its attention through the interface"),
        ("doge", "works on its attention mask itself"),
    ],
)
def test_models_without_causal_attention_over_tokens_are_refused(
    family: str, said: str, checkpoints: Checkpoints
):
    with pytest.raises(UnsupportedModel, match=said):
        load_model(checkpoints.path(family), "float32")


def test_a_model_type_that_transformers_does_not_know_is_refused(checkpoints: Checkpoints):
    """Code that comes with a checkpoint is not run."""
    with pytest.raises(UnsupportedModel, match=r"'nonesuch' is not in the installed transformers"):
        load_model(checkpoints.broken("unknown type"))


@pytest.mark.parametrize(
    ("family", "changes", "said"),
    [
        ("gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("qwen3", {"layer_types": ["chunked_attention"] * 2}, "chunked_attention"),
        ("llama", {"rope_parameters": {"rope_type": "novel", "rope_theta": 1e4}}, "'novel'"),
    ],
)
def test_a_config_that_asks_for_what_we_do_not_do_is_refused_before_weights_are_read(
    family: str, changes: dict[str, Any], said: str
):
    config = make_config(family)
    for name, value in changes.items():
        setattr(config, name, value)

    with pytest.raises(UnsupportedModel, match=said):
        check_config(config)


def test_the_length_limit_is_that_of_the_positions():
    assert length_limit(make_config("llama")).num_tokens == MAX_LENGTH
    assert length_limit(make_config("gpt2")).num_tokens == MAX_LENGTH


def test_a_config_without_a_limit_has_none():
    assert length_limit(BloomConfig()).num_tokens == UNLIMITED_TOKENS


def test_long_rope_is_served_as_far_as_it_does_not_change_its_frequencies(checkpoints: Checkpoints):
    """Beyond 64 tokens all keys of a sequence would have to be computed anew."""
    path = checkpoints.path("phi3", rope_parameters=LONGROPE, original_max_position_embeddings=64)
    loaded = load_model(path, "float64")

    assert loaded.max_model_len == 64
    assert "longrope" in loaded.length_limit.reason


def test_dynamic_rope_is_served_up_to_its_original_length(checkpoints: Checkpoints):
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}

    assert load_model(checkpoints.path("llama", rope_parameters=rope)).max_model_len == MAX_LENGTH


def probe(loaded: LoadedModel) -> None:
    probe_model(loaded.model, ModelCall(loaded.model))


@pytest.fixture
def fresh(checkpoints: Checkpoints) -> LoadedModel:
    """A model that a test may spoil."""
    return load_model(checkpoints.path("llama"), "float64")


def test_the_probe_leaves_a_model_as_it_was(fresh: LoadedModel):
    before = {name: tensor.clone() for name, tensor in fresh.model.state_dict().items()}

    probe(fresh)

    assert fresh.model.config._attn_implementation == "ostinato"
    after = fresh.model.state_dict()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())


def test_a_state_that_runs_along_the_row_is_found_by_the_probe(fresh: LoadedModel):
    """A causal convolution, as in recurrent hybrids: chunks and strangers give it away."""

    def shift(_module: nn.Module, _inputs: Any, output: torch.Tensor) -> torch.Tensor:
        return output + 0.5 * torch.roll(output, 1, dims=1)

    fresh.model.model.layers[1].mlp.register_forward_hook(shift)

    with pytest.raises(UnsupportedModel, match="differ from those of the model's own attention"):
        probe(fresh)


def test_a_layer_that_never_asks_is_found_by_the_probe(fresh: LoadedModel):
    class Silent(nn.Module):
        def forward(self, hidden_states: torch.Tensor, **_: Any) -> tuple[torch.Tensor, None]:
            return hidden_states, None

    fresh.model.model.layers[1].self_attn = Silent()

    with pytest.raises(UnsupportedModel, match=r"of the 2 layers .* only \[0\] attend"):
        probe(fresh)


def test_positions_that_a_model_counts_otherwise_are_found_by_the_probe(
    fresh: LoadedModel, monkeypatch: pytest.MonkeyPatch
):
    """RoBERTa's begin behind the padding id; left to itself, this one counts by twos."""
    inner = fresh.model.model
    own_forward = inner.forward

    def by_twos(input_ids: torch.Tensor, position_ids: Any = None, **keywords: Any) -> Any:
        if position_ids is None:
            position_ids = 2 * torch.arange(input_ids.shape[1])[None]
        return own_forward(input_ids=input_ids, position_ids=position_ids, **keywords)

    monkeypatch.setattr(inner, "forward", by_twos)

    with pytest.raises(UnsupportedModel, match="differ"):
        probe(fresh)


def test_logits_that_are_not_finite_cannot_be_vouched_for(fresh: LoadedModel):
    with torch.no_grad():
        fresh.model.model.norm.weight.fill_(torch.nan)

    with pytest.raises(UnsupportedModel, match="not finite"):
        probe(fresh)


def test_a_model_that_cannot_be_called_our_way_is_refused_with_its_own_words(fresh: LoadedModel):
    def fail(*_: Any) -> None:
        raise RuntimeError("needs an image")

    fresh.model.register_forward_pre_hook(fail)

    with pytest.raises(UnsupportedModel, match="RuntimeError: needs an image"):
        probe(fresh)


def test_heads_that_differ_from_layer_to_layer_are_noted_layer_by_layer(served: Served):
    windows = [layer.sliding_window for layer in served("gpt_oss").kv_spec.layers]

    assert windows == [8, None]
