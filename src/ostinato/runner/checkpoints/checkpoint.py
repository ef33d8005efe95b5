"""Checks that a checkpoint is complete, and fingerprints its weights."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from ostinato.errors import BrokenCheckpoint
from ostinato.runner.checkpoints.gguf_file import parts

CONFIG_FILE = "config.json"
_SINGLE_FILE = "model.safetensors"
_INDEX_FILE = "model.safetensors.index.json"
_PIECE_BYTES = 2**22


def read_config(directory: Path) -> dict[str, Any]:
    """Return the content of a checkpoint's config.

    Raises:
        BrokenCheckpoint: It is missing, is not JSON, or has no ``model_type``.
    """
    config = _read_json(directory / CONFIG_FILE)
    if not isinstance(config.get("model_type"), str):
        raise BrokenCheckpoint(f"{directory / CONFIG_FILE}: has no model_type")
    return config


def weight_files(checkpoint: Path) -> tuple[Path, ...]:
    """Return a checkpoint's weight files: complete safetensors files, or a GGUF file.

    Raises:
        BrokenCheckpoint: There are none, one that the index names is missing, or one is truncated.

    Cost: reads headers only.
    """
    if checkpoint.is_file():
        return parts(checkpoint)
    # If there are both, transformers reads the single file.
    if (checkpoint / _SINGLE_FILE).exists():
        paths: tuple[Path, ...] = (checkpoint / _SINGLE_FILE,)
    elif (checkpoint / _INDEX_FILE).exists():
        paths = _shards(checkpoint / _INDEX_FILE)
    else:
        raise BrokenCheckpoint(
            f"{checkpoint} has neither {_SINGLE_FILE} nor {_INDEX_FILE}; pickled "
            "weights are not read: convert them to safetensors or GGUF"
        )
    for path in paths:
        _check_complete(path)
    return paths


def fingerprinted_files(checkpoint: Path, weights: tuple[Path, ...]) -> tuple[Path, ...]:
    """Return a checkpoint's config and weights in the order of the fingerprint."""
    config = () if checkpoint.is_file() else (checkpoint / CONFIG_FILE,)
    return (*config, *sorted(weights))


def fingerprint(
    checkpoint: Path, weights: tuple[Path, ...], piece_read: Callable[[], None] = lambda: None
) -> bytes:
    """Return a SHA-256 over the content of the config and all weights; GGUF has both in one file.

    Two checkpoints with the same fingerprint compute the same KV; names and times do not matter.

    Args:
        checkpoint: Directory, or GGUF file.
        weights: Its weight files.
        piece_read: Called after each piece; may raise to stop.

    Cost: reads every byte, about a second per gigabyte.
    """
    digest = hashlib.sha256()
    for path in fingerprinted_files(checkpoint, weights):
        digest.update(path.stat().st_size.to_bytes(8, "little"))
        with path.open("rb") as file:
            while piece := file.read(_PIECE_BYTES):
                digest.update(piece)
                piece_read()
    return digest.digest()


def quantized_fingerprint(weights: bytes, quantization: str) -> bytes:
    """Return the fingerprint of weights that are quantized when they are loaded.

    Args:
        weights: Fingerprint of the checkpoint.
        quantization: Everything that the result depends on; empty for none.
    """
    if not quantization:
        return weights
    return hashlib.sha256(weights + quantization.encode()).digest()


def _shards(index: Path) -> tuple[Path, ...]:
    """Return the files that an index names."""
    weight_map = _read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise BrokenCheckpoint(f"{index}: has no weight_map")
    names = sorted(set(weight_map.values()))
    missing = [name for name in names if not (index.parent / name).exists()]
    if missing:
        raise BrokenCheckpoint(
            f"{index.parent}: {len(missing)} of {len(names)} weight files are missing: "
            f"{', '.join(missing[:3])}"
        )
    return tuple(index.parent / name for name in names)


def _check_complete(path: Path) -> None:
    """Raise BrokenCheckpoint if a file is not as long as its header says."""
    try:
        with safe_open(str(path), framework="numpy"):
            return
    except (SafetensorError, OSError) as error:
        raise BrokenCheckpoint(
            f"{path} ({path.stat().st_size:,} bytes) is not a complete safetensors file: {error}; "
            "fetch it again"
        ) from error


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise BrokenCheckpoint(f"{path} is missing") from error
    except (OSError, ValueError) as error:
        raise BrokenCheckpoint(f"{path} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise BrokenCheckpoint(f"{path} is not a JSON object")
    return content
