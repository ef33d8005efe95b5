"""Checkpoints with the same weights on every system: whole numbers make them, no library draws."""

from pathlib import Path
from typing import Any

import numpy as np
import torch

from ostinato.runner.loading.model_support import auto_class
from tests.support.models.checkpoints import make_config


def portable_numbers(seed: int, shape: tuple[int, ...]) -> torch.Tensor:
    """Return bell-shaped numbers around 0, most of them within -1..1.

    Source: splitmix64, Steele et al. 2014; four of its 16 bits each are added.
    """
    count = int(np.prod(shape))
    with np.errstate(over="ignore"):
        x = np.arange(count, dtype=np.uint64) + np.uint64(seed << 32)
        x *= np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        x ^= x >> np.uint64(31)
    parts = [(x >> np.uint64(16 * i)) & np.uint64(0xFFFF) for i in range(4)]
    total = np.array(parts).astype(np.int64).sum(axis=0) - 2 * 0xFFFF
    return torch.from_numpy((total / 65536).astype(np.float32).reshape(shape))


def save_portable_checkpoint(path: Path, family: str, **changes: Any) -> Path:
    """Write config and weights of a tiny model, without a tokenizer; returns the folder."""
    config = make_config(family, **changes)
    model = auto_class(config).from_config(config).float().eval()
    with torch.no_grad():
        for seed, (name, parameter) in enumerate(model.named_parameters()):
            numbers = portable_numbers(seed, tuple(parameter.shape))
            if parameter.ndim == 1:
                parameter.add_(0.1 * numbers)
            else:
                parameter.copy_(numbers * (1.5 if "embed" in name or "head" in name else 0.2))
    model.save_pretrained(path)
    return path
