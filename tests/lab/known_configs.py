"""Configs of known models, written as their own files write them, cut down to what matters."""

LLAMA_2_7B = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 32,
    "torch_dtype": "float16",
}
LLAMA_3_8B = LLAMA_2_7B | {"num_key_value_heads": 8, "torch_dtype": "bfloat16"}
MISTRAL_7B = LLAMA_3_8B | {"model_type": "mistral", "sliding_window": 4096}
GPT2 = {"model_type": "gpt2", "n_embd": 768, "n_head": 12, "n_layer": 12}
GEMMA_2_2B = {
    "model_type": "gemma2",
    "head_dim": 256,
    "hidden_size": 2304,
    "num_attention_heads": 8,
    "num_hidden_layers": 26,
    "num_key_value_heads": 4,
    "sliding_window": 4096,
    "torch_dtype": "bfloat16",
}
GEMMA_3_4B = {
    "model_type": "gemma3",
    "text_config": {
        "hidden_size": 2560,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "sliding_window": 1024,
    },
    "torch_dtype": "bfloat16",
    "vision_config": {"num_hidden_layers": 27, "num_attention_heads": 16},
}
GEMMA_3_1B = {
    "model_type": "gemma3_text",
    "head_dim": 256,
    "hidden_size": 1152,
    "num_attention_heads": 4,
    "num_hidden_layers": 26,
    "num_key_value_heads": 1,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "torch_dtype": "bfloat16",
}
GEMMA_3N_E4B = {
    "model_type": "gemma3n",
    "text_config": {"model_type": "gemma3n_text", "num_kv_shared_layers": 15},
    "torch_dtype": "bfloat16",
}
DEEPSEEK_V3 = {
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "kv_lora_rank": 512,
    "num_attention_heads": 128,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "torch_dtype": "bfloat16",
    "v_head_dim": 128,
}
HYBRID_27B = {
    "model_type": "qwen3_5",
    "text_config": {
        "dtype": "bfloat16",
        "full_attention_interval": 4,
        "head_dim": 256,
        "hidden_size": 5120,
        "model_type": "qwen3_5_text",
        "num_attention_heads": 24,
        "num_hidden_layers": 64,
        "num_key_value_heads": 4,
    },
}
HYBRID_35B_A3B = {
    "model_type": "qwen3_5_moe",
    "text_config": {
        "dtype": "bfloat16",
        "head_dim": 256,
        "hidden_size": 2048,
        "layer_types": [*["linear_attention"] * 3, "full_attention"] * 10,
        "model_type": "qwen3_5_moe_text",
        "num_attention_heads": 16,
        "num_hidden_layers": 40,
        "num_key_value_heads": 2,
    },
}
UNKNOWN = {
    "model_type": "newcomer",
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "dtype": "bfloat16",
}
