"""Checkpoints of well-known shapes with random weights, written block by block.

A file is as large as the real one and costs what the real one costs to load and to run; what such
a model says means nothing. Memory stays below 0.2 GiB, and the disk sets the pace::

    safetensors   header │ bfloat16 of magnitude 2^-6 to 2^-5, sign and mantissa random
    GGUF          header │ blocks of random codes, scales that give the same magnitude

Sizes are those of the published ``config.json`` files.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.peers.workers.gguf_file import add_words

_PIECE = 1 << 22
"""Elements that are drawn at once."""

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


@dataclass(frozen=True)
class Shape:
    """Sizes of a model, by the names of its ``config.json``.

    Attributes:
        model_type: As in ``config.json``.
        sizes: Whatever differs from the defaults of the type.
    """

    model_type: str
    sizes: dict[str, Any] = field(hash=False)

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""
        return int(self.sizes["vocab_size"])

    @property
    def max_position_embeddings(self) -> int:
        """Tokens that a sequence may have."""
        return int(self.sizes["max_position_embeddings"])

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of a token's keys and values in 16 bits."""
        sizes = ("num_hidden_layers", "num_key_value_heads", "head_dim")
        return 4 * prod(int(self.sizes[name]) for name in sizes)

    def config(self) -> Any:
        """Return the configuration that ``transformers`` makes of it."""
        from transformers import AutoConfig

        special = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), 0)
        return AutoConfig.for_model(self.model_type, **self.sizes, **special, dtype="bfloat16")


def _qwen3(layers: int, hidden: int, inner: int, heads: int, **others: Any) -> Shape:
    sizes = {
        "num_hidden_layers": layers, "hidden_size": hidden, "intermediate_size": inner,
        "num_attention_heads": heads, "num_key_value_heads": 8, "head_dim": 128,
        "vocab_size": 151_936, "max_position_embeddings": 40_960, "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        "tie_word_embeddings": True,
    }  # fmt: skip
    return Shape(others.pop("model_type", "qwen3"), sizes | others)


FULL = _qwen3(28, 1024, 3072, 16, vocab_size=32_000)
SMALL = _qwen3(2, 128, 256, 4, num_key_value_heads=2, head_dim=64, vocab_size=512)
GEMMA_SIZES = {
    "num_hidden_layers": 26, "hidden_size": 1152, "intermediate_size": 6912,
    "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 256,
    "vocab_size": 32_000, "max_position_embeddings": 32_768, "tie_word_embeddings": True,
}  # fmt: skip
"""Those of Gemma 3 1B, but for its vocabulary, so that layers are what is measured."""
SHAPES = {
    "random": FULL,
    "tiny": Shape("qwen3", {**FULL.sizes, "num_hidden_layers": 2, "hidden_size": 256}),
    "qwen3-0.6b": _qwen3(28, 1024, 3072, 16),
    "qwen3-4b": _qwen3(36, 2560, 9728, 32),
    "llama-3.1-8b": Shape("llama", {
        "num_hidden_layers": 32, "hidden_size": 4096, "intermediate_size": 14_336,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
        "vocab_size": 128_256, "max_position_embeddings": 131_072, "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "rope_parameters": {
            "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
        },
    }),
    "gemma-3-1b": Shape("gemma3_text", {**GEMMA_SIZES, "sliding_window": 512,
                                        "query_pre_attn_scalar": 256}),
    "llama-as-gemma-3-1b": Shape("llama", GEMMA_SIZES),
    "gemma-3-4b": Shape("gemma3_text", {
        "num_hidden_layers": 34, "hidden_size": 2560, "intermediate_size": 10_240,
        "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
        "vocab_size": 262_208, "max_position_embeddings": 131_072, "sliding_window": 1024,
        "query_pre_attn_scalar": 256,
    }),
    "mixture-1.3b": _qwen3(
        16, 1024, 3072, 16, vocab_size=32_000, model_type="qwen3_moe", num_experts=64,
        num_experts_per_tok=8, moe_intermediate_size=384, norm_topk_prob=True,
    ),
    "qwen3-30b-a3b": _qwen3(
        48, 2048, 6144, 32, model_type="qwen3_moe", num_key_value_heads=4, num_experts=128,
        num_experts_per_tok=8, moe_intermediate_size=768, norm_topk_prob=True,
        tie_word_embeddings=False,
    ),
}  # fmt: skip
"""Shapes by the name that ``--checkpoint`` takes; ``random`` is the one of the measures."""


