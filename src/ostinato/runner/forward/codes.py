"""Weights as codes of 8 or 4 bits, by groups of neighbouring inputs.

::

    weight = code * scale                 8 bits, codes of -127 .. 127
    weight = (code - 8) * scale           4 bits, codes of 0 .. 15
    weight = code * scale + minimum       either, where there are minima

A group's scale is such that its largest weight is a code. It is kept in bfloat16, whose range is
that of the weights, and rounded before codes are, so that it costs no precision of theirs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

GROUP_STEP = 32
"""Groups are a multiple of so many inputs."""

_ZERO = {4: 8, 8: 0}
"""The code of nothing, where a group has no minimum."""


@dataclass(frozen=True, slots=True)
class CodeFormat:
    """How weights are written as codes.

    Attributes:
        bits: 8 or 4.
        group_size: Inputs that share a scale, a multiple of 32.
        has_minima: Whether groups have a minimum as well.
    """

    bits: Literal[4, 8]
    group_size: int
    has_minima: bool = False

    @property
    def zero(self) -> int:
        """The code of weights that are nothing."""
        return 0 if self.has_minima else _ZERO[self.bits]

    def num_groups(self, num_inputs: int) -> int:
        """Return how many groups the inputs of an output are in."""
        return -(-num_inputs // self.group_size)

    def __str__(self) -> str:
        """Name it: ``int4 in groups of 32``."""
        return f"int{self.bits} in groups of {self.group_size}"


@dataclass(frozen=True, slots=True, eq=False)
class Codes:
    """A weight.

    Attributes:
        format: How it is written.
        codes: Shape (num_outputs, num_inputs), int8 for 8 bits without minima, else uint8; with
            minima, codes of 8 bits are below 128.
        scales: Shape (num_outputs, num_groups).
        minima: Likewise, of the same dtype; None without.
    """

    format: CodeFormat
    codes: Tensor
    scales: Tensor
    minima: Tensor | None = None

    def plain(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the weight, shape (num_outputs, num_inputs)."""
        scales, num_inputs = self._by_input(self.scales), self.codes.shape[1]
        if self.minima is not None:
            numbers = self.codes * scales + self._by_input(self.minima)
        else:
            numbers = (self.codes.float() - self.format.zero) * scales
        assert numbers.shape[1] == num_inputs
        return numbers.to(dtype)

    def _by_input(self, of_groups: Tensor) -> Tensor:
        """Repeat the numbers of groups for each input, in float32."""
        repeated = of_groups.float().repeat_interleave(self.format.group_size, dim=1)
        return repeated[:, : self.codes.shape[1]]


def encode(weight: Tensor, format: CodeFormat) -> Codes:
    """Write a weight as codes.

    Args:
        weight: Shape (num_outputs, num_inputs), finite.
        format: How.
    """
    num_outputs, num_inputs = weight.shape
    groups, size = format.num_groups(num_inputs), format.group_size
    padded = functional.pad(weight.float(), (0, groups * size - num_inputs))
    numbers = padded.view(num_outputs, groups, size)
    if format.has_minima:
        scales, minima = _with_minimum(numbers, 2**format.bits - 1 if format.bits == 4 else 127)
        codes = _divided(numbers - minima.float()[..., None], scales)
        codes = codes.round_().clamp_(0, 15 if format.bits == 4 else 127).to(torch.uint8)
    else:
        minima = None
        scales = _best_scales(numbers) if format.bits == 4 else _up(numbers.abs().amax(2) / 127)
        codes = _divided(numbers, scales).round_()
        if format.bits == 4:
            codes = codes.clamp_(-8, 7).add_(8).to(torch.uint8)
        else:
            codes = codes.clamp_(-127, 127).to(torch.int8)
    return Codes(format, codes.view(num_outputs, -1)[:, :num_inputs], scales, minima)


def joined(parts: Sequence[Codes]) -> Codes:
    """Put weights of one format below each other."""
    first = parts[0]
    assert all(part.format == first.format for part in parts), "one format"
    minima = [part.minima for part in parts if part.minima is not None]
    return Codes(
        first.format,
        torch.cat([part.codes for part in parts]),
        torch.cat([part.scales for part in parts]),
        torch.cat(minima) if minima else None,
    )


def _divided(numbers: Tensor, scales: Tensor) -> Tensor:
    """Divide by a group's scale; what a scale of 0 stands for is nothing."""
    scales = scales.float()[..., None]
    return torch.where(scales == 0, 0.0, numbers / scales)


def _up(scales: Tensor) -> Tensor:
    """Round to bfloat16, and never below: no weight is cut off."""
    rounded = scales.bfloat16()
    above = torch.nextafter(rounded, torch.full_like(rounded, torch.inf))
    return torch.where(rounded.float() < scales, above, rounded)


def _best_scales(numbers: Tensor) -> Tensor:
    """Choose scales of 4 bits by the squared error.

    The largest weight may be the code of -8, or of 7 where the sign asks for it, or be cut off a
    little so that all others come out finer.
    """
    size = numbers.abs().amax(2)
    largest = torch.gather(numbers, 2, numbers.abs().argmax(2, keepdim=True))[..., 0]
    best = (-largest / 8).bfloat16()
    least = torch.full_like(size, torch.inf)
    for steps in (8.0, 7.6, 7.2, -8.0, -7.5, -7.0, -6.5, -6.0):
        scales = (-largest / steps).bfloat16()
        codes = _divided(numbers, scales).round_().clamp_(-8, 7)
        error = (codes * scales.float()[..., None]).sub_(numbers).square_().sum(2)
        best = torch.where(error < least, scales, best)
        least = torch.minimum(error, least)
    return best


def _with_minimum(numbers: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """Return scales and minima that span a group's weights."""
    low, high = numbers.amin(2), numbers.amax(2)
    minima = low.bfloat16()
    return _up((high - minima.float()).clamp(min=0) / most), minima
