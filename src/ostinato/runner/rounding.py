"""Measures how far logits move by rounding alone.

A fixed tolerance is too wide for one model and too narrow for another. So it is measured on the
model itself, as stochastic arithmetic does (CESTAC; Vignes, 1993): the prompt is answered again
while the output of every module is moved by up to half a unit in its last place, at random. What
two computations of one model may differ by is then told row by row, as a multiple of that.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

_NUM_RUNS = 2

_FINEST = 2.0**-19
"""Least relative error of a module's output: sums of thousands of float32 terms reach it, and
models compute softmax and RoPE in float32 even if they are loaded in float64."""

_CODE_STEP = 2.0**-7
"""Relative to the largest number of a row, when its numbers become integers of 8 bits."""


def rounding_noise(model: PreTrainedModel, answer: Callable[[], Tensor], logits: Tensor) -> Tensor:
    """Measure by how much the rows of some logits move by rounding.

    Args:
        model: Computes the answer.
        answer: Computes the logits anew.
        logits: What it gives as a rule, shape (num_rows, vocab_size).

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
    """Return the noise where rows become integers of 8 bits: one between two may become either."""
    return noise * (_CODE_STEP / _size_of_rounding(dtype))


def relative_difference(found: Tensor, expected: Tensor) -> Tensor:
    """Return how far each row is from what is expected, in standard deviations of that row."""
    found, expected = found.double(), expected.double()
    return (found - expected).square().mean(dim=1).sqrt() / expected.std(dim=1)


def in_roundings(found: Tensor, expected: Tensor, noise: Tensor) -> float:
    """Return how many times further rows are apart than rounding moves them.

    Three rows in four are no further apart than that: a row whose experts changed over a tie
    differs by any amount.
    """
    ratios = relative_difference(found, expected).cpu() / noise
    return float(ratios.quantile(0.75))


def _size_of_rounding(dtype: torch.dtype) -> float:
    return max(torch.finfo(dtype).eps / 2, _FINEST)


@contextmanager
def _rounded_otherwise(model: PreTrainedModel, size: float, seed: int) -> Iterator[None]:
    """Move what every module gives by a random relative error of at most ``size``."""
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
