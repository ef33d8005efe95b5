"""Configs of known models, with the keys of their own files, cut down to what matters."""

from typing import Any


def decoder(
    model_type: str, layers: int, heads: int, kv_heads: int, hidden: int, **more: Any
) -> dict[str, Any]:
    """Return a config in bfloat16 with the keys that nearly all files have, and more of them."""
    return {
        "model_type": model_type,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "hidden_size": hidden,
        "torch_dtype": "bfloat16",
        **more,
    }


def untied(intermediate: int, vocabulary: int, **more: Any) -> dict[str, Any]:
    """Return the widths of a model's MLPs and of its vocabulary, with a head of its own."""
    widths = {"intermediate_size": intermediate, "vocab_size": vocabulary}
    return {**widths, "tie_word_embeddings": False, **more}


def experts(num_experts: int, top_k: int, width: int) -> dict[str, int]:
    """Return the experts of a layer as Qwen3 writes them."""
    return {
        "num_experts": num_experts,
        "num_experts_per_tok": top_k,
        "moe_intermediate_size": width,
        "decoder_sparse_step": 1,
    }


LLAMA_2_7B = decoder("llama", 32, 32, 32, 4096, torch_dtype="float16")
LLAMA_3_8B = decoder("llama", 32, 32, 8, 4096)
LLAMA_3_1_8B = LLAMA_3_8B | untied(14336, 128256)
LLAMA_3_1_70B = decoder("llama", 80, 64, 8, 8192) | untied(28672, 128256)
LLAMA_3_1_405B = decoder("llama", 126, 128, 8, 16384) | untied(53248, 128256)
QWEN3_32B = decoder("qwen3", 64, 64, 8, 5120, head_dim=128, max_window_layers=64) | untied(
    25600, 151936, sliding_window=None, use_sliding_window=False
)
QWEN3_30B_A3B = (
    decoder("qwen3_moe", 48, 32, 4, 2048, head_dim=128, use_sliding_window=False)
    | untied(6144, 151936, mlp_only_layers=[])
    | experts(128, 8, 768)
)
QWEN3_235B_A22B = (
    decoder("qwen3_moe", 94, 64, 4, 4096, head_dim=128, use_sliding_window=False)
    | untied(12288, 151936, mlp_only_layers=[])
    | experts(128, 8, 1536)
)
MIXTRAL_8X7B = decoder("mixtral", 32, 32, 8, 4096, sliding_window=None) | untied(
    14336, 32000, num_experts_per_tok=2, num_local_experts=8
)
GPT_OSS_20B = decoder("gpt_oss", 24, 64, 8, 2880, head_dim=64, sliding_window=128) | untied(
    2880,
    201088,
    layer_types=["sliding_attention", "full_attention"] * 12,
    num_experts_per_tok=4,
    num_local_experts=32,
    quantization_config={"quant_method": "mxfp4"},
)
GPT_OSS_120B = GPT_OSS_20B | {
    "layer_types": ["sliding_attention", "full_attention"] * 18,
    "num_hidden_layers": 36,
    "num_local_experts": 128,
}
MISTRAL_7B = decoder("mistral", 32, 32, 8, 4096, sliding_window=4096)
GPT2 = {"model_type": "gpt2", "n_embd": 768, "n_head": 12, "n_layer": 12}
GEMMA_2_2B = decoder("gemma2", 26, 8, 4, 2304, head_dim=256, sliding_window=4096)
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
GEMMA_3_27B = {
    "model_type": "gemma3",
    "text_config": decoder("gemma3_text", 62, 32, 16, 5376, head_dim=128, sliding_window=1024)
    | {"intermediate_size": 21504},
}
GEMMA_3_1B = decoder(
    "gemma3_text", 26, 4, 1, 1152, head_dim=256, sliding_window=512, sliding_window_pattern=6
)
GEMMA_3N_E4B = {
    "model_type": "gemma3n",
    "text_config": {"model_type": "gemma3n_text", "num_kv_shared_layers": 15},
    "torch_dtype": "bfloat16",
}
DEEPSEEK_V3 = decoder("deepseek_v3", 61, 128, 128, 7168) | untied(
    18432,
    129280,
    first_k_dense_replace=3,
    moe_intermediate_size=2048,
    n_routed_experts=256,
    n_shared_experts=1,
    num_experts_per_tok=8,
    quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]},
    kv_lora_rank=512,
    q_lora_rank=1536,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
)
HYBRID_27B = {
    "model_type": "qwen3_5",
    "text_config": decoder("qwen3_5_text", 64, 24, 4, 5120, head_dim=256)
    | {"full_attention_interval": 4},
}
HYBRID_35B_A3B = {
    "model_type": "qwen3_5_moe",
    "text_config": decoder("qwen3_5_moe_text", 40, 16, 2, 2048, head_dim=256)
    | {"layer_types": [*["linear_attention"] * 3, "full_attention"] * 10},
}
UNKNOWN = decoder("newcomer", 2, 4, 2, 64, torch_dtype=None, dtype="bfloat16")
