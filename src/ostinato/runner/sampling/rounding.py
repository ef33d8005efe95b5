"""Measures how much logits change by rounding alone.

A fixed tolerance is too wide for one model and too narrow for another. So it is measured on the
model itself, as in stochastic arithmetic (CESTAC; Vignes, 1993): the prompt is computed again while
the output of every module is changed by up to half a unit in its last place, at random. The
difference of two computations of a model is then expressed row by row, as a multiple of that.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_NUM_RUNS = 2

_FINEST = 2.0**-19
"""Minimum relative error of a module's output: sums of thousands of float32 terms reach it, and
models compute softmax and RoPE in float32 even if they are loaded in float64."""

_CODE_STEP = 2.0**-7
"""Rounding of a row to 8 bits, relative to its largest number."""


def rounding_noise(
    model: "PreTrainedModel", answer: Callable[[], Tensor], logits: Tensor
) -> Tensor:
    """Measure how much each row of logits changes by rounding.

    Args:
        model: The model.
        answer: Computes the logits again.
        logits: Its result without changes, shape (num_rows, vocab_size).

    Returns:
        Shape (num_rows,), float64, relative to the spread of each row.
    """
    size = _size_of_rounding(model.dtype)
    squares = torch.zeros(logits.shape[0], dtype=torch.float64)
    for seed in range(_NUM_RUNS):
        with _rounded_otherwise(model, size, seed):
            squares += relative_difference(answer(), logits).cpu().square()
    return (squares / _NUM_RUNS).sqrt().clamp(min=size)


def with_codes(noise: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the noise if activations are quantized to 8 bits, where a tie may round either way."""
    return noise * (_CODE_STEP / _size_of_rounding(dtype))


def relative_difference(actual: Tensor, expected: Tensor) -> Tensor:
    """Return how far each row is from the expected one, in standard deviations of that row."""
    actual, expected = actual.double(), expected.double()
    return (actual - expected).square().mean(dim=1).sqrt() / expected.std(dim=1)


def in_roundings(actual: Tensor, expected: Tensor, noise: Tensor) -> float:
    """Return the difference of rows as a multiple of the rounding noise.

    It is the third quartile: a row in which rounding changed the choice of experts may differ by
    any amount.
    """
    ratios = relative_difference(actual, expected).cpu() / noise
    return float(ratios.quantile(0.75))


def _size_of_rounding(dtype: torch.dtype) -> float:
    return max(torch.finfo(dtype).eps / 2, _FINEST)


@contextmanager
def _rounded_otherwise(model: "PreTrainedModel", size: float, seed: int) -> Iterator[None]:
    """Add a random relative error of at most ``size`` to the output of every module."""
    generator = torch.Generator().manual_seed(seed)

    def move(output: Any) -> Any:
        if isinstance(output, Tensor) and output.is_floating_point():
            error = torch.rand(output.shape, generator=generator).to(output.device)
            wide = output.double() if output.dtype == torch.float64 else output.float()
            return (wide * (1 + size * (2 * error - 1))).to(output.dtype)
        return tuple(map(move, output)) if type(output) is tuple else output

    handles = [
        module.register_forward_hook(lambda _module, _inputs, output: move(output))
        for module in model.modules()
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
