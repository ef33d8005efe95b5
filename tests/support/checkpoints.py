"""Tiny checkpoints with real configs, random weights and a tokenizer trained on the spot.

::

    def test_something(checkpoints):
        load_model(checkpoints.path("llama"), "float64")

Heads are chosen so that every way of sharing them occurs, windows are shorter than the prompts
of the tests, and weights are large enough that the greedy token hangs on the whole context.
"""

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    CONFIG_MAPPING,
    AutoModelForSeq2SeqLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)
from transformers.utils import logging as transformers_logging

from ostinato.runner.model_support import auto_class

VOCAB_SIZE = 320
MAX_LENGTH = 256
EOS_ID = 1
WINDOW = 8

_LINES = (
    "A phrase that keeps returning under ever new melodies is called an ostinato.",
    "The same prefix, another suffix; the same bass, another tune above it.",
    "You are a helpful assistant. Answer briefly, and say so if you do not know.",
    "Once upon a time there was a block of sixteen tokens that nobody computed twice.",
)

_BASE: dict[str, Any] = {
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

_EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}
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


class Checkpoints:
    """Makes checkpoints on demand, each once, in one directory."""

    def __init__(self, root: Path) -> None:
        """Keep them below ``root``."""
        self._root = root

    def path(self, family: str, **changes: Any) -> Path:
        """Return a checkpoint of a family, its config changed as given."""
        suffix = "".join(f"-{name}-{abs(hash(str(changes[name])))}" for name in sorted(changes))
        path = self._root / f"{family}{suffix}"
        if not path.exists():
            with _quiet():
                save_checkpoint(path, make_config(family, **changes))
        return path

    def broken(self, name: str, family: str = "llama") -> Path:
        """Return a checkpoint with one of the faults in ``FAULTS``."""
        path = self._root / f"{family}-broken-{name}"
        if not path.exists():
            with _quiet():
                save_checkpoint(path, make_config(family))
                FAULTS[name](path)
        return path


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    """Checkpoints that last for the session."""
    return Checkpoints(tmp_path_factory.mktemp("checkpoints"))


def make_config(family: str, **changes: Any) -> PreTrainedConfig:
    """Build the config of a family."""
    composites = {**COMPOSITES, **COMPOSITE_HYBRIDS}
    if family in composites:
        text, vision = composites[family]
        return CONFIG_MAPPING[family](
            text_config={**_BASE, **text}, vision_config=vision, tie_word_embeddings=False
        )
    special = FAMILIES.get(family) or HYBRIDS.get(family) or UNSUPPORTED.get(family, {})
    base = {} if family in ("gpt2", "t5") else _BASE
    common = {name: _BASE[name] for name in _BASE if name.endswith(("_id", "vocab_size"))}
    return CONFIG_MAPPING[family](**{**base, **common, **special, **changes})


def make_model(config: PreTrainedConfig) -> PreTrainedModel:
    """Build a model with weights that make greedy tokens hang on the context."""
    auto = AutoModelForSeq2SeqLM if config.is_encoder_decoder else auto_class(config)
    torch.manual_seed(0)
    model = auto.from_config(config).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape)
            # Vectors are norms and biases, sinks among them: leave them near where they are.
            parameter.add_(0.3 * noise) if parameter.ndim == 1 else parameter.copy_(0.3 * noise)
    return model


def save_checkpoint(path: Path, config: PreTrainedConfig, max_shard_size: str = "1GB") -> None:
    """Write config, weights and tokenizer, as a hub repository has them."""
    dtype = config.dtype or torch.float32
    make_model(config).to(dtype).save_pretrained(path, max_shard_size=max_shard_size)
    make_tokenizer().save_pretrained(path)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer on a few lines."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=["<pad>", "<eos>", "<bos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_LINES, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", bos_token="<bos>"
    )


def _truncate(path: Path) -> None:
    weights = path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[: weights.stat().st_size // 2])


def _lose_shard(path: Path) -> None:
    shutil.rmtree(path)
    save_checkpoint(path, make_config("llama"), max_shard_size="50KB")
    sorted(path.glob("model-*.safetensors"))[1].unlink()


def _lose_weights(path: Path) -> None:
    _edit_weights(path, lambda weights: weights.pop("model.layers.1.mlp.up_proj.weight"))


def _add_weights(path: Path) -> None:
    _edit_weights(path, lambda weights: weights.update(stranger=torch.zeros(3)))


def _reshape_weights(path: Path) -> None:
    _edit_weights(path, lambda weights: weights.update({"model.norm.weight": torch.zeros(7)}))


def _edit_weights(path: Path, edit: Callable[[dict[str, torch.Tensor]], object]) -> None:
    weights = load_file(path / "model.safetensors")
    edit(weights)
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})


def _edit_config(path: Path, **changes: Any) -> None:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | changes))


FAULTS: dict[str, Callable[[Path], object]] = {
    "truncated": _truncate,
    "missing shard": _lose_shard,
    "no weights": lambda path: (path / "model.safetensors").unlink(),
    "missing weights": _lose_weights,
    "unexpected weights": _add_weights,
    "mismatched weights": _reshape_weights,
    "no config": lambda path: (path / "config.json").unlink(),
    "corrupt config": lambda path: (path / "config.json").write_text('{"model_type": "lla'),
    "config without type": lambda path: (path / "config.json").write_text("{}"),
    "impossible config": lambda path: _edit_config(path, hidden_size="wide"),
    "corrupt tokenizer": lambda path: (path / "tokenizer.json").write_text('{"version": '),
    "unknown type": lambda path: _edit_config(path, model_type="nonesuch"),
}
"""What can be wrong with a checkpoint, and how to make it so."""


def without_tokenizer(path: Path, target: Path) -> Path:
    """Copy a checkpoint, but for its tokenizer."""
    shutil.copytree(path, target, ignore=shutil.ignore_patterns("tokenizer*", "special_tokens*"))
    return target


@contextmanager
def _quiet() -> Iterator[None]:
    """No progress bars of ``transformers`` among the dots of pytest."""
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.enable_progress_bar()
