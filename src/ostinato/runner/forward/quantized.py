"""A weight of 8 or 4 bits in the memory layout that the native library multiplies with.

Codes are packed once, into the tiles of ``native/src/weight_tiles.h``, and products read the codes.
Scales are stored separately, those of 32 outputs of a group beside each other.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from ostinato.runner.forward.codes import CodeFormat, Codes, encode, joined
from ostinato.runner.forward.packed_linear import PackedLinear
from ostinato.runner.native.ctypes_api import DTYPES
from ostinato.runner.native.packed import (
    PackedWeight,
    Product,
    allocate_tiles,
    padded_width,
    required_library,
)
from ostinato.runner.settings import QuantizationName

_TILE_OUTPUTS = 32
_SLICE_CODES = 2**22
_FORMATS = {8: 1, 4: 2}
"""Numbers of ``ost_weight_format`` by bits."""


class QuantizedWeight(PackedWeight):
    """A weight of shape (num_rows, num_columns) as packed codes.

    Attributes:
        num_rows: Outputs.
        num_columns: Inputs.
        dtype: Format of inputs and products.
        format: Format of the codes.
        activation_bits: 8 if inputs are quantized to 8 bits before they are multiplied; else 0.
    """

    def __init__(self, codes: Codes, dtype: torch.dtype, activation_bits: int = 0) -> None:
        """Pack codes."""
        self._native = required_library()
        self.num_rows, self.num_columns = codes.codes.shape
        self.dtype, self.format, self.activation_bits = dtype, codes.format, activation_bits
        self._tiles = self._packed(codes.codes)
        self._scales = self._by_tiles(codes.scales)
        self._minima = None if codes.minima is None else self._by_tiles(codes.minima)
        self._zeros = None if codes.zeros is None else self._by_tiles(codes.zeros)
        self._order = None if codes.order is None else codes.order.int().contiguous()

    @property
    def nbytes(self) -> int:
        """Bytes of codes, scales, minima, zero points and the order of inputs."""
        parts = (self._tiles, self._scales, self._minima, self._zeros, self._order)
        return sum(part.nbytes for part in parts if part is not None)

    def record(self, rows: Tensor, bias: Tensor | None, outputs: Tensor) -> Product:
        """Check and describe a product; see ``PackedWeight``."""
        product = super().record(rows, bias, outputs)
        product.weight_format = _FORMATS[self.format.bits]
        product.scales = self._scales.data_ptr()
        product.minima = None if self._minima is None else self._minima.data_ptr()
        product.zeros = None if self._zeros is None else self._zeros.data_ptr()
        product.order = None if self._order is None else self._order.data_ptr()
        product.scale_dtype = DTYPES[self._scales.dtype]
        product.group_size = self.format.group_size
        product.used_inputs = self.num_columns
        product.activation_bits = self.activation_bits
        return product

    def codes(self, first: int = 0, last: int | None = None) -> Codes:
        """Return a copy of the codes of some rows; all by default."""
        last = self.num_rows if last is None else last
        begin, end = first // _TILE_OUTPUTS, -(-last // _TILE_OUTPUTS)
        within = slice(first - begin * _TILE_OUTPUTS, last - begin * _TILE_OUTPUTS)
        found = _out_of_tiles(self._tiles[begin:end], self.format.bits)
        if self.format.bits == 8:
            found = found.view(torch.int8)
        minima, zeros = (
            None if kept is None else _by_rows(kept[begin:end])[within]
            for kept in (self._minima, self._zeros)
        )
        return Codes(
            self.format,
            found[within, : self.num_columns],
            _by_rows(self._scales[begin:end])[within],
            minima,
            zeros,
            None if self._order is None else self._order.long(),
        )

    def plain(self, first: int = 0, last: int | None = None) -> Tensor:
        """Return a copy of some rows in the layout of ``nn.Linear``; all by default."""
        return self.codes(first, last).plain(self.dtype)

    def replace(self, first: int, rows: Tensor) -> None:
        """Quantize other numbers into some rows; see ``PackedWeight``."""
        rows = rows.detach()
        codes = encode(rows if self._order is None else rows[:, self._order], self.format)
        begin = first // _TILE_OUTPUTS
        end = -(-(first + codes.codes.shape[0]) // _TILE_OUTPUTS)
        first -= begin * _TILE_OUTPUTS
        within = slice(first, first + len(codes.codes))
        tiles = _out_of_tiles(self._tiles[begin:end], self.format.bits)
        tiles[within, : self.num_columns] = codes.codes.view(torch.uint8)
        self._tiles[begin:end] = _into_tiles(tiles, self.format.bits)
        for kept, given in (
            (self._scales, codes.scales),
            (self._minima, codes.minima),
            (self._zeros, codes.zeros),
        ):
            if kept is not None and given is not None:
                numbers = _by_rows(kept[begin:end])
                numbers[within] = given.to(kept.dtype)
                kept[begin:end] = _tiled(numbers)

    def _packed(self, codes: Tensor) -> Tensor:
        """Return codes in tiles, packed some tiles at a time."""
        width = padded_width(self.num_columns)
        num_tiles = -(-self.num_rows // _TILE_OUTPUTS)
        tile_bytes = _TILE_OUTPUTS * width * self.format.bits // 8
        tiles = allocate_tiles(num_tiles * tile_bytes, torch.uint8).view(num_tiles, tile_bytes)
        step = max(1, _SLICE_CODES // (_TILE_OUTPUTS * width))
        for first in range(0, num_tiles, step):
            rows = codes[first * _TILE_OUTPUTS : (first + step) * _TILE_OUTPUTS]
            tiles[first : first + step] = _into_tiles(
                self._codes_in_full_tiles(rows), self.format.bits
            )
        return tiles

    def _codes_in_full_tiles(self, codes: Tensor) -> Tensor:
        """Return codes as bytes, padded to whole tiles."""
        more = (-len(codes)) % _TILE_OUTPUTS
        width = padded_width(self.num_columns) - self.num_columns
        return functional.pad(codes.view(torch.uint8), (0, width, 0, more), value=self.format.zero)

    def _by_tiles(self, of_groups: Tensor) -> Tensor:
        """Arrange scales by tiles, shape (num_tiles, num_groups, 32)."""
        return _tiled(functional.pad(of_groups, (0, 0, 0, (-self.num_rows) % _TILE_OUTPUTS)))


_INT8 = CodeFormat(bits=8, group_size=128)
_INT4 = CodeFormat(bits=4, group_size=32, has_minima=True)


@dataclass(frozen=True, slots=True, eq=False)
class Quantization:
    """Packs linear layers as codes.

    Attributes:
        name: ``int8``, ``int4``, ``w8a8``, ``w4a8``, or the checkpoint's format. The output layer
            always has 8 bits, and its inputs are never quantized: it matters most for the logits,
            and is a small part of what a step reads.
        stored: The checkpoint's own codes, by the id of the weight that they represent; None if
            weights are to be quantized.
        activation_bits: 8 if inputs are quantized to 8 bits before they are multiplied; else 0.
    """

    name: str
    stored: Mapping[int, Codes] | None = None
    activation_bits: int = 0

    @classmethod
    def named(cls, name: QuantizationName) -> "Quantization":
        """Return the quantization of a setting."""
        return cls(name, activation_bits=8 if name.endswith("a8") else 0)

    def pack(self, linears: Sequence[nn.Linear], is_head: bool) -> PackedWeight:
        """Pack layers with the same input into one weight; see ``packing.Pack``."""
        weights = [linear.weight for linear in linears]
        if self.stored is not None and any(id(weight) not in self.stored for weight in weights):
            return PackedWeight(weights)
        format = _INT8 if is_head else self._format
        codes = [
            encode(weight.detach(), format) if self.stored is None else self.stored[id(weight)]
            for weight in weights
        ]
        bits = 0 if is_head else self.activation_bits
        return QuantizedWeight(joined(codes), weights[0].dtype, bits)

    @property
    def _format(self) -> CodeFormat:
        return _INT4 if self.name in ("int4", "w4a8") else _INT8

    def __str__(self) -> str:
        """Name all that the codes depend on, since it is part of the weights' fingerprint."""
        if self.stored is not None:
            return f"codes of the file ({self.name})"
        parts = [f"{self._format}"]
        if self._format != _INT8:
            parts.append(f"head {_INT8}")
        if self.activation_bits:
            parts.append(f"activations int{self.activation_bits} by token")
        return ", ".join(parts)


