"""The weights of GPTQ, AWQ and compressed-tensors: codes that stay as they are.

Codes of a layer are read when they are packed; its zero points and groups before, since they say in
which format of ours it is represented.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ostinato.errors import BrokenCheckpoint, UnsupportedModel
from ostinato.runner.experts.mixture import expert_weights
from ostinato.runner.forward.codes import CodeFormat, Codes, LaterCodes
from ostinato.runner.forward.plain_layers import is_plain_linear
from ostinato.runner.forward.quantized import Quantization
from ostinato.runner.loading.merged_experts import MergedExperts
from ostinato.runner.loading.weight_source import SafetensorsSource, StoredTensor, dtype_of
from ostinato.runner.loading.word_codes import (
    METHODS,
    Layout,
    activations_of,
    are_asymmetric,
    is_part,
    layout_of,
    signed_bits,
)
from ostinato.runner.quantization import INSTEAD
from ostinato.runner.settings import GROUP_STEP

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True, slots=True)
class _Layer:
    """What is stored of a layer, and what the headers say."""

    layout: Layout
    parts: Mapping[str, StoredTensor]
    bits: int
    num_outputs: int
    num_inputs: int

    @property
    def num_groups(self) -> int:
        return self.parts[self.layout.scales][2][0 if self.layout.is_by_input else 1]

    @contextmanager
    def fitting(self, name: str) -> Iterator[None]:
        """Refuse parts that do not fit each other."""
        try:
            yield
        except (RuntimeError, ValueError) as error:
            path = self.parts[self.layout.codes][0].path
            raise BrokenCheckpoint(f"{path}: parts of {name} do not fit: {error}") from error


class WordSource(SafetensorsSource):
    """Weights of which some are codes; see ``WeightSource``.

    Attributes:
        method: The quantization method, for messages.
        activations: What rows become before they are multiplied with codes.
    """

    def __init__(
        self, files: Iterable[Path], settings: Mapping[str, Any], names: Collection[str]
    ) -> None:
        """Read the files' headers.

        Args:
            files: Safetensors.
            settings: Settings of the quantization, see ``is_in_words``.
            names: Those of the model's weights: biases of zeros that it lacks are left out.

        Raises:
            BrokenCheckpoint: Parts of a layer are missing.
            UnsupportedModel: A layer has another number of bits.
        """
        super().__init__(files)
        self.method, self.activations = METHODS[settings["quant_method"]], activations_of(settings)
        self._settings = settings
        self._layers = dict[str, _Layer]()
        for layer, parts in self._take_parts().items():
            name, bias = f"{layer}.weight", f"{layer}.bias"
            self._layers[name] = self._layer(layer, parts)
            is_needless = bias not in names and (name in names or ".experts." in name)
            if bias in self._ranges and is_needless and not self.plain(bias, torch.float32).any():
                del self._ranges[bias]

    def _take_parts(self) -> dict[str, dict[str, StoredTensor]]:
        """Return what is stored of each quantized layer, which then is no weight by itself."""
        layers: dict[str, dict[str, StoredTensor]] = {}
        for name, stored in list(self._ranges.items()):
            layer, _, part = name.rpartition(".")
            if is_part(part, stored[1], self._settings):
                layers.setdefault(layer, {})[part] = self._ranges.pop(name)
        return layers

    def _layer(self, layer: str, parts: Mapping[str, StoredTensor]) -> _Layer:
        """Check a layer's headers."""
        layout = layout_of(parts, self._settings)
        needed = {layout.codes, layout.scales, *layout.others}
        if are_asymmetric(self._settings):
            needed.add(layout.zeros)
        if missing := needed - parts.keys():
            path = next(iter(parts.values()))[0].path
            raise BrokenCheckpoint(f"{path}: {layer} has no {', '.join(sorted(missing))}")
        rows, num_inputs = parts[layout.codes][2]
        num_outputs = parts[layout.scales][2][-1 if layout.is_by_input else 0]
        if layout.others:  # the shape, since words may be filled up
            columns, num_inputs = num_inputs, int(self.read(parts[layout.others[0]])[1])
            bits = 32 * columns // num_inputs
        elif layout.is_by_input:  # bits may differ between layers, and follow from the shapes
            bits = 32 * parts[layout.zeros][2][1] // num_outputs
            num_inputs = rows * 32 // (bits or 1) if layout.packs_inputs else rows
        else:
            bits = signed_bits(self._settings)
        if bits not in (4, 8):
            raise UnsupportedModel(
                f"{layer} is quantized by {self.method} in {bits} bits: only 4 and 8 are run; "
                f"{INSTEAD}"
            )
        return _Layer(layout, parts, bits, num_outputs, num_inputs)

    @cached_property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shapes of all weights by name."""
        shapes = {name: shape for name, (_, _, shape) in self._ranges.items()}
        for name, layer in self._layers.items():
            shapes[name] = layer.num_outputs, layer.num_inputs
        return shapes

    @property
    def num_bytes(self) -> int:
        """Bytes of all weights in the files."""
        parts = [part for layer in self._layers.values() for part in layer.parts.values()]
        return super().num_bytes + sum(where.num_bytes for where, _, _ in parts)

    @cached_property
    def kinds(self) -> Mapping[str, str]:
        """Formats of the quantized weights, such as W4A16."""
        rows = self.activations.bits or 16
        return {name: f"W{layer.bits}A{rows}" for name, layer in self._layers.items()}

    def are_equal(self, names: Sequence[str]) -> bool:
        """Return whether several weights are the same bytes in the files."""
        return not any(name in self._layers for name in names) and super().are_equal(names)

    def plain(self, name: str, dtype: torch.dtype, num_rows: int | None = None) -> Tensor:
        """Return a weight, or its first rows."""
        if name not in self._layers:
            return super().plain(name, dtype, num_rows)
        return self.codes(name, dtype, num_rows).read().plain(dtype)

    def codes(self, name: str, dtype: torch.dtype, num_rows: int | None = None) -> LaterCodes:
        """Return a quantized weight, or its first rows, to be read when it is packed.

        Raises:
            BrokenCheckpoint: Parts do not fit each other.
        """
        layer = self._layers[name]
        with layer.fitting(name):
            size, order = self._groups(layer)
            format = CodeFormat(8 if layer.bits == 8 else 4, size)
            zeros = self._zeros(layer)
            if zeros is not None and bool((zeros == format.zero).all()):
                zeros = None
            format = replace(format, has_zeros=zeros is not None)
        num_rows = min(num_rows or layer.num_outputs, layer.num_outputs)
        stored = Codes(format, torch.empty(0), torch.empty(0), None, zeros, order)
        read = partial(self._read_codes, name, stored, num_rows)
        scales = dtype_of(layer.parts[layer.layout.scales][1])
        return LaterCodes(format, num_rows, layer.num_inputs, scales, read)

    def _groups(self, layer: _Layer) -> tuple[int, Tensor | None]:
        """Return the size of groups, and the order of inputs in which they are adjacent."""
        num_inputs, name, order = layer.num_inputs, layer.layout.groups, None
        size = -(-num_inputs // layer.num_groups)
        if name in layer.parts:
            groups = self.read(layer.parts[name]).long()
            size = int(torch.bincount(groups, minlength=layer.num_groups).max())
            in_order = torch.arange(num_inputs) // size
            if not torch.equal(groups, in_order):
                order = groups.argsort(stable=True)
                if not torch.equal(groups[order], in_order):
                    raise ValueError(f"groups of {name} are not all of {size} inputs")
        if layer.num_groups == 1:
            size = -(-num_inputs // GROUP_STEP) * GROUP_STEP
        elif size % GROUP_STEP:
            raise ValueError(f"groups of {size} inputs")
        return size, order

    def _zeros(self, layer: _Layer) -> Tensor | None:
        """Return zero points as our formats have them, shape (outputs, groups)."""
        layout, bits = layer.layout, layer.bits
        if layout.zeros not in layer.parts:
            return None
        zeros = layout.unpack_zeros(self.read(layer.parts[layout.zeros]), bits)
        zeros = zeros[:, : layer.num_outputs]
        own = self._settings.get("checkpoint_format", self._settings.get("format", "gptq"))
        if layout.packs_inputs and own != "gptq_v2":
            zeros = (zeros + 1) & (2**bits - 1)
        expected = layer.num_groups, layer.num_outputs
        if zeros.shape != expected:
            raise ValueError(f"zero points of shape {tuple(zeros.shape)}, scales of {expected}")
        return (zeros ^ 128 if bits == 8 else zeros).view(torch.int8).T.contiguous()

    def _read_codes(self, name: str, stored: Codes, num_rows: int) -> Codes:
        """Read a layer's codes and scales, and add them to what is known of it."""
        layer, order, zeros = self._layers[name], stored.order, stored.zeros
        layout, parts = layer.layout, layer.parts
        with layer.fitting(name):
            codes = layout.unpack(self.read(parts[layout.codes]), layer.bits)
            codes = codes[:num_rows, : layer.num_inputs]
            codes = (codes if order is None else codes[:, order]).contiguous()
            scales = self.read(parts[layout.scales])
            scales = (scales.T if layout.is_by_input else scales)[:num_rows].contiguous()
            if codes.shape != (num_rows, layer.num_inputs):
                raise ValueError(f"codes of shape {tuple(codes.shape)} for {num_rows} outputs")
        if layer.bits == 8:
            codes = (codes ^ 128).view(torch.int8)
        zeros = None if zeros is None else zeros[:num_rows]
        return replace(stored, codes=codes, scales=scales, zeros=zeros)

    def quantization_of(self, model: "PreTrainedModel") -> Quantization:
        """Return how to pack a model that was read as a whole.

        Raises:
            UnsupportedModel: A quantized layer is not a linear layer of the model.
        """
        parameters, modules = dict(model.named_parameters()), dict(model.named_modules())
        merged, stacks = MergedExperts(self, model), dict(expert_weights(model))
        stored, experts = {}, {}
        for name in merged.kinds:
            module = modules.get(name.removesuffix(".weight"))
            if is_plain_linear(module) and module.weight.shape == merged.shapes[name]:
                stored[id(module.weight)] = merged.codes(name, model.dtype)
            elif name in stacks:
                experts[id(stacks[name].weight)] = merged.experts(name)
            elif name not in parameters or parameters[name].shape != merged.shapes[name]:
                raise UnsupportedModel(
                    f"{name} is quantized by {self.method}, but is no linear layer of "
                    f"{type(model).__name__}: {INSTEAD}"
                )
        kinds = ", ".join(sorted(set(merged.kinds.values())))
        return Quantization(f"{self.method} {kinds}", stored, self.activations, experts)
