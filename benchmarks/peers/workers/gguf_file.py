"""Converts a Qwen3 or Qwen3-MoE checkpoint to a GGUF file; llama.cpp writes it in other formats.

::

    PEERS/llamacpp/bin/python -m benchmarks.peers.workers.gguf_file CHECKPOINT Q4_0

A checkpoint that came out of a GGUF file has that file in it, with its tokenizer, and llama.cpp
converts it.
"""

import ctypes
import json
import re
from pathlib import Path
from typing import Any

LAYER_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.experts.gate_proj": "ffn_gate_exps",
    "mlp.experts.up_proj": "ffn_up_exps",
    "mlp.experts.down_proj": "ffn_down_exps",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm"}


def gguf_of(model: Path, kind: str) -> Path:
    """Return the checkpoint in a format of llama.cpp, written beside its folder the first time.

    Args:
        model: The checkpoint's folder.
        kind: ``BF16``, ``F16``, ``Q8_0``, ``Q4_0``, ``Q4_K_M`` or another name of ``llama_ftype``.

    Raises:
        ValueError: llama.cpp has no such format.
        RuntimeError: llama.cpp did not write it.
    """
    path = model.with_name(f"{model.name}-{kind}.gguf")
    if path.is_file():
        return path
    partial = path.with_suffix(".partial")
    original = model / "model.gguf"
    if original.is_file() or kind != "BF16":
        _requantize(original if original.is_file() else gguf_of(model, "BF16"), partial, kind)
    else:
        _write(model, partial)
    partial.rename(path)
    return path


def _requantize(source: Path, target: Path, kind: str) -> None:
    import llama_cpp as lib

    params = lib.llama_model_quantize_default_params()
    file_type = getattr(lib, f"LLAMA_FTYPE_MOSTLY_{kind}", None)
    if file_type is None:
        raise ValueError(
            f"weights={kind!r}: llama.cpp has BF16, F16, Q8_0, Q4_0, Q4_K_M and others"
        )
    params.ftype = file_type
    params.allow_requantize = True  # a checkpoint's own file may be quantized
    paths = str(source).encode(), str(target).encode()
    if lib.llama_model_quantize(*paths, ctypes.byref(params)) != 0:
        raise RuntimeError(f"llama.cpp did not write {source.name} as {kind}")


def _write(model: Path, goal: Path) -> None:
    import gguf
    import numpy as np
    from safetensors import safe_open

    config = json.loads((model / "config.json").read_text())
    writer = gguf.GGUFWriter(str(goal), config["model_type"].replace("_", ""))
    _write_header(writer, model, config)
    kind = gguf.GGMLQuantizationType.BF16
    with safe_open(model / "model.safetensors", "pt") as tensors:
        parts: dict[str, list[str]] = {}
        for name in sorted(tensors.keys(), key=_expert_number):
            parts.setdefault(name_of(name), []).append(name)
        for name, sources in parts.items():
            values = [tensors.get_tensor(source).float().numpy() for source in sources]
            numbers = values[0] if len(values) == 1 else np.stack(values)
            if numbers.ndim == 1 or "ffn_gate_inp" in name:
                writer.add_tensor(name, numbers)
            else:
                writer.add_tensor(name, gguf.quants.quantize(numbers, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _write_header(writer: Any, model: Path, config: dict[str, Any]) -> None:
    import gguf

    if "moe_intermediate_size" in config:
        writer.add_expert_count(config["num_local_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    ids: dict[str, int] = json.loads((model / "tokenizer.json").read_text())["model"]["vocab"]
    add_words(writer, sorted(ids, key=lambda word: ids[word]))


def add_words(writer: Any, tokens: list[str]) -> None:
    """Write a tokenizer whose words are ``tokens``, by id; the first one ends a text."""
    import gguf

    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    merged = tokens[1] + tokens[2]  # loaders want a merge, and its result among the tokens
    writer.add_token_list([*tokens[:-1], merged])
    writer.add_token_merges([f"{tokens[1]} {tokens[2]}"])
    kinds = [gguf.TokenType.CONTROL, *[gguf.TokenType.NORMAL] * (len(tokens) - 1)]
    writer.add_token_types(kinds)
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    writer.add_add_bos_token(False)


def name_of(tensor: str) -> str:
    """Return the name that llama.cpp gives a tensor of the checkpoint."""
    stem, _, kind = tensor.rpartition(".")
    if stem in NAMES:
        return f"{NAMES[stem]}.{kind}"
    _, _, layer, part = re.sub(r"experts\.\d+", "experts", stem).split(".", 3)
    return f"blk.{layer}.{LAYER_NAMES[part]}.{kind}"


def _expert_number(tensor: str) -> int:
    number = re.search(r"experts\.(\d+)", tensor)
    return int(number[1]) if number else 0


if __name__ == "__main__":
    import sys

    print(gguf_of(Path(sys.argv[1]), sys.argv[2]))