def unstack(model: nn.Module) -> None:
    """Split quantized weights that layers share into one per layer, with the same codes."""
    for layer in model.modules():
        if not isinstance(layer, PackedLinear):
            continue
        packed = layer.packed
        if isinstance(packed, QuantizedWeight) and packed.num_rows != layer.out_features:
            codes = packed.codes(layer.first_row, layer.first_row + layer.out_features)
            layer.packed = QuantizedWeight(codes, packed.dtype, packed.activation_bits)
            layer.first_row = 0


def _into_tiles(codes: Tensor, bits: int) -> Tensor:
    """Arrange bytes (num_rows, num_inputs), multiples of 32, as (num_tiles, bytes of a tile)."""
    tiles = codes.shape[0] // _TILE_OUTPUTS
    if bits == 8:
        pairs = codes.view(tiles, _TILE_OUTPUTS, -1, 2)
        return pairs.transpose(1, 2).reshape(tiles, -1)
    # Inputs 8 * step + 2 * nibble + place: nibbles of a word of two bytes.
    words = codes.view(tiles, _TILE_OUTPUTS, -1, 2, 2, 2)
    packed = words[..., 0, :] | words[..., 1, :] << 4  # (tile, output, step, byte, place)
    return packed.permute(0, 2, 1, 4, 3).reshape(tiles, -1)


def _out_of_tiles(tiles: Tensor, bits: int) -> Tensor:
    """Undo ``_into_tiles``."""
    count = tiles.shape[0]
    if bits == 8:
        rows = tiles.view(count, -1, _TILE_OUTPUTS, 2).transpose(1, 2)
        return rows.reshape(count * _TILE_OUTPUTS, -1)
    packed = tiles.view(count, -1, _TILE_OUTPUTS, 2, 2).permute(0, 2, 1, 4, 3)
    words = torch.stack((packed & 15, packed >> 4), dim=-2)
    return words.reshape(count * _TILE_OUTPUTS, -1)


def _tiled(of_groups: Tensor) -> Tensor:
    """Arrange numbers of groups, shape (num_rows, num_groups), by tiles."""
    tiles = of_groups.view(-1, _TILE_OUTPUTS, of_groups.shape[1])
    return tiles.transpose(1, 2).contiguous()


def _by_rows(tiled: Tensor) -> Tensor:
    """Undo ``_tiled``."""
    return tiled.transpose(1, 2).reshape(-1, tiled.shape[1])
