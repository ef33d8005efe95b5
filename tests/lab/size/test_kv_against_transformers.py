"""What we read from a config is what ``transformers`` makes of it.

Two comparisons: our table of defaults with the config classes, and our sizes with the tensors
that a tiny random model leaves in its cache.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PretrainedConfig

from ostinato.lab.size.kv_bytes import KVBytes, kv_bytes
from ostinato.lab.size.kv_families import FAMILIES
from ostinato.lab.size.kv_layers import layer_plan

pytestmark = pytest.mark.one_case_in(3)

NUM_TOKENS = 5

# Their classes' bare defaults describe no model: 4,096 is no multiple of 96 heads; no layers.
NO_MODEL_BY_DEFAULT = {"glm4_moe", "nemotron_h"}
# Its class lives in remote code only.
NO_CLASS = {"chatglm"}

SMALL = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS = {
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "n_group": 1,
    "topk_group": 1,
}
LATENT = {
    "num_key_value_heads": 4,
    "head_dim": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": None,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
}
DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 16,
}
MAMBA2 = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 16}
EARLY = {"head_dim": 16}  # such models know no other than the width divided by the heads
PER_LAYER_INPUTS = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 64}

MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {},
    "mistral": {"sliding_window": 32},
    "gpt2": EARLY | {"n_embd": 64, "n_layer": 4, "n_head": 4},
    "gpt_bigcode": EARLY | {"n_embd": 64, "n_layer": 4, "n_head": 4},
    "gpt_neo": EARLY
    | {
        "num_layers": 4,
        "num_heads": 4,
        "attention_types": [[["global", "local"], 2]],
        "window_size": 32,
    },
    "gpt_neox": EARLY,
    "bloom": EARLY | {"n_layer": 4, "n_head": 4},
    "opt": EARLY | {"ffn_dim": 64, "word_embed_proj_dim": 64, "max_position_embeddings": 64},
    "mpt": EARLY | {"d_model": 64, "n_heads": 4, "n_layers": 4},
    "falcon": {"multi_query": True, "new_decoder_architecture": False, "num_kv_heads": 4},
    "gemma2": {"sliding_window": 32},
    "gemma3_text": {"sliding_window": 32, "num_hidden_layers": 7},
    "gemma3n_text": {
        "num_hidden_layers": 10,
        "num_kv_shared_layers": 5,
        "altup_num_inputs": 2,
        "laurel_rank": 8,
        "sliding_window": 32,
        **PER_LAYER_INPUTS,
    },
    "gemma4_text": {
        "num_hidden_layers": 6,
        "global_head_dim": 64,
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
        "sliding_window": 32,
        **PER_LAYER_INPUTS,
    },
    "llama4_text": {"attention_chunk_size": 32, "intermediate_size_mlp": 32, **EXPERTS},
    "qwen2": {"use_sliding_window": True, "sliding_window": 32, "max_window_layers": 2},
    "deepseek_v2": {**LATENT, **EXPERTS},
    "deepseek_v3": {**LATENT, **EXPERTS},
    "deepseek_v32": {
        **LATENT,
        **EXPERTS,
        "q_lora_rank": 16,
        "index_head_dim": 16,
        "index_n_heads": 2,
        "index_topk": 4,
    },
    "kimi_linear": {
        **LATENT,
        **EXPERTS,
        "layer_types": ["full_attention", "linear_attention"] * 2,
        "linear_head_dim": 8,
        "linear_num_heads": 4,
    },
    "qwen3_next": {**DELTA, **EXPERTS},
    "qwen3_5_text": DELTA,
    "olmo_hybrid": DELTA | {"linear_num_value_heads": 2},
    "mamba": {"state_size": 16},
    "mamba2": {"num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 2, "chunk_size": 8},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "use_mamba_kernels": False}
    | {"num_experts": 2, "num_experts_per_tok": 1},
    "bamba": {"attn_layer_indices": [1], **MAMBA2},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 2, **MAMBA2, **EXPERTS},
    "falcon_h1": {"mamba_d_ssm": 128, **MAMBA2},
    "nemotron_h": {
        "layers_block_type": ["mamba", "moe", "attention", "mlp"],
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "ssm_state_size": 16,
        "n_groups": 2,
        "moe_shared_expert_intermediate_size": 32,
        **EXPERTS,
    },
    "lfm2": {"layer_types": ["conv", "conv", "full_attention", "conv"]},
}


def library_name(family: str) -> str:
    """The name of the class that holds a family's text defaults."""
    return f"{family}_text" if f"{family}_text" in CONFIG_MAPPING else family


@pytest.mark.parametrize("family", sorted(FAMILIES.keys() - NO_CLASS - NO_MODEL_BY_DEFAULT))
def test_a_bare_model_type_is_read_with_the_defaults_of_its_class(family: str):
    """Dropping every key from a config must give what its class would fill in."""
    model_type = library_name(family)
    written = CONFIG_MAPPING[model_type]().to_dict()

    assert layer_plan({"model_type": model_type}).layers == layer_plan(written).layers


@pytest.mark.parametrize("model_type", MODELS)
def test_sizes_are_those_of_the_tensors_in_the_library_s_cache(model_type: str):
    """Five tokens run through a tiny model leave exactly the bytes that the config promises."""
    config = small_config(model_type)
    cache = cache_after_a_prompt(config)

    size = kv_bytes(config.to_dict(), dtype="bfloat16")
    assert size.whole.sequence_bytes(NUM_TOKENS) == cached_bytes(cache)
    assert layer_bytes(size) == sorted(cached_bytes(vars(layer)) for layer in cache.layers)


def small_config(model_type: str) -> PretrainedConfig:
    """A config of this family that makes a model of a few kilobytes."""
    values = {**SMALL, **MODELS[model_type]}
    if model_type == "falcon":  # a property there
        del values["head_dim"], values["num_key_value_heads"]
    return CONFIG_MAPPING[model_type](**values)


@torch.no_grad()
def cache_after_a_prompt(config: PretrainedConfig) -> Any:
    """What a random model of this config keeps of five tokens."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    output = model(torch.arange(3, 3 + NUM_TOKENS)[None], use_cache=True)
    return output.get("past_key_values", None) or output["cache_params"]


def cached_bytes(value: object) -> int:
    """Bytes of all tensors below a value, bookkeeping aside."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors(value))


def tensors(value: object) -> Iterator[torch.Tensor]:
    """Every tensor in nested dicts, lists and cache layers."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            if not str(key).startswith("_"):
                yield from tensors(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors(item)
    elif hasattr(value, "layers"):
        for layer in value.layers:
            yield from tensors(vars(layer))


def layer_bytes(size: KVBytes) -> list[int]:
    """Bytes that each layer keeps of the prompt, smallest first."""
    return sorted(
        (NUM_TOKENS * group.token_bytes + group.state_bytes) // group.num_layers
        for group in size.groups
        for _ in range(group.num_layers)
    )
