"""Checkpoints in FP8, whose weights become plain numbers while they are read.

::

    weight = code * scale       codes of E4M3

    fp8                 weight_scale_inv  (rows / 128, columns / 128)  DeepSeek, Qwen: blocks
    compressed-tensors  weight_scale      (rows, 1) or (1,)            rows, or the whole weight

Activations are not rounded to FP8. Sources: DeepSeek-V3, arXiv 2412.19437, section 3.3; the layouts
are those of ``integrations/finegrained_fp8.py`` of ``transformers`` and of compressed-tensors.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ostinato.errors import BrokenCheckpoint
from ostinato.runner.loading.weight_source import FileRange, SafetensorsSource, is_plain

_CODES = "F8_E4M3"
_SCALES = ("_scale_inv", "_scale")
_OF_ACTIVATIONS = (".input_scale", ".activation_scale")


def is_fp8(settings: Mapping[str, Any]) -> bool:
    """Return whether a checkpoint's quantized weights are all in FP8."""
    if settings.get("quant_method") != "compressed-tensors":
        return settings.get("quant_method") == "fp8"
    return settings.get("format") == "float-quantized"


class Fp8Source(SafetensorsSource):
    """Weights of which some have scales; see ``WeightSource``."""

    def __init__(self, files: Iterable[Path], settings: Mapping[str, Any]) -> None:
        """Read the files' headers.

        Args:
            files: Safetensors.
            settings: Settings of the quantization.

        Raises:
            BrokenCheckpoint: Codes have no scales.
        """
        super().__init__(files)
        self._block = tuple(settings.get("weight_block_size") or ())
        self._scales: dict[str, Tensor] = {}
        for name, (where, kind, _) in list(self._ranges.items()):
            if name.endswith(_OF_ACTIVATIONS):
                del self._ranges[name]
            elif kind == _CODES:
                self._scales[name] = self._scale_of(name, where)

    @property
    def are_numbers(self) -> bool:
        """Whether all other weights are floating-point numbers of common formats."""
        kinds = {name: kind for name, (_, kind, _) in self._ranges.items()}
        return all(is_plain(kind) for name, kind in kinds.items() if name not in self._scales)

    def plain(self, name: str, dtype: torch.dtype, num_rows: int | None = None) -> Tensor:
        """Return a weight, or its first rows."""
        scales = self._scales.get(name)
        if scales is None:
            return super().plain(name, dtype, num_rows)
        numbers = super().plain(name, torch.float32, num_rows)
        rows, columns = numbers.shape
        if self._block and scales.shape == self._blocks_of(self._ranges[name][2]):
            wide = scales[: -(-rows // self._block[0])].repeat_interleave(self._block[0], 0)
            scales = wide[:rows].repeat_interleave(self._block[1], 1)[:, :columns]
        elif scales.numel() > 1:
            scales = scales.view(-1, 1)[:rows]
        return numbers.mul_(scales).to(dtype)

    def _own_dtype(self, name: str) -> torch.dtype | None:
        return None if name in self._scales else super()._own_dtype(name)

    def _scale_of(self, name: str, where: FileRange) -> Tensor:
        own = next((name + suffix for suffix in _SCALES if name + suffix in self._ranges), "")
        scales = super().plain(own, torch.float32) if own else torch.empty(0)
        self._ranges.pop(own, None)
        shape = self._ranges[name][2]
        known = (self._blocks_of(shape), (shape[0], 1), shape[:1], (1,), ())
        if len(shape) != 2 or tuple(scales.shape) not in known:
            raise BrokenCheckpoint(
                f"{where.path}: {name} in FP8, of shape {shape}, has scales of shape "
                f"{tuple(scales.shape)}; known are {' and '.join(map(str, known))}"
            )
        return scales

    def _blocks_of(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(-(-size // step) for size, step in zip(shape, self._block, strict=False))
