"""Reads a LoRA adapter from a directory of ``peft`` and checks it against the model.

``adapter_config.json`` is its config (``lora_config``), and ``adapter_model.safetensors`` has
``lora_A`` and ``lora_B`` of each layer. All is read and checked before anything changes.
"""

import hashlib
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from ostinato.core.errors import RequestError
from ostinato.runner.adapters.lora import LoraAdapter, LoraLayer, PackedLoraLayer, pack_layers
from ostinato.runner.adapters.lora_config import WEIGHTS_FILE, read_config
from ostinato.runner.adapters.lora_targets import BaseModel
from ostinato.runner.adapters.lora_updates import can_pack

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_HEAD_BYTES = 2**23
"""Maximum bytes of the header of a weight file, in which each tensor takes some 150."""

_PREFIX = "base_model.model."
_KEY = re.compile(r"(?P<layer>.+)\.(?P<part>lora_[AB])(\.default)?\.weight")


@dataclass(frozen=True, slots=True)
class LoraLimits:
    """Limits of an adapter.

    Attributes:
        max_rank: Maximum rank of a layer.
        num_bytes: Memory left for its weights.
        max_bytes: Memory for the weights of all adapters, for messages.
    """

    max_rank: int
    num_bytes: int
    max_bytes: int


def read_adapter(path: str | Path, model: "PreTrainedModel", limits: LoraLimits) -> LoraAdapter:
    """Read an adapter; nothing changes yet.

    Args:
        path: Its directory.
        model: The base model, with its linear layers plain or packed.
        limits: Limits of rank and bytes.

    Raises:
        RequestError: It cannot be read or served, is for another model, or exceeds a limit.
    """
    folder = Path(path)
    config = read_config(folder, model.get_input_embeddings().num_embeddings)
    pairs = _read_pairs(folder, limits)
    base, layers = BaseModel(model, folder, config), dict[str, LoraLayer]()
    for name in sorted(pairs):
        own = base.layers(name, pairs[name])
        if twice := own.keys() & layers:
            raise RequestError(f"adapter {str(folder)!r} changes {min(twice)!r:.200} twice")
        layers |= own
    rank = max(len(layer.down) for layer in layers.values())
    if rank > limits.max_rank:
        raise RequestError(
            f"adapter {str(folder)!r} has rank {rank}, above max_lora_rank={limits.max_rank}: "
            "raise max_lora_rank"
        )
    digest = _digest(layers, config.invocation)
    kept: dict[str, LoraLayer | PackedLoraLayer] = {**layers}
    if can_pack(model.dtype, model.device):
        kept |= pack_layers({name: layer for name, layer in layers.items() if base.packs(name)})
    factors = {id(own): own for layer in kept.values() for own in (layer.down, layer.up)}
    num_bytes = sum(own.nbytes for own in factors.values())
    _check_bytes(folder, num_bytes, limits)
    return LoraAdapter(digest, rank, kept, config.invocation, num_bytes)


def _read_pairs(folder: Path, limits: LoraLimits) -> dict[str, dict[str, Tensor]]:
    """Read ``lora_A`` and ``lora_B`` of each layer."""
    path = folder / WEIGHTS_FILE
    pairs: dict[str, dict[str, Tensor]] = {}
    for key, tensor in _read_tensors(folder, path, limits).items():
        match = _KEY.fullmatch(key.removeprefix(_PREFIX))
        if match is None or not key.startswith(_PREFIX):
            raise RequestError(
                f"{path}: tensor {key!r:.200} is no lora_A or lora_B of a layer, and "
                "nothing else is served"
            )
        if not tensor.is_floating_point() or not torch.isfinite(tensor).all():
            raise RequestError(f"{path}: tensor {key!r:.200} has numbers that are not finite")
        pairs.setdefault(match["layer"], {})[match["part"]] = tensor
    if not pairs:
        raise RequestError(f"{path}: there are no weights in it")
    return pairs


def _read_tensors(folder: Path, path: Path, limits: LoraLimits) -> dict[str, Tensor]:
    """Read a weight file into memory: another program could truncate a mapped file."""
    try:
        _check_bytes(folder, path.stat().st_size, limits, "file ")
        with path.open("rb") as file:
            content = file.read(limits.num_bytes + 1)
        _check_bytes(folder, len(content), limits, "file ")
        head_bytes = int.from_bytes(content[:8], "little")
        if head_bytes > _HEAD_BYTES:
            raise RequestError(
                f"{path}: its head would take {head_bytes} bytes; that of an adapter never takes "
                f"more than {_HEAD_BYTES}"
            )
        return load(content)
    except (OSError, SafetensorError, ValueError) as error:
        if isinstance(error, RequestError):
            raise
        raise RequestError(
            f"adapter {str(folder)!r}: no readable {WEIGHTS_FILE} ({error}); pickled weights are "
            "not read"
        ) from None


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
            digest.update(tensor.cpu().flatten().view(torch.uint8).numpy().data)
    return digest.digest()
