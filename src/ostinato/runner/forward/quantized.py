"""A weight of 8 or 4 bits in the memory layout that the native library multiplies with.

Codes are packed once, into the tiles of ``native/src/weights/tiles.h``, and products read them.
Scales are stored separately, see ``scale_tiles``.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ostinato.errors import UnsupportedModel
from ostinato.runner.experts.stack import ExpertStack
from ostinato.runner.forward.codes import (
    IN_GROUPS,
    PLAIN,
    Activations,
    CodeFormat,
    Codes,
    LaterCodes,
    codes_of,
    encode,
    joined_format,
    widened,
)
from ostinato.runner.forward.gguf_codes import BlockRows
from ostinato.runner.forward.packed_linear import PackedLinear
from ostinato.runner.forward.packing import Layers, members, pack_plain
from ostinato.runner.huge_pages import zeros
from ostinato.runner.native.code_packing import CodeTiles, packs_blocks, weight_format
from ostinato.runner.native.packed import (
    PackedWeight,
    Product,
    padded_width,
    required_library,
)
from ostinato.runner.native.scale_tiles import (
    SUPERBLOCKS,
    TILE_OUTPUTS,
    joined_dtype,
    numbers_of,
    put_numbers,
    scale_format,
    scales_shape,
)
from ostinato.runner.quantization import INSTEAD
from ostinato.runner.settings import QuantizationName

StoredRows = LaterCodes | BlockRows
"""A weight that came quantized."""


class QuantizedWeight(PackedWeight):
    """A weight of shape (num_rows, num_columns) as packed codes.

    Attributes:
        num_rows: Outputs.
        num_columns: Inputs.
        dtype: Format of inputs and products.
        format: Format of the codes.
        activations: What inputs become before they are multiplied.
        is_in_blocks: Whether codes are packed in blocks, for the instruction set that was in use.

    ``_order``, if it is not None, has the order of inputs of all rows, or one for each expert.
    """

    _minima: Tensor | None
    _zeros: Tensor | None
    _order: Tensor | None

    def __init__(self, codes: Codes, dtype: torch.dtype, activations: Activations = PLAIN) -> None:
        """Pack codes."""
        scale_dtype = codes.scales.dtype
        self._allocate(codes.format, codes.codes.shape, scale_dtype, dtype, activations)
        if codes.order is not None:
            self._order = codes.order[None].int()
        self._put(0, codes)

    @classmethod
    def of_rows(
        cls,
        parts: Sequence[StoredRows],
        dtype: torch.dtype,
        activations: Activations = PLAIN,
        unit: int = 1,
        num_orders: int = 1,
    ) -> "QuantizedWeight":
        """Pack stored weights with the same input below each other.

        Args:
            parts: The weights.
            dtype: Format of inputs and products.
            activations: What inputs become.
            unit: Each part's rows are filled up with zeros to a multiple of it.
            num_orders: How many times the parts may change the order of inputs, each after as many.

        Raises:
            UnsupportedModel: The orders of their inputs differ.
        """
        weight = cls.__new__(cls)
        scales = joined_dtype(part.scale_dtype for part in parts)
        format = joined_format([part.format for part in parts])
        sizes = [-(-part.num_rows // unit) * unit for part in parts]
        shape = sum(sizes), parts[0].num_columns
        weight._allocate(format, shape, scales, dtype, activations)
        first, orders = 0, list[Tensor | None]()
        for part, size in zip(parts, sizes, strict=True):
            if isinstance(part, BlockRows) and part.is_packed_directly:
                part.pack_into(weight._memory(), first)
                orders.append(None)
            else:
                own = part.as_codes(dtype)
                weight._put(first, widened(own, format))
                orders.append(own.order)
            first += size
        weight._order = _joined_orders(orders, num_orders, weight.num_columns)
        return weight

    @classmethod
    def nearest(
        cls, layers: Layers, format: CodeFormat, activations: Activations = PLAIN
    ) -> "QuantizedWeight":
        """Quantize numbers below each other, as ``encode`` does, with minima or in 8 bits."""
        own, weight = members(layers), cls.__new__(cls)
        shape = sum(member.out_features for member in own), own[0].in_features
        weight._allocate(format, shape, torch.bfloat16, own[0].weight.dtype, activations)
        memory, first = weight._memory(), 0
        linears = (member.weight.detach() for member in own)
        for part in layers.rows() if isinstance(layers, ExpertStack) else linears:
            memory.put_numbers(first, part)
            first += len(part)
        return weight

    @classmethod
    def of_codes_in_memory(
        cls,
        format: CodeFormat,
        shape: tuple[int, int],
        dtype: torch.dtype,
        activations: Activations,
        is_in_blocks: bool,
        memory: Mapping[str, Tensor],
    ) -> "QuantizedWeight":
        """Return a weight that was packed before; see ``memory``."""
        weight = cls.__new__(cls)
        weight._native = required_library()
        weight.num_rows, weight.num_columns = shape
        weight.format, weight.dtype, weight.activations = format, dtype, activations
        weight.is_in_blocks = is_in_blocks
        weight.use_memory(memory)
        return weight

    def memory(self) -> dict[str, Tensor]:
        """Return everything that the weight consists of, by name; not copied."""
        parts = {
            "tiles": self._tiles,
            "scales": self._scales,
            "minima": self._minima,
            "zeros": self._zeros,
            "order": self._order,
        }
        return {name: part for name, part in parts.items() if part is not None}

    def use_memory(self, memory: Mapping[str, Tensor]) -> None:
        """Keep the same numbers in other memory, before any program points to the weight."""
        self._tiles, self._scales = memory["tiles"], memory["scales"]
        self._minima, self._zeros = memory.get("minima"), memory.get("zeros")
        self._order = memory.get("order")
        self._memory().check()

    @property
    def nbytes(self) -> int:
        """Bytes of codes, scales, minima, zero points and the order of inputs."""
        return sum(part.nbytes for part in self.memory().values())

    def template(self, bias: Tensor | None) -> Product:
        """Describe a product of no rows; see ``PackedWeight``."""
        product = super().template(bias)
        product.weight_format = weight_format(
            self.format.bits, self.is_in_blocks, self.format.table
        )
        product.scales = self._scales.data_ptr()
        product.minima = None if self._minima is None else self._minima.data_ptr()
        product.zeros = None if self._zeros is None else self._zeros.data_ptr()
        product.order = None if self._order is None else self._order.data_ptr()
        product.scale_dtype = scale_format(self._scales)
        product.group_size = self.format.group_size
        product.used_inputs = self.num_columns
        product.activation_bits = self.activations.bits
        product.activation_group = self.activations.group_size
        return product

    def codes(self, first: int = 0, last: int | None = None) -> Codes:
        """Return a copy of the codes of some rows; all by default."""
        last = self.num_rows if last is None else last
        begin, end = first // TILE_OUTPUTS, -(-last // TILE_OUTPUTS)
        within = slice(first - begin * TILE_OUTPUTS, last - begin * TILE_OUTPUTS)
        rows = _out_of_tiles(self._tiles[begin:end], self.format.bits, self.is_in_blocks)
        if self.format.bits == 8:
            rows = rows.view(torch.int8)
        minima, zeros = (
            None if kept is None else numbers_of(kept[begin:end])[within]
            for kept in (self._minima, self._zeros)
        )
        return Codes(
            self.format,
            rows[within, : self.num_columns],
            numbers_of(self._scales[begin:end])[within],
            minima,
            zeros,
            self._order_of(first),
        )

    def plain(self, first: int = 0, last: int | None = None) -> Tensor:
        """Return a copy of some rows in the layout of ``nn.Linear``; all by default."""
        last = self.num_rows if last is None else last
        step = self.num_rows // (1 if self._order is None else len(self._order))
        ends = [*range((first // step + 1) * step, last, step), last]
        pieces = zip([first, *ends], ends, strict=False)
        return torch.cat([self.codes(*piece).plain(self.dtype) for piece in pieces])

    def _order_of(self, row: int) -> Tensor | None:
        """Return the order of a row's inputs."""
        if self._order is None:
            return None
        return self._order[row * len(self._order) // self.num_rows].long()

    def replace(self, first: int, rows: Tensor) -> None:
        """Quantize other numbers into some rows; see ``PackedWeight``."""
        order = self._order_of(first)
        rows = rows.detach() if order is None else rows.detach()[:, order]
        codes, last = encode(rows, self.format), first + len(rows)
        self._put(first, codes)
        if self._scales.dtype == SUPERBLOCKS:  # codes for the scales that superblocks have
            own = self.codes(first, last)
            self._put_codes(first, codes_of(rows, self.format, own.scales, own.minima))

    def _allocate(
        self,
        format: CodeFormat,
        shape: tuple[int, ...],
        scale_dtype: torch.dtype,
        dtype: torch.dtype,
        activations: Activations,
    ) -> None:
        """Allocate tiles, and the numbers of groups, shape (num_tiles, num_groups, 32)."""
        self._native = required_library()
        self.num_rows, self.num_columns = shape
        self.format, self.dtype, self.activations = format, dtype, activations
        are_rows_integers = dtype != torch.float16 or activations.bits == 8
        self.is_in_blocks = are_rows_integers and packs_blocks()
        num_tiles = -(-self.num_rows // TILE_OUTPUTS)
        tile_bytes = TILE_OUTPUTS * padded_width(self.num_columns) * format.bits // 8
        self._tiles = zeros((num_tiles, tile_bytes), torch.uint8)
        if self.num_rows % TILE_OUTPUTS:
            self._tiles[-1] = format.zero * (17 if format.bits == 4 else 1)
        num_groups = format.num_groups(self.num_columns)
        memory_shape = scales_shape(num_tiles, num_groups, format.group_size, scale_dtype)
        self._scales = zeros(memory_shape, scale_dtype)
        self._minima = zeros(memory_shape, scale_dtype) if format.has_minima else None
        groups = num_tiles, num_groups, TILE_OUTPUTS
        self._zeros = zeros(groups, torch.int8) if format.has_zeros else None
        self._order = None

    def _memory(self) -> CodeTiles:
        return CodeTiles(
            self.num_rows,
            self.num_columns,
            self.format.bits,
            self.format.group_size,
            self.is_in_blocks,
            self.format.zero,
            self._tiles,
            self._scales,
            self._minima,
            self.format.table,
        )

    def _put(self, first: int, codes: Codes) -> None:
        """Pack codes of this format into some rows."""
        assert codes.format == self.format, (codes.format, self.format)
        self._put_codes(first, codes.codes)
        outputs = torch.arange(first, first + len(codes.codes))
        for kept, given in (
            (self._scales, codes.scales),
            (self._minima, codes.minima),
            (self._zeros, codes.zeros),
        ):
            if kept is not None and given is not None:
                put_numbers(kept, outputs, given)

    def _put_codes(self, first: int, codes: Tensor) -> None:
        self._memory().put_codes(first, codes.view(torch.uint8))


INT8 = CodeFormat(bits=8, group_size=128)
INT4 = CodeFormat(bits=4, group_size=32, has_minima=True)


@dataclass(frozen=True, slots=True, eq=False)
class Quantization:
    """Packs linear layers as codes.

    Attributes:
        name: ``int8``, ``int4``, ``w8a8``, ``w4a8``, or the checkpoint's format. The output layer
            always has 8 bits, and its inputs are never quantized: it matters most for the logits,
            and is a small part of what a step reads.
        stored: The checkpoint's own codes, by the id of the weight that they represent, of experts
            the parts of the first, then of the second; None if weights are to be quantized.
        activations: What inputs become before they are multiplied.
    """

    name: str
    stored: Mapping[int, Sequence[StoredRows]] | None = None
    activations: Activations = PLAIN

    @classmethod
    def named(cls, name: QuantizationName, has_small_rows: bool = False) -> "Quantization":
        """Return the quantization of a setting; rows may be of 8 bits whatever the name says."""
        return cls(name, activations=IN_GROUPS if has_small_rows or name[2:] == "a8" else PLAIN)

    def __call__(self, layers: Layers, is_head: bool = False) -> PackedWeight:
        """Pack layers into one weight; see ``packing.Pack``."""
        activations = PLAIN if is_head else self.activations
        if self.stored is not None:
            weights = [member.weight for member in members(layers)]
            stored = [self.stored.get(id(weight)) for weight in weights]
            rows = [row for each in stored for row in each or ()]
            if None in stored:
                return pack_plain(layers)
            tiling = (TILE_OUTPUTS, layers.num_experts) if isinstance(layers, ExpertStack) else ()
            return QuantizedWeight.of_rows(rows, weights[0].dtype, activations, *tiling)
        return QuantizedWeight.nearest(layers, INT8 if is_head else self._format, activations)

    @property
    def _format(self) -> CodeFormat:
        return INT4 if self.name in ("int4", "w4a8") else INT8

    def __str__(self) -> str:
        """Name all that the codes depend on, since it is part of the weights' fingerprint."""
        if self.stored is not None:
            parts = [f"codes of the file ({self.name})"]
        else:
            parts = [f"{self._format}"]
            if self._format != INT8:
                parts.append(f"head {INT8}")
        if self.activations.group_size:  # one by token is in the file's name
            parts.append(f"activations {self.activations}")
        return ", ".join(parts)


def unstack(model: nn.Module) -> None:
    """Split quantized weights that layers share into one per layer, with the same codes."""
    for layer in model.modules():
        if not isinstance(layer, PackedLinear):
            continue
        packed = layer.packed
        if isinstance(packed, QuantizedWeight) and packed.num_rows != layer.out_features:
            codes = packed.codes(layer.first_row, layer.first_row + layer.out_features)
            layer.packed = QuantizedWeight(codes, packed.dtype, packed.activations)
            layer.first_row = 0


def _joined_orders(orders: Sequence[Tensor | None], count: int, width: int) -> Tensor | None:
    """Return the orders of inputs, shape (count, width); None if all are in order."""
    if all(order is None for order in orders):
        return None
    own = [torch.arange(width) if order is None else order for order in orders]
    step = len(own) // count
    if any(not torch.equal(order, own[i // step * step]) for i, order in enumerate(own)):
        raise UnsupportedModel(
            "layers that read the same input were quantized in different orders of its columns "
            "(desc_act), so that they are not one product: set forward='packed'; if they are gates "
            f"and ups of an expert, {INSTEAD}"
        )
    return torch.stack(own[::step]).int()


def _out_of_tiles(tiles: Tensor, bits: int, is_in_blocks: bool) -> Tensor:
    """Return the bytes of tiles by rows, multiples of 32; 4 bits have a byte each."""
    count = tiles.shape[0]
    if is_in_blocks:
        if bits == 4:  # outputs 8 .. 15 of a side in the high halves
            tiles = tiles.view(count, 2, -1, 64)
            tiles = torch.cat((tiles & 15, tiles >> 4), dim=-1)
        rows = tiles.reshape(count, 2, -1, 16, 8).transpose(2, 3)
        return rows.reshape(count * TILE_OUTPUTS, -1)
    if bits == 8:
        rows = tiles.view(count, -1, TILE_OUTPUTS, 2).transpose(1, 2)
        return rows.reshape(count * TILE_OUTPUTS, -1)
    # Inputs 8 * step + 2 * nibble + place: nibbles of a word of two bytes.
    packed = tiles.view(count, -1, TILE_OUTPUTS, 2, 2).permute(0, 2, 1, 4, 3)
    words = torch.stack((packed & 15, packed >> 4), dim=-2)
    return words.reshape(count * TILE_OUTPUTS, -1)
