"""Checks that each layer of a quantized checkpoint computes each row by itself.

What configs say is refused before weights are read (``quantization``). Whatever else a checkpoint
came quantized with is tried out: each of its layers is called twice, the second time beside other
rows.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from ostinato.errors import UnsupportedModel

_LOUDER = 64.0
"""Factor on the other rows; it makes outliers of what was none."""

_MOST_DIFFERENCE = 1e-3
"""Relative to the row: less than half a step of 8 bits, more than another order of sums explains
in float32. In 16 bits one unit in the last place is allowed instead."""


def quantization_settings(config: PreTrainedConfig) -> Iterator[Mapping[str, Any]]:
    """Yield what a config says of quantization: of the whole, or of its text model."""
    for part in {id(part): part for part in (config, config.get_text_config())}.values():
        settings = getattr(part, "quantization_config", None)
        if settings is not None:
            yield settings if isinstance(settings, Mapping) else settings.to_dict()


def change_by_neighbours(module: nn.Module, rows: Tensor, output: Tensor) -> float | None:
    """Return by how much a layer changes a row when the other rows change.

    Args:
        module: Maps rows to rows.
        rows: What it was called with, shape (..., num_rows, num_inputs), two rows at least.
        output: What it gave.

    Returns:
        Relative to the row; None if rounding explains it.
    """
    others = rows * _LOUDER
    others[..., 0, :] = rows[..., 0, :]
    before, after = output[..., 0, :].double(), module(others)[..., 0, :].double()
    change = float((after - before).norm() / before.norm().clamp(min=1e-30))
    allowed = max(_MOST_DIFFERENCE, torch.finfo(output.dtype).eps)
    return None if change <= allowed else change


class RowWatch:
    """Tries out the layers of a quantized model while it is called.

    Used as a context: layers that map rows to rows, and have no layers inside, are called once
    more with what they were just called with, but louder neighbours.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        """Watch nothing unless the model came quantized."""
        self._model = model
        self._is_quantized = any(True for _ in quantization_settings(model.config))
        self._handles: list[Any] = []

    def __enter__(self) -> None:
        """Begin to watch."""
        if self._is_quantized:
            for name, module in self._model.named_modules():
                if not module._modules:
                    self._watch(name, module)

    def __exit__(self, *_: object) -> None:
        """Watch no longer."""
        for handle in self._handles:
            handle.remove()

    def _watch(self, name: str, module: nn.Module) -> None:
        is_inside = False

        def compare(_module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
            nonlocal is_inside
            if is_inside or not _maps_rows(inputs, output):
                return
            is_inside = True
            try:
                change = change_by_neighbours(module, inputs[0], output)
            finally:
                is_inside = False
            if change is not None:
                raise UnsupportedModel(
                    f"{name} ({type(module).__name__}) computes a token otherwise when other "
                    f"tokens of the step change (by {change:.2g} of its size): its activations are "
                    "quantized by batch, so that no prefix can be shared"
                )

        self._handles.append(module.register_forward_hook(compare))


def _maps_rows(inputs: tuple[Any, ...], output: Any) -> bool:
    """Say whether a call took one tensor of several rows and gave as many."""
    if len(inputs) != 1 or not isinstance(inputs[0], Tensor) or not isinstance(output, Tensor):
        return False
    rows: Tensor = inputs[0]
    return (
        rows.is_floating_point()
        and rows.ndim >= 2
        and rows.shape[-2] >= 2
        and output.shape[:-1] == rows.shape[:-1]
    )
