"""Weights on a device: numbers that torch multiplies, or numbers and codes in fixed tiles.

Torch chooses an algorithm by the number of rows, so a row alone has other bits than in a batch.
``TiledWeight`` always has the same tiles, and adds its inputs in one order; codes are multiplied
so in any case, in a product that widens them on the way. Both stand where a ``PackedWeight`` does.
"""

from collections.abc import Sequence
from types import ModuleType

import torch
from torch import Tensor
from torch.nn import functional

from ostinato.errors import ConfigError
from ostinato.runner.experts.stack import ExpertStack
from ostinato.runner.forward.codes import CodeFormat, Codes, encode, joined
from ostinato.runner.forward.packing import Layers
from ostinato.runner.forward.quantized import INT4, INT8
from ostinato.runner.native.packed import PackedWeight

TILE_ROWS, TILE_OUTPUTS = 32, 64
"""Sizes of a product's tiles, for any number of rows; none was measured on a GPU yet."""


def fused_kernels() -> ModuleType:
    """Import the kernels around products, and Triton with them."""
    from ostinato.runner.gpu import fused_kernels

    return fused_kernels


class DeviceWeight(PackedWeight):
    """A weight of shape (num_rows, num_columns) whose products torch computes."""

    def __init__(self, parts: Sequence[Tensor]) -> None:
        """Join weights with the same input below each other."""
        self._weight = parts[0].detach() if len(parts) == 1 else torch.cat(tuple(parts)).detach()
        self.num_rows, self.num_columns = self._weight.shape
        self.dtype = self._weight.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the weight."""
        return self._weight.nbytes

    def multiply(self, rows: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return products, shape (len(rows), num_rows)."""
        return functional.linear(rows, self._weight, bias)

    def plain(self, first: int = 0, last: int | None = None) -> Tensor:
        """Return a copy of some rows; all by default."""
        return self._weight[first:last].clone()

    def replace(self, first: int, rows: Tensor) -> None:
        """Replace some rows by others."""
        self._weight[first : first + len(rows)] = rows.detach()


