"""Reads a LoRA adapter from a directory of ``peft`` and checks it against the model.

``adapter_config.json`` says how, ``adapter_model.safetensors`` holds ``lora_A`` and ``lora_B`` of
each linear layer. What cannot be served exactly is refused by name: nothing is ignored that would
change the result. Everything is read and checked before anything changes.
"""

import hashlib
import json
import math
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from ostinato.core.errors import RequestError
from ostinato.runner.lora import LoraAdapter, LoraLayer, PackedLoraLayer, pack_layers
from ostinato.runner.lora_records import can_pack

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"

_CONFIG_BYTES = 2**20
_PREFIX = "base_model.model."
_KEY = re.compile(r"(?P<layer>.+)\.(?P<part>lora_[AB])(\.default)?\.weight")

_UNSERVED: Mapping[str, str] = {
    "use_dora": "DoRA is not served: merge it into the weights (merge_and_unload)",
    "modules_to_save": "whole modules that were trained beside it are not served",
    "lora_bias": "biases of adapters are not served",
    "layer_replication": "replicated layers are not served",
    "target_parameters": "adapters of single parameters, such as experts, are not served",
    "trainable_token_indices": "retrained token embeddings are not served",
    "use_qalora": "QA-LoRA is not served",
    "use_bdlora": "block-diagonal LoRA is not served",
    "arrow_config": "Arrow routers are not served",
    "megatron_config": "Megatron's parallel layers are not served",
}
"""Entries of a config that are refused unless they are unset."""

_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Values of ``init_lora_weights`` with which the base model's weights change, too."""


@dataclass(frozen=True, slots=True)
class LoraLimits:
    """What an adapter may take.

    Attributes:
        max_rank: Highest rank of a layer.
        num_bytes: Memory that is left for its weights.
        max_bytes: Memory for the weights of all adapters, for messages.
    """

    max_rank: int
    num_bytes: int
    max_bytes: int


def read_adapter(path: str | Path, model: PreTrainedModel, limits: LoraLimits) -> LoraAdapter:
    """Read an adapter; nothing changes yet.

    Args:
        path: Its directory.
        model: The base model, with its linear layers plain or packed.
        limits: Of rank and bytes.

    Raises:
        RequestError: It cannot be read, cannot be served, belongs to another model, or is above
            a limit; the message says which and what to do.
    """
    folder = Path(path)
    config = _read_config(folder)
    _check_config(folder, config)
    pairs = _read_pairs(folder, limits)
    modules = dict(model.named_modules())
    layers = {
        name: _layer(folder, name, pairs[name], config, model, modules) for name in sorted(pairs)
    }
    rank = max(len(layer.down) for layer in layers.values())
    if rank > limits.max_rank:
        raise RequestError(
            f"adapter {str(folder)!r} has rank {rank}, above max_lora_rank={limits.max_rank}: "
            "raise max_lora_rank"
        )
    invocation = _invocation(folder, config, model)
    digest = _digest(layers, invocation)
    kept: dict[str, LoraLayer | PackedLoraLayer] = dict(layers)
    if can_pack(model.dtype, model.device):
        kept = dict(pack_layers(layers))
    num_bytes = sum(layer.num_bytes for layer in kept.values())
    _check_bytes(folder, num_bytes, limits)
    return LoraAdapter(digest, rank, kept, invocation, num_bytes)


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / CONFIG_FILE
    try:
        if path.stat().st_size > _CONFIG_BYTES:
            raise RequestError(f"{path}: an adapter's config is never above {_CONFIG_BYTES} bytes")
        config = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        if isinstance(error, RequestError):
            raise
        raise RequestError(f"adapter {str(folder)!r}: no readable {CONFIG_FILE}: {error}") from None
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        kind = config.get("peft_type") if isinstance(config, dict) else config
        raise RequestError(f"{path}: peft_type={kind!r:.80}: only LORA is served")
    return config


def _check_config(folder: Path, config: dict[str, Any]) -> None:
    """Refuse what would compute something else than this engine does."""
    for name, reason in _UNSERVED.items():
        if config.get(name):
            raise RequestError(f"adapter {str(folder)!r} has {name}={config[name]!r:.80}: {reason}")
    if config.get("bias", "none") != "none":
        raise RequestError(
            f"adapter {str(folder)!r} has bias={config['bias']!r:.80}: trained biases are not "
            "served"
        )
    init = config.get("init_lora_weights", True)
    if isinstance(init, str) and init.lower().startswith(_CHANGES_BASE):
        raise RequestError(
            f"adapter {str(folder)!r} has init_lora_weights={init!r:.80}, which changes the base "
            "weights: convert it to plain LoRA (save_pretrained with path_initial_model_for_weight_"
            "conversion)"
        )
    for name in ("r", "lora_alpha"):
        value = config.get(name)
        if type(value) not in (int, float) or not 0 < float(value) < math.inf:  # type: ignore[arg-type]
            raise RequestError(f"{folder / CONFIG_FILE}: {name}={value!r:.80}: must be above 0")
    patterns = config.get("alpha_pattern") or {}
    is_map = isinstance(patterns, dict)
    try:
        is_map = is_map and all(re.compile(p) and float(v) > 0 for p, v in patterns.items())
    except (re.error, TypeError, ValueError):
        is_map = False
    if not is_map:
        raise RequestError(f"{folder / CONFIG_FILE}: alpha_pattern must map names to numbers")


