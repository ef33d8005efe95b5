"""Reads new weights and checks them against the model, before anything changes.

A checkpoint replaces all weights; tensors by name replace only those.
"""

import hashlib
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ostinato.errors import BrokenCheckpoint, ConfigError
from ostinato.runner.checkpoints.checkpoint import quantized_fingerprint
from ostinato.runner.forward.weight_refs import WeightRef, replace_weights, weight_places
from ostinato.runner.images.vision import Vision
from ostinato.runner.loaded_model import LoadedModel
from ostinato.runner.model_loader import load_model

WeightSource = str | Path | Mapping[str, Tensor]
"""A checkpoint as ``LLM`` takes it, or tensors by name."""

IRRELEVANT_ENTRIES = {
    "_name_or_path",
    "_model_name_or_path",
    "dtype",
    "torch_dtype",
    "transformers_version",
    "architectures",
}
"""Entries of a config that do not change what is computed; the dtype is the engine's own."""


@dataclass(frozen=True, slots=True, eq=False)
class WeightUpdate:
    """Weights that were checked against a model."""

    tensors: Mapping[str, Tensor]  # by name; a part of the model's
    digest: bytes  # SHA-256 over names and content, or of the whole checkpoint
    is_complete: bool  # whether nothing of the old weights stays
    vision: Vision | None = None  # the encoder of images; None keeps the model's

    def apply(self, loaded: LoadedModel) -> LoadedModel:
        """Overwrite a model's weights in place.

        Returns:
            The same model with its new fingerprint: of a whole checkpoint the same as in a new
            engine; of a part, it also depends on the weights before.
        """
        replace_weights(loaded.model, self.tensors)
        if loaded.vision is not None and self.vision is not None:
            loaded.vision.replace_weights(self.vision)
        partial = hashlib.sha256(loaded.fingerprint + self.digest).digest()
        return replace(loaded, fingerprint=self.digest if self.is_complete else partial)


def read_weights(source: WeightSource, loaded: LoadedModel) -> WeightUpdate:
    """Fetch and check new weights for a model; nothing changes yet.

    Args:
        source: A checkpoint of the same config, or tensors by the names of the model's
            ``state_dict()``.
        loaded: The model.

    Raises:
        ConfigError: A tensor does not fit, or the checkpoint is of another model.
        ModelError: The checkpoint cannot be read.

    Cost: a checkpoint is loaded beside the model, so that its memory is needed twice.
    """
    if isinstance(source, Mapping):
        _check_tensors(source, loaded)
        return WeightUpdate(dict(source), _digest(source), is_complete=False)
    if not isinstance(source, (str, Path)):
        raise ConfigError(
            f"weights come as a checkpoint's name or a mapping from names to tensors, not as "
            f"{type(source).__name__}"
        )
    dtype: Any = str(loaded.dtype).removeprefix("torch.")
    has_images = loaded.vision is not None
    fresh = load_model(source, dtype, loaded.device, forward="plain", images=has_images)
    _check_same_config(fresh, loaded)
    tensors = fresh.model.state_dict()
    _check_checkpoint(tensors, loaded, fresh.path)
    quantization = str(loaded.quantization or "")
    digest = quantized_fingerprint(fresh.fingerprint, quantization)
    # A checkpoint that came quantized is quantized again here, by its format alone.
    is_complete = loaded.quantization is None or loaded.quantization.stored is None
    return WeightUpdate(tensors, digest, is_complete, fresh.vision)


def _check_tensors(given: Mapping[str, Tensor], loaded: LoadedModel) -> None:
    """Refuse tensors that are no weights of the model."""
    kept = weight_places(loaded.model)
    if not given:
        raise ConfigError("the mapping names no weight: nothing would change")
    for name, tensor in given.items():
        if name not in kept:
            raise ConfigError(f"weight {name!r}: the model has none of that name")
        if not isinstance(tensor, Tensor):
            raise ConfigError(f"weight {name!r} is a {type(tensor).__name__}: give a torch.Tensor")
        if tensor.shape != kept[name].shape:
            raise ConfigError(
                f"weight {name!r} has shape {tuple(tensor.shape)}, but the model's has "
                f"{tuple(kept[name].shape)}"
            )
        if tensor.dtype != kept[name].dtype:
            raise ConfigError(
                f"weight {name!r} is {tensor.dtype}, but the model computes in "
                f"{kept[name].dtype}: convert it with .to({kept[name].dtype})"
            )
    _check_tied(given, kept)


def _check_tied(given: Mapping[str, Tensor], kept: Mapping[str, WeightRef]) -> None:
    """Refuse two values for names that are one tensor in the model."""
    seen: dict[Hashable, str] = {}
    for name in sorted(given):
        first = seen.setdefault(kept[name].home, name)
        if given[name].numel() and not torch.equal(given[first].cpu(), given[name].cpu()):
            raise ConfigError(
                f"weights {first!r} and {name!r} are tied in this model, but differ: give one"
            )


def _check_same_config(fresh: LoadedModel, loaded: LoadedModel) -> None:
    """Refuse a checkpoint with another config."""
    new, old = fresh.config.to_dict(), loaded.config.to_dict()
    relevant = {*new, *old} - IRRELEVANT_ENTRIES
    changed = sorted(key for key in relevant if new.get(key) != old.get(key))
    if changed:
        key = changed[0]
        raise ConfigError(
            f"{fresh.path}: its config says {key}={new.get(key)!r}, but the engine's model has "
            f"{old.get(key)!r}: weights of another model need another engine"
        )


def _check_checkpoint(tensors: Mapping[str, Tensor], loaded: LoadedModel, path: Path) -> None:
    """Refuse a checkpoint whose weights are not the model's, one by one."""
    kept = weight_places(loaded.model)
    for name in sorted({*tensors, *kept}):
        if name not in tensors or name not in kept:
            where = "the checkpoint" if name in tensors else "the model"
            raise BrokenCheckpoint(f"{path}: weight {name!r} is in {where} alone")
        if tensors[name].shape != kept[name].shape or tensors[name].dtype != kept[name].dtype:
            raise BrokenCheckpoint(
                f"{path}: weight {name!r} is {tensors[name].dtype} of shape "
                f"{tuple(tensors[name].shape)}, but the model's is {kept[name].dtype} of shape "
                f"{tuple(kept[name].shape)}"
            )


def _digest(tensors: Mapping[str, Tensor]) -> bytes:
    """Return a SHA-256 over names and contents; shapes and dtypes are the model's."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        content = tensors[name].detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        digest.update(len(name.encode()).to_bytes(8, "little") + name.encode())
        digest.update(content.numel().to_bytes(8, "little"))
        digest.update(content.numpy().data)
    return digest.digest()
