"""What is not understood is refused by name; nothing is guessed in silence."""

import pytest

from ostinato.errors import ConfigError, UnsupportedModel
from ostinato.lab.size.kv_bytes import kv_bytes
from tests.lab.size.known_configs import (
    DEEPSEEK_V3,
    GEMMA_2_2B,
    GEMMA_3_1B,
    LLAMA_3_8B,
    MISTRAL_7B,
    UNKNOWN,
)


@pytest.mark.parametrize(
    ("config", "error", "named"),
    [
        ({"model_type": "bert", "num_hidden_layers": 2}, UnsupportedModel, "num_attention"),
        ({}, UnsupportedModel, "num_hidden_layers"),
        ({"model_type": "t5", "is_encoder_decoder": True}, UnsupportedModel, "encoder_decoder"),
        (UNKNOWN | {"mamba_d_state": 16}, UnsupportedModel, "mamba_d_state=16"),
        (UNKNOWN | {"v_head_dim": 16}, UnsupportedModel, "v_head_dim=16"),
        (UNKNOWN | {"sliding_window": 128}, UnsupportedModel, "sliding_window=128"),
        (UNKNOWN | {"layer_types": ["full_attention", "odd"]}, UnsupportedModel, "'odd'"),
        (UNKNOWN | {"layer_types": ["mamba", "mamba"]}, UnsupportedModel, "linear_attention"),
        (UNKNOWN | {"model_type": "longcat_flash"}, UnsupportedModel, "longcat_flash"),
        (LLAMA_3_8B | {"cross_attention_layers": [3]}, UnsupportedModel, "cross_attention"),
        (GEMMA_3_1B | {"use_bidirectional_attention": True}, UnsupportedModel, "bidirectional"),
        (LLAMA_3_8B | {"num_hidden_layers": "32"}, ConfigError, "num_hidden_layers='32'"),
        (LLAMA_3_8B | {"num_hidden_layers": 0}, ConfigError, "num_hidden_layers=0"),
        (LLAMA_3_8B | {"num_key_value_heads": True}, ConfigError, "num_key_value_heads=True"),
        (LLAMA_3_8B | {"num_key_value_heads": 5}, ConfigError, "num_key_value_heads=5"),
        (LLAMA_3_8B | {"num_key_value_heads": [8, 8]}, ConfigError, r"\[8, 8\]"),
        (LLAMA_3_8B | {"num_attention_heads": 24}, ConfigError, "hidden_size=4096"),
        (LLAMA_3_8B | {"n_layer": 31}, ConfigError, "num_hidden_layers=32, n_layer=31"),
        (LLAMA_3_8B | {"layer_types": ["full_attention"]}, ConfigError, "1 layers"),
        (LLAMA_3_8B | {"layer_types": "full"}, ConfigError, "layer_types='full'"),
        (MISTRAL_7B | {"sliding_window": -1}, ConfigError, "sliding_window=-1"),
        (
            LLAMA_3_8B
            | {"model_type": "qwen2", "layer_types": ["sliding_attention"] * 32}
            | {"sliding_window": 4096, "use_sliding_window": False},
            ConfigError,
            "use_sliding_window",
        ),
        (GEMMA_2_2B | {"sliding_window": None}, ConfigError, "sliding_window is not set"),
        (GEMMA_3_1B | {"num_kv_shared_layers": 26}, ConfigError, "num_kv_shared_layers=26"),
        (GEMMA_3_1B | {"num_kv_shared_layers": 27}, ConfigError, "num_kv_shared_layers=27"),
        (LLAMA_3_8B | {"per_layer_config": {"40": {}}}, ConfigError, "'40'"),
        (LLAMA_3_8B | {"torch_dtype": "uint3"}, ConfigError, "uint3"),
        (
            {"model_type": "nemotron_h", "hybrid_override_pattern": "MX"},
            UnsupportedModel,
            "hybrid_override_pattern='MX'",
        ),
        (
            {"model_type": "gpt_neo", "attention_types": [["global", 12]]},
            ConfigError,
            "attention_types",
        ),
    ],
)
def test_a_config_is_refused_by_the_key_at_fault(config, error, named):
    with pytest.raises(error, match=named):
        kv_bytes(config)


def test_an_unknown_family_that_says_everything_is_read_by_the_general_rule():
    """And the answer says so."""
    size = kv_bytes(UNKNOWN)

    assert size.token_bytes == 2 * 2 * 2 * 16 * 2
    assert any("'newcomer'" in note for note in size.notes)


def test_an_unknown_family_with_a_latent_is_read_too():
    """Kimi K2 and others have DeepSeek's shape under a name of their own."""
    config = DEEPSEEK_V3 | {"model_type": "kimi_k2"}

    assert kv_bytes(config).token_bytes == 70_272


def test_keys_that_are_switched_off_are_no_hints():
    """Older files carry every key of the base class."""
    config = UNKNOWN | {"add_cross_attention": False, "cross_attention_hidden_size": None}

    assert kv_bytes(config).token_bytes == 256