class TiledWeight(DeviceWeight):
    """A weight that is multiplied in fixed tiles: a row has the same bits alone and in a batch."""

    def multiply(self, rows: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return products, shape (len(rows), num_rows)."""
        return multiply_tiled(rows, self._weight, bias, self.num_rows)


class CodesOnDevice(TiledWeight):
    """A weight as codes of 8 or 4 bits, which the product widens."""

    def __init__(self, codes: Codes, dtype: torch.dtype) -> None:
        """Keep codes; those of 4 bits two in a byte.

        Raises:
            ConfigError: Codes of 4 bits have an odd number of inputs.
        """
        self._format, self.dtype = codes.format, dtype
        self.num_rows, self.num_columns = codes.codes.shape
        if codes.format.bits == 4 and self.num_columns % 2:
            raise ConfigError(
                f"quantization='int4': a weight has {self.num_columns} inputs, and on a GPU their "
                "number must be even: set quantization='int8'"
            )
        self._put(codes)

    def _put(self, codes: Codes) -> None:
        self._scales = codes.scales.contiguous()
        self._minima = None if codes.minima is None else codes.minima.contiguous()
        self._zeros = None if codes.zeros is None else codes.zeros.contiguous()
        numbers = codes.codes
        if self._format.bits == 4:
            numbers = numbers[:, ::2] | (numbers[:, 1::2] << 4)
        self._weight = numbers.contiguous()

    @property
    def nbytes(self) -> int:
        """Bytes of codes, scales, minima and zero points."""
        parts = self._weight, self._scales, self._minima, self._zeros
        return sum(part.nbytes for part in parts if part is not None)

    def multiply(self, rows: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return products, shape (len(rows), num_rows)."""
        groups = self._scales, self._minima, self._zeros
        return multiply_tiled(rows, self._weight, bias, self.num_rows, self._format, groups)

    def codes(self) -> Codes:
        """Return the codes, each in a byte."""
        numbers = self._weight
        if self._format.bits == 4:
            numbers = torch.stack((numbers & 15, numbers >> 4), dim=-1).flatten(1)
        return Codes(self._format, numbers, self._scales, self._minima, self._zeros)

    def plain(self, first: int = 0, last: int | None = None) -> Tensor:
        """Return some rows as numbers; all by default."""
        return self.codes().plain(self.dtype)[first:last]

    def replace(self, first: int, rows: Tensor) -> None:
        """Quantize other numbers into some rows."""
        whole, given = self.codes(), encode(rows.detach(), self._format)
        for kept, new in (
            (whole.codes, given.codes),
            (whole.scales, given.scales),
            (whole.minima, given.minima),
            (whole.zeros, given.zeros),
        ):
            if kept is not None and new is not None:
                kept[first : first + len(rows)] = new
        self._put(whole)


class DevicePack:
    """Puts the weights of linear layers into the form in which a device multiplies them."""

    def __init__(self, quantization: str | None, same_bits: bool) -> None:
        """Take the settings of the same names; of quantizations ``int8`` and ``int4``."""
        self._format = {None: None, "int8": INT8, "int4": INT4}[quantization]
        self._same_bits = same_bits

    def __call__(self, layers: Layers, is_head: bool) -> PackedWeight:
        """Join the weights of layers with the same input; see ``packing.Pack``."""
        assert not isinstance(layers, ExpertStack), "experts are called as modules"
        weights = [linear.weight.detach() for linear in layers]
        if self._format is None:
            return TiledWeight(weights) if self._same_bits else DeviceWeight(weights)
        format = INT8 if is_head else self._format
        codes = [encode(weight, format) for weight in weights]
        return CodesOnDevice(joined(codes), weights[0].dtype)


def multiply_tiled(
    rows: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    num_outputs: int,
    format: CodeFormat | None = None,
    groups: tuple[Tensor, Tensor | None, Tensor | None] | None = None,
) -> Tensor:
    """Return products in fixed tiles, shape (len(rows), num_outputs).

    Args:
        rows: Shape (num_rows, num_inputs), its last dimension contiguous.
        weight: Shape (num_outputs, num_inputs), numbers or codes.
        bias: Shape (num_outputs,); None is 0.
        num_outputs: Outputs.
        format: Format of codes; None for numbers.
        groups: Scales, minima and zero points of groups, shape (num_outputs, num_groups).
    """
    rows = rows if rows.stride(-1) == 1 else rows.contiguous()
    kernels, (num_rows, num_inputs) = fused_kernels(), rows.shape
    output = rows.new_empty(num_rows, num_outputs)
    scales, minima, zeros = groups or (weight, None, None)
    grid = -(-num_outputs // TILE_OUTPUTS), -(-num_rows // TILE_ROWS)
    if not num_rows:
        return output
    with torch.cuda.device_of(rows):
        kernels.multiply[grid](
            rows, weight, scales, scales if minima is None else minima,
            scales if zeros is None else zeros, output if bias is None else bias, output,
            num_rows, num_outputs, num_inputs, scales.shape[1], rows.stride(0),
            **product_options(format, rows.dtype, minima is not None, zeros is not None),
            HAS_BIAS=bias is not None,
            IS_WIDENED=rows.dtype == torch.bfloat16 and kernels.IS_INTERPRETED,
        )  # fmt: skip
    return output


def product_options(
    format: CodeFormat | None, dtype: torch.dtype, has_minima: bool, has_zeros: bool
) -> dict[str, int | bool]:
    """Return how ``multiply`` is compiled for rows of a dtype; a format of None is numbers."""
    return {
        "BITS": 0 if format is None else format.bits,
        "GROUP": 1 if format is None else format.group_size,
        "ZERO": 0 if format is None else format.zero,
        "HAS_MINIMA": has_minima,
        "HAS_ZEROS": has_zeros,
        "enable_fp_fusion": False,
        "ROWS": TILE_ROWS,
        "OUTPUTS": TILE_OUTPUTS,
        "INPUTS": 32 if dtype.itemsize == 2 else 16,
        "num_warps": 4,
        "num_stages": 3,
    }
