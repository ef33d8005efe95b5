"""Configs of tiny models, by model type.

Heads are chosen so that every way of sharing them occurs, and windows are shorter than the prompts
of the tests.
"""

from typing import Any

VOCAB_SIZE = 320
MAX_LENGTH = 256
EOS_ID = 1
WINDOW = 8

BASE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_LENGTH,
    "pad_token_id": 0,
    "bos_token_id": 2,
    "eos_token_id": EOS_ID,
    "tie_word_embeddings": False,
}
_ALTERNATING = ["sliding_attention", "full_attention"]

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"head_dim": 16},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"head_dim": 16, "num_key_value_heads": 1},
    "qwen3_moe": {
        "head_dim": 12,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
    },
    "mistral": {"sliding_window": WINDOW, "head_dim": 12},
    "gemma2": {
        "head_dim": 16,
        "query_pre_attn_scalar": 16,
        "sliding_window": WINDOW,
        "layer_types": _ALTERNATING,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 20.0,
    },
    "gemma3_text": {
        "head_dim": 16,
        "query_pre_attn_scalar": 16,
        "num_key_value_heads": 1,
        "sliding_window": WINDOW,
        "layer_types": _ALTERNATING,
    },
    "phi3": {"num_key_value_heads": 4, "sliding_window": None},
    "olmo2": {"num_key_value_heads": 4},
    "gpt2": {"n_embd": 48, "n_layer": 3, "n_head": 4, "n_positions": MAX_LENGTH},
    "gpt_neox": {"rotary_pct": 0.5},
    "starcoder2": {"num_key_value_heads": 1, "sliding_window": 2 * WINDOW},
    "gpt_oss": {
        "head_dim": 16,
        "sliding_window": WINDOW,
        "layer_types": _ALTERNATING,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
    "granite": {"attention_multiplier": 0.2, "embedding_multiplier": 3.0},
    "cohere": {"num_key_value_heads": 4, "use_qk_norm": True},
    "stablelm": {"partial_rotary_factor": 0.5, "use_qkv_bias": True},
    "nemotron": {"head_dim": 12, "partial_rotary_factor": 0.5},
    "glm": {"head_dim": 16, "partial_rotary_factor": 0.5},
    "deepseek_v3": {
        "num_key_value_heads": 4,
        "kv_lora_rank": 16,
        "q_lora_rank": 24,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 12,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "moe_intermediate_size": 32,
    },
}
"""Model type and what its config says besides the common part. All of them can be served."""

_VISION: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
_QWEN_VISION: dict[str, Any] = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_heads": 2,
    "out_hidden_size": 48,
}


def _mrope(*section: int) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": list(section)}


COMPOSITES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "mistral3": (
        {"model_type": "mistral", "head_dim": 16, "sliding_window": None},
        {**_VISION, "model_type": "pixtral"},
    ),
    "llava": ({"model_type": "llama"}, {**_VISION, "model_type": "clip_vision_model"}),
    "gemma3": (FAMILIES["gemma3_text"], _VISION),
    "gemma4": (
        {
            **FAMILIES["gemma3_text"],
            "global_head_dim": 16,
            "num_kv_shared_layers": 0,
            "hidden_size_per_layer_input": 0,
        },
        _VISION,
    ),
    "qwen2_5_vl": ({"rope_parameters": _mrope(2, 2, 2)}, _QWEN_VISION),
    "qwen3_vl": (
        {"head_dim": 16, "rope_parameters": _mrope(2, 3, 3)},
        {**_QWEN_VISION, "deepstack_visual_indexes": [0]},
    ),
}
"""Models for images and text: what the config of each part says. Their text can be served."""

_WINDOWS: dict[str, Any] = {"sliding_window": WINDOW, "layer_types": _ALTERNATING}
_EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}
_ROUTED: dict[str, Any] = {
    "head_dim": 12,
    "n_routed_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_intermediate_size": 32,
}

MIXTURES: dict[str, dict[str, Any]] = {
    "qwen2_moe": _EXPERTS,
    "glm4_moe": {
        **_ROUTED,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 2.5,
        "partial_rotary_factor": 0.5,
    },
    "dots1": {**_ROUTED, "n_shared_experts": 2, "first_k_dense_replace": 1},
    "ernie4_5_moe": {**_ROUTED, "moe_num_experts": 4, "moe_k": 2, "moe_num_shared_experts": 1},
    "granitemoeshared": {**_ROUTED, "residual_multiplier": 0.3},
    "minimax_m2": _ROUTED,
    "hunyuan_v1_moe": {**_ROUTED, "num_experts": 4, "moe_topk": 2},
    "phimoe": {"num_local_experts": 4, "num_experts_per_tok": 2, "router_jitter_noise": 0.2},
    "cohere2_moe": {
        **_EXPERTS,
        **_WINDOWS,
        "head_dim": 16,
        "num_shared_experts": 2,
        "shared_expert_combination_strategy": "average",
        "norm_topk_prob": True,
    },
    "hy_v3": {**_ROUTED, "num_experts": 4, "router_scaling_factor": 2.5},
    "aria_text": {"moe_num_experts": 4, "moe_topk": 2, "moe_num_shared_experts": 1},
    "flint": {**_EXPERTS, "mlp_only_layers": []},
    "kolibri1": {**_EXPERTS, "head_dim": 12},
}
"""Mixtures with shared experts, or a router of their own, likewise: all are operations."""

