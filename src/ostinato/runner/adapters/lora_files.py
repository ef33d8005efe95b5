"""Reads a LoRA adapter from a directory of ``peft`` and checks it against the model.

``adapter_config.json`` is its config (``lora_config``), and ``adapter_model.safetensors`` has
``lora_A`` and ``lora_B`` of each linear layer. All is read and checked before anything changes.
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
from transformers.pytorch_utils import Conv1D

from ostinato.core.errors import RequestError
from ostinato.runner.adapters.lora import LoraAdapter, LoraLayer, PackedLoraLayer, pack_layers
from ostinato.runner.adapters.lora_config import WEIGHTS_FILE, LoraConfig, read_config
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
    base = _BaseModel(model)
    layers = {name: base.layer(folder, name, pairs[name], config) for name in sorted(pairs)}
    rank = max(len(layer.down) for layer in layers.values())
    if rank > limits.max_rank:
        raise RequestError(
            f"adapter {str(folder)!r} has rank {rank}, above max_lora_rank={limits.max_rank}: "
            "raise max_lora_rank"
        )
    digest = _digest(layers, config.invocation)
    kept: Mapping[str, LoraLayer | PackedLoraLayer] = layers
    if can_pack(model.dtype, model.device):
        kept = pack_layers(layers)
    num_bytes = sum(layer.down.nbytes + layer.up.nbytes for layer in kept.values())
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
                f"{path}: tensor {key!r:.200} is no lora_A or lora_B of a linear layer, and "
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


class _BaseModel:
    """The layers of a model that adapters may change."""

    def __init__(self, model: "PreTrainedModel") -> None:
        """Collect them by name."""
        self._model = model
        self._modules = dict(model.named_modules())
        self._decoder = set(model.get_decoder().modules())

    def layer(
        self, folder: Path, name: str, pair: dict[str, Tensor], config: LoraConfig
    ) -> LoraLayer:
        """Check one layer's update against the model's layer of that name."""
        size = self._size(folder, name, config)
        if pair.keys() != {"lora_A", "lora_B"}:
            raise RequestError(f"adapter {str(folder)!r}: {name} has {min(pair)} alone")
        down, up = pair["lora_A"], pair["lora_B"]
        rank = down.shape[0] if down.ndim == 2 else 0
        if not rank or down.shape != (rank, size[0]) or up.shape != (size[1], rank):
            raise RequestError(
                f"adapter {str(folder)!r} is for another base model ({config.base}): its {name} is "
                f"{tuple(down.shape)} and {tuple(up.shape)}, and the layer here has {size[0]} "
                f"inputs and {size[1]} outputs"
            )
        if rank != config.rank_of(name):
            raise RequestError(
                f"adapter {str(folder)!r}: the weights of {name} have rank {rank}, and its config "
                f"says {config.rank_of(name)}"
            )
        to = {"dtype": self._model.dtype, "device": self._model.device}
        scale = config.scale_of(name)
        return LoraLayer(down.to(**to).contiguous(), up.to(**to).contiguous(), scale)

    def _size(self, folder: Path, name: str, config: LoraConfig) -> tuple[int, int]:
        """Return inputs and outputs of the linear layer of a name."""
        module, is_expert = self._modules.get(name), ".experts." in f".{name}."
        if module is None and not is_expert:
            raise RequestError(
                f"adapter {str(folder)!r} changes {name!r:.200}, which the decoder here does not "
                f"have: it is for another base model ({config.base}), or for what encodes images, "
                "where adapters are not served"
            )
        is_served = module in self._decoder and not is_expert
        if is_served and isinstance(module, Conv1D):
            return module.weight.shape[0], module.weight.shape[1]
        sizes = getattr(module, "in_features", None), getattr(module, "out_features", None)
        if not is_served or not isinstance(sizes[0], int) or not isinstance(sizes[1], int):
            kind = "an expert" if is_expert else f"a {type(module).__name__}"
            raise RequestError(
                f"adapter {str(folder)!r} targets {name!r:.200}, {kind}: adapters are served on "
                "the decoder's linear layers, not on embeddings, experts, the output layer, or "
                "what encodes images"
            )
        return sizes[0], sizes[1]


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