def tensors_of(config: Any) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name the tensors of a published checkpoint and their shapes: each expert has its own."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    for name, tensor in model.named_parameters():
        shape = tuple(tensor.shape)
        if ".mlp.experts." not in name:
            yield name, shape
            continue
        stem, part = name.rsplit(".", 1)
        parts = ("gate_proj", "up_proj") if part == "gate_up_proj" else ("down_proj",)
        for expert in range(shape[0]):
            for each in parts:
                yield f"{stem}.{expert}.{each}.weight", (shape[1] // len(parts), shape[2])


def write_safetensors(path: Path, config: Any, seed: int = 0) -> None:
    """Write random weights in bfloat16 to one file; vectors, which scale norms, are ones."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in tensors_of(config):
        begin, end = end, end + 2 * prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": (begin, end)}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    rng = np.random.default_rng(seed)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, entry in header.items():
            if name != "__metadata__":
                _write_pieces(file.write, prod(entry["shape"]), _bfloat16(rng, entry["shape"]))


def _bfloat16(rng: np.random.Generator, shape: tuple[int, ...]) -> Callable[[int], Bytes]:
    def draw(count: int) -> Bytes:
        if len(shape) == 1:
            return np.full(count, 0x3F80, "<u2").view(np.uint8)
        bits = np.frombuffer(rng.bytes(2 * count), "<u2")
        return ((bits & 0x807F) | (121 << 7)).astype("<u2").view(np.uint8)

    return draw


def _write_pieces(write: Callable[[Any], Any], count: int, draw: Callable[[int], Bytes]) -> None:
    for begin in range(0, count, _PIECE):
        write(draw(min(_PIECE, count - begin)).data)


@dataclass(frozen=True)
class BlockFormat:
    """One of llama.cpp's formats: blocks of codes with scales of 16 bits.

    Attributes:
        block_size: Elements of a block.
        num_bytes: Bytes of a block.
        scales: Places of scales in a block, and their values.
        small: First place of scales of 8 bits with a sign, and the place behind the last; they are
            kept within 32 of zero.
    """

    block_size: int
    num_bytes: int
    scales: tuple[tuple[int, float], ...]
    small: tuple[int, int] = (0, 0)

    def draw(self, rng: np.random.Generator, num_blocks: int) -> Bytes:
        """Draw blocks; shape (num_blocks, num_bytes)."""
        blocks = np.frombuffer(rng.bytes(num_blocks * self.num_bytes), np.uint8).copy()
        blocks = blocks.reshape(num_blocks, self.num_bytes)
        small = slice(*self.small)
        blocks[:, small] = (blocks[:, small].view(np.int8) // 4).view(np.uint8)
        for place, value in self.scales:
            blocks[:, place : place + 2] = np.array([value], "<f2").view(np.uint8)
        return blocks


BLOCK_FORMATS = {
    "Q4_0": BlockFormat(32, 18, ((0, 0.005),)),
    "Q8_0": BlockFormat(32, 34, ((0, 3e-4),)),
    "Q4_K": BlockFormat(256, 144, ((0, 1e-4), (2, 7.5e-4))),
    "Q6_K": BlockFormat(256, 210, ((208, 7e-5),), small=(192, 208)),
}
GGUF_TYPES = ("Q4_0", "Q8_0", "Q4_K_M")


def write_gguf(path: Path, config: Any, kind: str, tokens: list[str], seed: int = 0) -> None:
    """Write random weights as one of ``GGUF_TYPES``, with the formats that llama.cpp chooses.

    Raises:
        ValueError: The type of model or the kind is none of those that this writes.
    """
    import gguf

    if kind not in GGUF_TYPES:
        raise ValueError(f"{kind!r}: there are {', '.join(GGUF_TYPES)}")
    architecture = _ARCHITECTURES.get(config.model_type)
    if architecture is None:
        raise ValueError(f"{config.model_type!r}: there are {', '.join(_ARCHITECTURES)}")
    writer = gguf.GGUFWriter(str(path), architecture)
    add_sizes(writer, config)
    add_words(writer, tokens)
    writer.add_chat_template(CHAT_TEMPLATE)
    plan = list(_gguf_tensors(config, kind, architecture))
    for name, shape, format_name in plan:
        stored, dtype, num_bytes = _stored(shape, format_name)
        kind_id = gguf.GGMLQuantizationType[format_name]
        writer.add_tensor_info(name, stored, dtype, num_bytes, kind_id)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    rng = np.random.default_rng(seed)
    with path.open("ab") as file:
        for _, shape, format_name in plan:
            _pad(file)
            _write_blocks(file.write, prod(shape), format_name, rng)
        _pad(file)


_ARCHITECTURES = {
    "qwen3": "qwen3", "qwen3_moe": "qwen3moe", "llama": "llama", "gemma3_text": "gemma3",
}  # fmt: skip
_ALIGNMENT = 32


def _pad(file: Any) -> None:
    file.write(bytes(-file.tell() % _ALIGNMENT))


def _stored(shape: tuple[int, ...], format_name: str) -> tuple[tuple[int, ...], Any, int]:
    """Return shape in bytes, type and number of bytes, as ``GGUFWriter`` wants them."""
    block = BLOCK_FORMATS.get(format_name)
    if block is None:
        return shape, np.dtype(np.float32), 4 * prod(shape)
    stored = (*shape[:-1], shape[-1] // block.block_size * block.num_bytes)
    return stored, np.dtype(np.uint8), prod(stored)


def _write_blocks(
    write: Callable[[Any], Any], count: int, format_name: str, rng: np.random.Generator
) -> None:
    block = BLOCK_FORMATS.get(format_name)
    if block is None:
        write(np.ones(count, np.float32).data)
        return
    step = _PIECE // block.block_size
    for begin in range(0, count // block.block_size, step):
        write(block.draw(rng, min(step, count // block.block_size - begin)).data)


def _gguf_tensors(
    config: Any, kind: str, architecture: str
) -> Iterator[tuple[str, tuple[int, ...], str]]:
    """Name the tensors as llama.cpp does; the experts of a layer are one tensor."""
    import gguf

    arch = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    for name, shape in tensors_of(config):
        if ".experts." in name:
            layer, expert, part = name.split(".")[2], name.split(".")[5], name.split(".")[6]
            if expert == "0":
                own = f"blk.{layer}.ffn_{part.removesuffix('_proj')}_exps.weight"
                yield own, (config.num_experts, *shape), _format(own, shape, kind, config)
            continue
        own = names.get_name(name, try_suffixes=(".weight", ".bias"))
        yield own, shape, _format(own, shape, kind, config)


def _format(name: str, shape: tuple[int, ...], kind: str, config: Any) -> str:
    """Return a tensor's format: vectors and routers in float32, the output finer."""
    if len(shape) == 1 or "ffn_gate_inp" in name:
        return "F32"
    is_output = name == "output.weight" or (
        name == "token_embd.weight" and config.tie_word_embeddings
    )
    if kind == "Q8_0":
        return "Q8_0"
    if is_output:
        return "Q6_K"
    if kind == "Q4_K_M":
        layer = int(name.split(".")[1]) if name.startswith("blk.") else 0
        is_fine = ("attn_v" in name or "ffn_down" in name) and layer % 2 == 0
        return "Q6_K" if is_fine else "Q4_K"
    return "Q4_0"


def add_sizes(writer: Any, config: Any) -> None:
    """Write what a header says of a config."""
    rope = config.rope_parameters
    rope = rope.get("full_attention", rope)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    if config.model_type == "qwen3_moe":
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if config.model_type == "gemma3_text":
        writer.add_sliding_window(config.sliding_window)


CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