GATED_MIXTURES: dict[str, dict[str, Any]] = {
    "laguna": {
        **_EXPERTS,
        **_WINDOWS,
        "head_dim": 16,
        "mlp_layer_types": ["dense", "sparse"],
        "moe_routed_scaling_factor": 2.5,
    },
    "afmoe": {
        **_ROUTED,
        **_WINDOWS,
        "num_experts": 4,
        "num_dense_layers": 1,
        "mup_enabled": True,
        "route_scale": 2.5,
    },
    "minimax_m3_vl_text": {
        **_ROUTED,
        "dense_intermediate_size": 64,
        "mlp_layer_types": ["dense", "sparse"],
    },
}
"""Mixtures whose attention, or dense part, is called."""

_DELTA: dict[str, Any] = {
    "head_dim": 16,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 8,
}
_MAMBA2: dict[str, Any] = {
    "mamba_n_heads": 6,
    "mamba_d_head": 16,
    "mamba_n_groups": 2,
    "mamba_d_state": 8,
    "mamba_chunk_size": 16,
}

HYBRIDS: dict[str, dict[str, Any]] = {
    "qwen3_next": {**_DELTA, **_EXPERTS},
    "qwen3_5_text": _DELTA,
    "qwen3_5_moe_text": {**_DELTA, **_EXPERTS},
    "olmo_hybrid": {**_DELTA, "linear_num_value_heads": 2},
    "granitemoehybrid": {
        "layer_types": ["mamba", "attention"],
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 32,
        **_MAMBA2,
    },
    "bamba": {"attn_layer_indices": [1], **_MAMBA2},
    "falcon_h1": {"mamba_d_ssm": 96, "mamba_rms_norm": False, **_MAMBA2},
    "nemotron_h": {
        "layers_block_type": ["mamba", "moe", "attention", "mlp"],
        "head_dim": 12,
        "mamba_num_heads": 6,
        "mamba_head_dim": 16,
        "ssm_state_size": 8,
        "n_groups": 2,
        "chunk_size": 16,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "moe_shared_expert_intermediate_size": 32,
        "moe_latent_size": None,
    },
    "jamba": {
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "num_experts": 2,
        "num_experts_per_tok": 1,
        "mamba_d_state": 8,
        "mamba_dt_rank": 4,
    },
    "lfm2": {"layer_types": ["conv", "full_attention"], "conv_L_cache": 3},
    "lfm2_moe": {
        "layer_types": ["conv", "full_attention"],
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "num_dense_layers": 1,
    },
    "minimax": {
        "layer_types": ["linear_attention", "full_attention"],
        "head_dim": 12,
        "block_size": 16,
        "num_local_experts": 4,
    },
    "kimi_linear": {
        "layer_types": ["linear_attention", "full_attention"],
        "num_key_value_heads": 4,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 12,
        "linear_head_dim": 8,
        "linear_num_heads": 4,
        "mlp_layer_types": ["dense", "dense"],
    },
    "mamba2": {
        "num_heads": 6,
        "head_dim": 16,
        "state_size": 8,
        "n_groups": 2,
        "chunk_size": 16,
    },
    "mamba": {"state_size": 8},
    "falcon_mamba": {"state_size": 8},
}
"""Models with layers that carry a state, likewise."""

COMPOSITE_HYBRIDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "qwen3_5": (HYBRIDS["qwen3_5_text"], _QWEN_VISION),
    "qwen3_5_moe": (HYBRIDS["qwen3_5_moe_text"], _QWEN_VISION),
}
"""Both at once."""

UNSUPPORTED: dict[str, dict[str, Any]] = {
    "rwkv": {"attention_hidden_size": 48},
    "t5": {"d_model": 48, "d_kv": 12, "d_ff": 64, "num_layers": 2, "num_heads": 4},
    "bloom": {"n_layer": 2, "n_head": 4},
    "falcon": {"num_hidden_layers": 2, "alibi": False},
    "mpt": {"d_model": 48, "n_heads": 4, "n_layers": 2, "max_seq_len": MAX_LENGTH},
    "doge": {},
}
"""Model types that load, but whose state is no causal attention that we could page."""
