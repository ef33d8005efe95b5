"""Converts a Qwen3 checkpoint to a GGUF file; llama.cpp quantizes it.

A checkpoint that came out of a GGUF file has that file in it, which is taken as it is. There is no
tokenizer in a converted one: all prompts are token ids.
"""

import ctypes
import json
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
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm"}


def convert(model: Path) -> Path:
    """Return the checkpoint's own file, or one beside its folder, written if it is not there."""
    if (model / "model.gguf").is_file():
        return model / "model.gguf"
    goal = model.with_name(model.name + "-bf16.gguf")
    if not goal.is_file():
        partial = goal.with_suffix(".partial")
        _write(model, partial)
        partial.rename(goal)
    return goal


def quantize(model: Path, kind: str) -> Path:
    """Return the checkpoint in a format such as ``Q4_K_M``, written by llama.cpp the first time."""
    import llama_cpp as lib

    goal = model.with_name(f"{model.name}-{kind}.gguf")
    if not goal.is_file():
        params = lib.llama_model_quantize_default_params()
        params.ftype = getattr(lib, f"LLAMA_FTYPE_MOSTLY_{kind}")
        params.allow_requantize = True  # a checkpoint's own file may be quantized
        source, partial = convert(model), goal.with_suffix(".partial")
        paths = str(source).encode(), str(partial).encode()
        if lib.llama_model_quantize(*paths, ctypes.byref(params)) != 0:
            raise RuntimeError(f"llama.cpp did not write {source.name} as {kind}")
        partial.rename(goal)
    return goal


def _write(model: Path, goal: Path) -> None:
    import gguf
    from safetensors import safe_open

    writer = gguf.GGUFWriter(str(goal), "qwen3")
    _write_header(writer, json.loads((model / "config.json").read_text()))
    with safe_open(model / "model.safetensors", "pt") as tensors:
        for name in tensors.keys():  # noqa: SIM118 - it is no dict
            values = tensors.get_tensor(name).float().numpy()
            if values.ndim == 1:
                writer.add_tensor(name_of(name), values)
                continue
            kind = gguf.GGMLQuantizationType.BF16
            writer.add_tensor(name_of(name), gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _write_header(writer: Any, config: dict[str, Any]) -> None:
    import gguf

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
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("none")


def name_of(tensor: str) -> str:
    """Return the name that llama.cpp gives a tensor of the checkpoint."""
    stem, _, kind = tensor.rpartition(".")
    if stem in NAMES:
        return f"{NAMES[stem]}.{kind}"
    _, _, layer, part = stem.split(".", 3)
    return f"blk.{layer}.{LAYER_NAMES[part]}.{kind}"


if __name__ == "__main__":
    import sys

    print(convert(Path(sys.argv[1])))