def _read_pairs(folder: Path, limits: LoraLimits) -> dict[str, dict[str, Tensor]]:
    """Read ``lora_A`` and ``lora_B`` of each layer."""
    path = folder / WEIGHTS_FILE
    try:
        _check_bytes(folder, path.stat().st_size, limits, "file ")
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise RequestError(
            f"adapter {str(folder)!r}: no readable {WEIGHTS_FILE} ({error}); pickled weights are "
            "not read"
        ) from None
    pairs: dict[str, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        match = _KEY.fullmatch(key.removeprefix(_PREFIX))
        if match is None or not key.startswith(_PREFIX):
            raise RequestError(
                f"{path}: tensor {key!r:.200} is no lora_A or lora_B of a linear layer, and "
                "nothing else is served"
            )
        if not tensor.is_floating_point() or not torch.isfinite(tensor).all():
            raise RequestError(f"{path}: tensor {key!r:.200} has numbers that are not finite")
        pairs.setdefault(match["layer"], {})[match["part"]] = tensor
    if not pairs:
        raise RequestError(f"{path}: there are no weights in it")
    return pairs


def _layer(
    folder: Path,
    name: str,
    pair: dict[str, Tensor],
    config: dict[str, Any],
    model: PreTrainedModel,
    modules: Mapping[str, nn.Module],
) -> LoraLayer:
    """Check one layer's update against the model's layer of that name."""
    size = _linear_size(folder, name, model, modules, config)
    if pair.keys() != {"lora_A", "lora_B"}:
        raise RequestError(f"adapter {str(folder)!r}: {name} has {min(pair)} alone")
    down, up = pair["lora_A"], pair["lora_B"]
    rank = down.shape[0] if down.ndim == 2 else 0
    if not rank or down.shape != (rank, size[0]) or up.shape != (size[1], rank):
        raise RequestError(
            f"adapter {str(folder)!r} is for another base model "
            f"({config.get('base_model_name_or_path')!r:.80}): its {name} is "
            f"{tuple(down.shape)} and {tuple(up.shape)}, and the layer here has {size[0]} inputs "
            f"and {size[1]} outputs"
        )
    alpha = _of_pattern(config.get("alpha_pattern"), name, config["lora_alpha"])
    scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
    to = {"dtype": model.dtype, "device": model.device}
    return LoraLayer(down.to(**to).contiguous(), up.to(**to).contiguous(), scale)


def _linear_size(
    folder: Path,
    name: str,
    model: PreTrainedModel,
    modules: Mapping[str, nn.Module],
    config: dict[str, Any],
) -> tuple[int, int]:
    """Return inputs and outputs of the linear layer of a name."""
    module = modules.get(name)
    if module is None:
        raise RequestError(
            f"adapter {str(folder)!r} is for another base model "
            f"({config.get('base_model_name_or_path')!r:.80}): this one has no layer {name!r:.200}"
        )
    if isinstance(module, Conv1D):
        return module.weight.shape[0], module.weight.shape[1]
    sizes = getattr(module, "in_features", None), getattr(module, "out_features", None)
    is_served = ".experts." not in name and module is not model.get_output_embeddings()
    if not is_served or not isinstance(sizes[0], int) or not isinstance(sizes[1], int):
        raise RequestError(
            f"adapter {str(folder)!r} targets {name!r:.200}, a {type(module).__name__}: adapters "
            "are served on the decoder's linear layers, not on embeddings, experts or the output "
            "layer"
        )
    return sizes[0], sizes[1]


def _of_pattern(patterns: dict[str, float] | None, name: str, default: float) -> float:
    """Return a layer's own value; patterns are suffixes or regular expressions, as in ``peft``."""
    for pattern, value in (patterns or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", name):
            return value
    return default


def _invocation(folder: Path, config: dict[str, Any], model: PreTrainedModel) -> tuple[int, ...]:
    """Return the token ids that activate the adapter; empty if it always applies."""
    ids = config.get("alora_invocation_tokens")
    if ids is None:
        return ()
    vocab_size = model.get_input_embeddings().weight.shape[0]
    is_row = isinstance(ids, list) and all(type(i) is int and 0 <= i < vocab_size for i in ids)
    if not is_row or not ids:
        raise RequestError(
            f"adapter {str(folder)!r} has alora_invocation_tokens={ids!r:.80}: must be token ids "
            f"below {vocab_size}, at least one"
        )
    return tuple(ids)


def _check_bytes(folder: Path, num_bytes: int, limits: LoraLimits, what: str = "") -> None:
    if num_bytes > limits.num_bytes:
        raise RequestError(
            f"adapter {str(folder)!r} takes {num_bytes} {what}bytes, and {limits.num_bytes} of "
            f"max_lora_bytes={limits.max_bytes} are left: unload another one, or raise "
            "max_lora_bytes"
        )


def _digest(layers: Mapping[str, LoraLayer], invocation: tuple[int, ...]) -> bytes:
    """Return a SHA-256 over names, scales, shapes and weights, and the invocation."""
    digest = hashlib.sha256()
    digest.update(struct.pack(f"<{len(invocation) + 1}Q", len(invocation), *invocation))
    for name, layer in layers.items():
        digest.update(struct.pack("<Qd", len(name.encode()), layer.scale) + name.encode())
        for tensor in (layer.down, layer.up.T.contiguous()):
            digest.update(struct.pack("<QQ", *tensor.shape))
            digest.update(tensor.cpu().view(torch.uint8).numpy().data)
    return digest.digest()
