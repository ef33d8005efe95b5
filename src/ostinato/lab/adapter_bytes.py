"""The memory of LoRA adapters, from the headers of their files."""

import json
import math
import struct
from collections.abc import Sequence
from pathlib import Path

from ostinato.core.errors import ConfigError

WEIGHT_BYTES = 2
"""Bytes of a weight in bfloat16, which models are served in."""

_MOST_HEAD_BYTES = 100 * 2**20


def adapter_bytes(folders: Sequence[str], packed: bool = False) -> int:
    """Return the memory of the adapters in some directories, in bfloat16.

    Args:
        folders: Their directories.
        packed: Whether to round ranks and widths up to multiples of 32, as on a CPU.

    Raises:
        ConfigError: One has no readable ``adapter_model.safetensors``.
    """
    return sum(_bytes_of(folder, 32 if packed else 1) for folder in folders)


def _bytes_of(folder: str, unit: int) -> int:
    path = Path(folder) / "adapter_model.safetensors"
    try:
        with path.open("rb") as file:
            (num_bytes,) = struct.unpack("<Q", file.read(8))
            if num_bytes > _MOST_HEAD_BYTES:
                raise ValueError("its header is too long")
            head = json.loads(file.read(num_bytes))
        shapes = [entry["shape"] for name, entry in head.items() if name != "__metadata__"]
        padded = ([-(-size // unit) * unit for size in shape] for shape in shapes)
        return sum(map(math.prod, padded)) * WEIGHT_BYTES
    except (OSError, ValueError, struct.error, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"--lora {folder!r}: {path} cannot be read: {error}") from error
