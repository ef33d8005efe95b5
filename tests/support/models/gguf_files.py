"""Tiny GGUF files, as llama.cpp's converter writes them."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.peers.shapes import add_sizes

_ROUTERS = ("mlp.gate.weight", "mlp.router.weight")
TEMPLATE = "{% for m in messages %}<bos>{{ m['content'] }}<eos>{% endfor %}"


def save_gguf(
    path: Path,
    checkpoint: Path,
    kind: str = "F32",
    architecture: str = "qwen3",
    tensors_per_part: int = 0,
    extra: Callable[[gguf.GGUFWriter], object] = lambda writer: None,
) -> Path:
    """Write a Qwen3, Qwen3-MoE, gpt-oss or Llama checkpoint as one file, or in parts.

    Args:
        path: The file.
        checkpoint: In Hugging Face's format, with a byte-level BPE tokenizer.
        kind: Of matrices: F32, Q8_0, Q4_1, ...; vectors stay in float32.
        architecture: What the file says it is; ``llama`` turns rows and has factors of RoPE.
        tensors_per_part: Splits the file; 0 does not.
        extra: Adds more keys.

    Returns:
        The file, or its first part.
    """
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    config = model.config
    writer = gguf.GGUFWriter(path, architecture, split_max_tensors=tensors_per_part)
    writer.add_name("tiny")
    add_sizes(writer, config)
    _add_tokenizer(writer, checkpoint)
    extra(writer)
    if architecture == "gpt-oss":
        _add_gpt_oss(writer, config)
    known = {"llama", "qwen3moe", "gpt-oss"} & {architecture} or {"qwen3"}
    arch = next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name in known)
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    if architecture == "llama":
        _add_rope(writer, model)
    quantization = gguf.GGMLQuantizationType[kind]
    for name, tensor in _parts_of(model.state_dict(), architecture == "gpt-oss"):
        if config.tie_word_embeddings and name.startswith("lm_head"):
            continue
        plain = tensor.float().numpy()
        if architecture == "llama":
            plain = _turned(name, plain, config)
        base, _, suffix = name.rpartition(".")
        is_plain = suffix == "bias" or plain.ndim == 1 or name.endswith(_ROUTERS)
        kept = gguf.GGMLQuantizationType.F32 if is_plain else quantization
        data = plain if kept == gguf.GGMLQuantizationType.F32 else gguf.quantize(plain, kept)
        writer.add_tensor(
            f"{names.get_name(base)}.{suffix}", np.ascontiguousarray(data), raw_dtype=kept
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return min(path.parent.glob(f"{path.stem}*.gguf"))


def _parts_of(state: dict[str, Any], is_gpt_oss: bool) -> Iterator[tuple[str, Any]]:
    """Yield weights as llama.cpp has them: gates and ups of experts are two."""
    for name, tensor in state.items():
        stem, _, own = name.rpartition(".")
        suffix = "bias" if own.endswith("_bias") else "weight"
        if is_gpt_oss and "experts." in name and suffix == "weight":
            tensor = tensor.transpose(1, 2)
        if own.startswith("gate_up_proj"):
            halves = (tensor[:, ::2], tensor[:, 1::2]) if is_gpt_oss else tensor.chunk(2, dim=1)
            for part, half in zip(("gate", "up"), halves, strict=True):
                yield f"{stem}.{part}_proj.{suffix}", half
        elif "experts." in name or own == "sinks":
            yield f"{stem}.{own.removesuffix('_bias')}.{suffix}", tensor
        else:
            yield name, tensor


def _add_gpt_oss(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_expert_count(config.num_local_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    writer.add_expert_feed_forward_length(config.intermediate_size)
    writer.add_sliding_window(config.sliding_window)
    rope = config.rope_parameters
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])


def _turned(name: str, plain: np.ndarray, config: Any) -> np.ndarray:
    """Pair neighbouring rows of a head, as llama.cpp's RoPE does."""
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for part, count in heads.items():
        if part in name:
            return plain.reshape(count, 2, -1, *plain.shape[1:]).swapaxes(1, 2).reshape(plain.shape)
    return plain


def _add_rope(writer: gguf.GGUFWriter, model: Any) -> None:
    """Write the factors by which Llama 3.1 divides the frequencies of its RoPE."""
    config, frequencies = model.config, model.model.rotary_emb.inv_freq.numpy()
    writer.add_rope_dimension_count(config.head_dim)
    theta = config.rope_parameters["rope_theta"]
    plain = theta ** -(np.arange(0, config.head_dim, 2) / config.head_dim)
    writer.add_tensor("rope_freqs.weight", (plain / frequencies).astype(np.float32))


def _add_tokenizer(writer: gguf.GGUFWriter, checkpoint: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    model = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    special = set(tokenizer.all_special_tokens)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types(
        [gguf.TokenType.CONTROL if token in special else gguf.TokenType.NORMAL for token in tokens]
    )
    writer.add_token_merges([" ".join(pair) for pair in model["merges"]])
    writer.add_bos_token_id(tokenizer.bos_token_id)
    writer.add_eos_token_id(tokenizer.eos_token_id)
    writer.add_pad_token_id(tokenizer.pad_token_id)
    writer.add_chat_template(TEMPLATE)
