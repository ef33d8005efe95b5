"""Weights as codes of 8 or 4 bits, in groups of adjacent inputs.

::

    weight = code * scale                 8 bits, codes of -128 .. 127
    weight = (code - 8) * scale           4 bits, codes of 0 .. 15
    weight = code * scale + minimum       either, with minima
    weight = (code - zero) * scale        either, with zero points, as checkpoints may have
    weight = table[code] * scale          4 bits, with one of ``TABLES``

A group's scale is such that its largest weight is a code. It is stored in bfloat16, whose range is
that of the weights, and rounded before the codes are computed, so that they compensate for it.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from ostinato.runner.native.code_packing import TableName

TABLES: Mapping[TableName, tuple[int, ...]] = {
    "mxfp4": (-12, -8, -6, -4, -3, -2, -1, 0, 0, 1, 2, 3, 4, 6, 8, 12),
    "iq4": (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113),
}
"""What codes of 4 bits stand for: twice the numbers of E2M1, and those of IQ4_NL and IQ4_XS."""

_ZERO = {4: 8, 8: 0}
"""The code of zero, for a group without minimum."""

_SLICE_NUMBERS = 2**20
"""Weights that are quantized at once: what is computed on the way fits the processor's caches."""


@dataclass(frozen=True, slots=True)
class CodeFormat:
    """A format of codes.

    Attributes:
        bits: 8 or 4.
        group_size: Inputs that share a scale, 16 or a multiple of 32.
        has_minima: Whether groups have a minimum as well.
        has_zeros: Whether groups have a zero point; never together with a minimum.
        table: The table in which codes are places; empty if they are numbers. Groups have neither
            minima nor zero points then.
    """

    bits: Literal[4, 8]
    group_size: int
    has_minima: bool = False
    has_zeros: bool = False
    table: TableName = ""

    @property
    def zero(self) -> int:
        """The code of zero, unless groups define it."""
        return 0 if self.has_minima or self.has_zeros else _ZERO[self.bits]

    @property
    def min_code(self) -> int:
        """The smallest code."""
        return 0 if self.bits == 4 else -128

    @property
    def max_code(self) -> int:
        """The largest code."""
        return 15 if self.bits == 4 else 127

    def num_groups(self, num_inputs: int) -> int:
        """Return the number of groups in ``num_inputs`` inputs."""
        return -(-num_inputs // self.group_size)

    def __str__(self) -> str:
        """Return its name, such as ``int4 in groups of 32``."""
        return f"{self.table or f'int{self.bits}'} in groups of {self.group_size}"


@dataclass(frozen=True, slots=True)
class Activations:
    """What rows become before they are multiplied with codes.

    Attributes:
        bits: 8 for codes, ``round(number / scale)`` with ``scale = largest / 127.5``; 0 for numbers
            of 16 bits or more, see ``native/src/products/codes_rows.h``.
        group_size: Adjacent inputs of a row that share a scale, as in llama.cpp's Q8_0; 0 for all
            of them, as compressed-tensors defines dynamic scales per token.
    """

    bits: Literal[0, 8] = 0
    group_size: Literal[0, 32] = 0

    def __str__(self) -> str:
        """Return a name, such as ``int8 in groups of 32``."""
        if not self.bits:
            return "not quantized"
        return (
            f"int{self.bits} in groups of {self.group_size}" if self.group_size else "int8 by token"
        )


PLAIN = Activations()
BY_TOKEN = Activations(bits=8)
IN_GROUPS = Activations(bits=8, group_size=32)


@dataclass(frozen=True, slots=True, eq=False)
class Codes:
    """A quantized weight.

    Attributes:
        format: Format of the codes.
        codes: Shape (num_outputs, num_inputs), int8 for 8 bits and uint8 for 4.
        scales: Shape (num_outputs, num_groups).
        minima: Likewise, of the same dtype; None if there are none.
        zeros: Likewise, int8; None if there are none.
        order: The input of each column of ``codes``, shape (num_inputs,); None if they are in
            order. Groups are of adjacent columns.
    """

    format: CodeFormat
    codes: Tensor
    scales: Tensor
    minima: Tensor | None = None
    zeros: Tensor | None = None
    order: Tensor | None = None

    def plain(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the dequantized weight, shape (num_outputs, num_inputs)."""
        scales = self._by_input(self.scales)
        if self.minima is not None:
            numbers = self.codes * scales + self._by_input(self.minima)
        elif self.zeros is not None:
            numbers = (self.codes - self._by_input(self.zeros)) * scales
        else:
            numbers = self.integers() * scales
        if self.order is not None:
            numbers = torch.empty_like(numbers).index_copy_(1, self.order, numbers)
        return numbers.to(dtype)

    def integers(self) -> Tensor:
        """Return what codes stand for where zero is as in the format, int8."""
        if self.format.table:
            return torch.tensor(TABLES[self.format.table], dtype=torch.int8)[self.codes.long()]
        return self.codes.to(torch.int8) - self.format.zero

    def _by_input(self, of_groups: Tensor) -> Tensor:
        """Repeat the numbers of groups for each input, in float32."""
        repeated = of_groups.float().repeat_interleave(self.format.group_size, dim=1)
        return repeated[:, : self.codes.shape[1]]


@dataclass(frozen=True, slots=True, eq=False)
class LaterCodes:
    """A quantized weight that is read when it is packed.

    Attributes:
        format: Format of the codes.
        num_rows: Outputs.
        num_columns: Inputs.
        scale_dtype: Dtype of scales.
        read: Returns the codes.
    """

    format: CodeFormat
    num_rows: int
    num_columns: int
    scale_dtype: torch.dtype
    read: Callable[[], Codes]

    @classmethod
    def of(cls, codes: Codes) -> "LaterCodes":
        """Return codes that were read."""
        num_rows, num_columns = codes.codes.shape
        return cls(codes.format, num_rows, num_columns, codes.scales.dtype, lambda: codes)

    def as_codes(self, dtype: torch.dtype) -> Codes:
        """Read."""
        return self.read()


def encode(weight: Tensor, format: CodeFormat) -> Codes:
    """Quantize a weight of shape (num_outputs, num_inputs), finite; some rows at a time."""
    step = max(1, _SLICE_NUMBERS // weight.shape[1])
    parts = [_encode_rows(rows, format) for rows in weight.split(step)]
    return parts[0] if len(parts) == 1 else joined(parts)


def _encode_rows(weight: Tensor, format: CodeFormat) -> Codes:
    size = format.group_size
    padded = functional.pad(weight.float(), (0, -weight.shape[1] % size))
    numbers = padded.view(len(weight), -1, size)
    minima = zeros = None
    if format.has_minima:
        scales, minima = _with_minimum(numbers, format.max_code)
    elif format.has_zeros:
        scales, zeros = _with_zero(numbers, format)
    elif format.bits == 4 and not format.table:
        scales = _best_scales(numbers)
    else:
        largest = TABLES[format.table][-1] if format.table else 127
        scales = _up(numbers.abs().amax(2) / largest)
    return Codes(format, codes_of(weight, format, scales, minima, zeros), scales, minima, zeros)


def codes_of(
    weight: Tensor,
    format: CodeFormat,
    scales: Tensor,
    minima: Tensor | None = None,
    zeros: Tensor | None = None,
) -> Tensor:
    """Return the nearest codes for given scales; see ``Codes``."""
    num_outputs, num_inputs = weight.shape
    padded = functional.pad(weight.float(), (0, -num_inputs % format.group_size))
    numbers = padded.view(num_outputs, -1, format.group_size)
    if minima is not None:
        numbers = numbers - minima.float()[..., None]
    codes = _divided(numbers, scales)
    if format.table:
        table = torch.tensor(TABLES[format.table], dtype=torch.float32)
        places = torch.bucketize(codes, (table[1:] + table[:-1]) / 2, right=True)
        return places.to(torch.uint8).view(num_outputs, -1)[:, :num_inputs]
    codes.round_()
    codes.add_(format.zero if zeros is None else zeros[..., None])
    dtype = torch.uint8 if format.bits == 4 else torch.int8
    codes.clamp_(format.min_code, format.max_code)
    return codes.to(dtype).view(num_outputs, -1)[:, :num_inputs]


def joined(parts: Sequence[Codes]) -> Codes:
    """Concatenate weights with inputs in order; if formats differ, in one that represents all."""
    assert all(part.order is None for part in parts)
    format = joined_format([part.format for part in parts])
    wide = [widened(part, format) for part in parts]
    return Codes(
        format,
        torch.cat([part.codes for part in wide]),
        torch.cat([part.scales for part in wide]),
        _together([part.minima for part in wide]),
        _together([part.zeros for part in wide]),
    )


def joined_format(formats: Sequence[CodeFormat]) -> CodeFormat:
    """Return a format that represents weights of several without loss."""
    if all(format == formats[0] for format in formats):
        return formats[0]
    has_minima, has_zeros = (
        any(getattr(format, name) for format in formats) for name in ("has_minima", "has_zeros")
    )
    are_narrow = all(format.bits == 4 and not format.table for format in formats)
    return CodeFormat(
        4 if are_narrow and has_zeros and not has_minima else 8,
        math.gcd(*(format.group_size for format in formats)),
        has_minima,
        has_zeros,
    )


def _together(parts: Sequence[Tensor | None]) -> Tensor | None:
    tensors = [part for part in parts if part is not None]
    return torch.cat(tensors) if tensors else None


def widened(part: Codes, format: CodeFormat) -> Codes:
    """Return codes in a format of at least as many bits, and of groups that divide theirs."""
    if part.format == format:
        return part
    times = part.format.group_size // format.group_size
    groups = format.num_groups(part.codes.shape[1])
    scales = part.scales.repeat_interleave(times, dim=1)[:, :groups]
    minima, zeros = (
        None if each is None else each.repeat_interleave(times, dim=1)[:, :groups]
        for each in (part.minima, part.zeros)
    )
    if format.has_minima and minima is None:
        minima = torch.zeros_like(scales)
    is_narrow = format.bits == 4
    if format.has_zeros and zeros is None:
        zeros = torch.full_like(scales, part.format.zero * is_narrow, dtype=torch.int8)
    codes = part.codes if is_narrow else part.integers()
    return Codes(format, codes, scales, minima, zeros, part.order)


def _divided(numbers: Tensor, scales: Tensor) -> Tensor:
    """Divide by a group's scale; 0 if the scale is 0."""
    scales = scales.float()[..., None]
    return torch.where(scales == 0, 0.0, numbers / scales)


def _up(scales: Tensor) -> Tensor:
    """Round up to bfloat16, so that no weight is clipped."""
    rounded = scales.bfloat16()
    above = torch.nextafter(rounded, torch.full_like(rounded, torch.inf))
    return torch.where(rounded.float() < scales, above, rounded)


def _best_scales(numbers: Tensor) -> Tensor:
    """Choose scales of 4 bits by the squared error.

    The largest weight becomes the code of -8, or of 7, or is clipped a little so that all others
    are more precise.
    """
    size = numbers.abs().amax(2)
    largest = torch.gather(numbers, 2, numbers.abs().argmax(2, keepdim=True))[..., 0]
    best = (-largest / 8).bfloat16()
    min_error = torch.full_like(size, torch.inf)
    for steps in (8.0, 7.6, 7.2, -8.0, -7.5, -7.0, -6.5, -6.0):
        scales = (-largest / steps).bfloat16()
        codes = _divided(numbers, scales).round_().clamp_(-8, 7)
        error = (codes * scales.float()[..., None]).sub_(numbers).square_().sum(2)
        best = torch.where(error < min_error, scales, best)
        min_error = torch.minimum(error, min_error)
    return best


def _with_minimum(numbers: Tensor, max_code: int) -> tuple[Tensor, Tensor]:
    """Return scales and minima that span a group's weights."""
    low, high = numbers.amin(2), numbers.amax(2)
    minima = low.bfloat16()
    return _up((high - minima.float()).clamp(min=0) / max_code), minima


def _with_zero(numbers: Tensor, format: CodeFormat) -> tuple[Tensor, Tensor]:
    """Return scales and zero points that span a group's weights and zero."""
    low, high = numbers.amin(2).clamp(max=0), numbers.amax(2).clamp(min=0)
    scales = _up((high - low) / (format.max_code - format.min_code))
    zeros = (format.min_code - _divided(low[..., None], scales)[..., 0]).round_()
    return scales, zeros.clamp_(-128, format.max_code).to(torch.int8)
