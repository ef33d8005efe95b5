"""Checkpoints in FP8, whose weights become plain numbers while they are read.

::

    weight = code * scale       codes of E4M3

    fp8                 weight_scale_inv  (rows / 128, columns / 128)  DeepSeek, Qwen: blocks
    compressed-tensors  weight_scale      (rows, 1) or (1,)            rows, or the whole weight

Activations are not rounded to FP8. Sources: DeepSeek-V3, arXiv 2412.19437, section 3.3; the layouts
are those of ``integrations/finegrained_fp8.py`` of ``transformers`` and of compressed-tensors.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ostinato.errors import BrokenCheckpoint
from ostinato.runner.loading.weight_source import CheckpointWeight, PlainWeight

_CODES = "F8_E4M3"
_SCALES = ("_scale_inv", "_scale")
_OF_ACTIVATIONS = (".input_scale", ".activation_scale")


def is_fp8(settings: Mapping[str, Any]) -> bool:
    """Return whether a checkpoint's quantized weights are all in FP8."""
    if settings.get("quant_method") != "compressed-tensors":
        return settings.get("quant_method") == "fp8"
    return settings.get("format") == "float-quantized"


class Fp8Weight(CheckpointWeight):
    """A weight of codes and scales."""

    format = _CODES

    def __init__(
        self, name: str, codes: PlainWeight, scales: Tensor, block: tuple[int, ...]
    ) -> None:
        """Take the scales of rows, of blocks of a size, or of all.

        Raises:
            BrokenCheckpoint: They do not fit the codes.
        """
        super().__init__(codes.shape, codes.ranges)
        self._codes, self._scales, self._block = codes, scales, block
        shape = codes.shape
        self._num_blocks = tuple(-(-n // step) for n, step in zip(shape, block, strict=False))
        known = (self._num_blocks, (shape[0], 1), shape[:1], (1,), ())
        if len(shape) != 2 or tuple(scales.shape) not in known:
            raise BrokenCheckpoint(
                f"{codes.where.path}: {name} in FP8, of shape {shape}, has scales of shape "
                f"{tuple(scales.shape)}; known are {' and '.join(map(str, known))}"
            )

    def plain(self, dtype: torch.dtype, num_rows: int | None = None) -> Tensor:
        """Return the weight, or its first rows."""
        numbers, scales = self._codes.plain(torch.float32, num_rows), self._scales
        rows, columns = numbers.shape
        if self._block and scales.shape == self._num_blocks:
            wide = scales[: -(-rows // self._block[0])].repeat_interleave(self._block[0], 0)
            scales = wide[:rows].repeat_interleave(self._block[1], 1)[:, :columns]
        elif scales.numel() > 1:
            scales = scales.view(-1, 1)[:rows]
        return numbers.mul_(scales).to(dtype)


def fp8_weights(
    stored: Mapping[str, PlainWeight], settings: Mapping[str, Any]
) -> dict[str, CheckpointWeight]:
    """Return the weights of a checkpoint, codes together with their scales.

    Args:
        stored: What its files have.
        settings: Settings of the quantization.

    Raises:
        BrokenCheckpoint: Codes have no scales.
    """
    block = tuple(settings.get("weight_block_size") or ())
    weights: dict[str, CheckpointWeight] = {
        name: weight for name, weight in stored.items() if not name.endswith(_OF_ACTIVATIONS)
    }
    for name, codes in stored.items():
        if codes.format == _CODES and name in weights:
            own = next((name + suffix for suffix in _SCALES if name + suffix in stored), "")
            scales = stored[own].plain(torch.float32) if own else torch.empty(0)
            weights.pop(own, None)
            weights[name] = Fp8Weight(name, codes, scales, block)
    return weights
