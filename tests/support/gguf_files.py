"""Tiny GGUF files, as llama.cpp's converter writes them."""

import json
from pathlib import Path

import gguf
import numpy as np
from transformers import AutoModelForCausalLM, AutoTokenizer

TEMPLATE = "{% for m in messages %}<bos>{{ m['content'] }}<eos>{% endfor %}"


def save_gguf(path: Path, checkpoint: Path, kind: str = "F32", architecture: str = "qwen3") -> Path:
    """Write a Qwen3 checkpoint as one file.

    Args:
        path: The file.
        checkpoint: In Hugging Face's format, with a byte-level BPE tokenizer.
        kind: Of matrices: F32, Q8_0, Q4_1, ...; vectors stay in float32.
        architecture: What the file says it is.
    """
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    config = model.config
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_name("tiny")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    _add_tokenizer(writer, checkpoint)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3, config.num_hidden_layers)
    quantization = gguf.GGMLQuantizationType[kind]
    for name, tensor in model.state_dict().items():
        plain = tensor.float().numpy()
        base, _, suffix = name.rpartition(".")
        kept = gguf.GGMLQuantizationType.F32 if plain.ndim == 1 else quantization
        data = plain if kept == gguf.GGMLQuantizationType.F32 else gguf.quantize(plain, kept)
        writer.add_tensor(
            f"{names.get_name(base)}.{suffix}", np.ascontiguousarray(data), raw_dtype=kept
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


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
