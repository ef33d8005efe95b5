"""The weights of GPTQ, AWQ and compressed-tensors: codes that stay as they are.

Codes of a layer are read when they are packed; its zero points and groups before, since they say in
which format of ours it is represented.
"""

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ostinato.errors import BrokenCheckpoint, UnsupportedModel
from ostinato.runner.experts.mixture import expert_weights
from ostinato.runner.forward.codes import CodeFormat, Codes, LaterCodes
from ostinato.runner.forward.plain_layers import is_plain_linear
from ostinato.runner.forward.quantized import Quantization
from ostinato.runner.loading.merged_experts import as_in_model
from ostinato.runner.loading.weight_source import CheckpointWeight, PlainWeight, Weights
from ostinato.runner.loading.word_codes import (
    METHODS,
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


class WordWeight(CheckpointWeight):
    """A layer's weight as codes in words, with scales of groups of inputs, and zero points.

    Attributes:
        name: Its name in the checkpoint.
    """

    def __init__(
        self, layer: str, parts: Mapping[str, PlainWeight], settings: Mapping[str, Any]
    ) -> None:
        """Check a layer's headers.

        Args:
            layer: Its name.
            parts: What is stored of it, by their names in it.
            settings: Settings of the quantization, see ``is_in_words``.

        Raises:
            BrokenCheckpoint: Parts are missing.
            UnsupportedModel: It has another number of bits.
        """
        self.name, self._parts, self._settings = f"{layer}.weight", parts, settings
        self._layout = layout = layout_of(parts, settings)
        needed = {layout.codes, layout.scales, *layout.others}
        if are_asymmetric(settings):
            needed.add(layout.zeros)
        if missing := needed - parts.keys():
            path = next(iter(parts.values())).where.path
            raise BrokenCheckpoint(f"{path}: {layer} has no {', '.join(sorted(missing))}")
        rows, num_inputs = parts[layout.codes].shape
        scales = parts[layout.scales].shape
        num_outputs = scales[-1 if layout.is_by_input else 0]
        self._num_groups = scales[0 if layout.is_by_input else 1]
        if layout.others:  # the shape, since words may be filled up
            columns, num_inputs = num_inputs, int(parts[layout.others[0]].read()[1])
            bits = 32 * columns // num_inputs
        elif layout.is_by_input:  # bits may differ between layers, and follow from the shapes
            bits = 32 * parts[layout.zeros].shape[1] // num_outputs
            num_inputs = rows * 32 // (bits or 1) if layout.packs_inputs else rows
        else:
            bits = signed_bits(settings)
        if bits not in (4, 8):
            raise UnsupportedModel(
                f"{layer} is quantized by {METHODS[settings['quant_method']]} in {bits} bits: only "
                f"4 and 8 are run; {INSTEAD}"
            )
        super().__init__((num_outputs, num_inputs), [part.where for part in parts.values()])
        self._bits, self.kind = bits, f"W{bits}A{activations_of(settings).bits or 16}"

    def plain(self, dtype: torch.dtype, num_rows: int | None = None) -> Tensor:
        """Return the weight, or its first rows."""
        (rows,) = self.codes(num_rows)
        return rows.read().plain(dtype)

    def codes(self, num_rows: int | None = None) -> list[LaterCodes]:
        """Return the weight, or its first rows, to be read when it is packed.

        Raises:
            BrokenCheckpoint: Parts do not fit each other.
        """
        with self._fitting():
            size, order = self._groups()
            format = CodeFormat(8 if self._bits == 8 else 4, size)
            zeros = self._zeros()
            if zeros is not None and bool((zeros == format.zero).all()):
                zeros = None
            format = replace(format, has_zeros=zeros is not None)
        num_outputs, num_inputs = self.shape
        num_rows = min(num_rows or num_outputs, num_outputs)
        stored = Codes(format, torch.empty(0), torch.empty(0), None, zeros, order)
        read = partial(self._read, stored, num_rows)
        return [
            LaterCodes(format, num_rows, num_inputs, self._parts[self._layout.scales].dtype, read)
        ]

    @contextmanager
    def _fitting(self) -> Iterator[None]:
        """Refuse parts that do not fit each other."""
        try:
            yield
        except (RuntimeError, ValueError) as error:
            path = self._parts[self._layout.codes].where.path
            raise BrokenCheckpoint(f"{path}: parts of {self.name} do not fit: {error}") from error

    def _groups(self) -> tuple[int, Tensor | None]:
        """Return the size of groups, and the order of inputs in which they are adjacent."""
        (_, num_inputs), name, order = self.shape, self._layout.groups, None
        size = -(-num_inputs // self._num_groups)
        if name in self._parts:
            groups = self._parts[name].read().long()
            size = int(torch.bincount(groups, minlength=self._num_groups).max())
            in_order = torch.arange(num_inputs) // size
            if not torch.equal(groups, in_order):
                order = groups.argsort(stable=True)
                if not torch.equal(groups[order], in_order):
                    raise ValueError(f"groups of {name} are not all of {size} inputs")
        if self._num_groups == 1:
            size = -(-num_inputs // GROUP_STEP) * GROUP_STEP
        elif size % GROUP_STEP:
            raise ValueError(f"groups of {size} inputs")
        return size, order

    def _zeros(self) -> Tensor | None:
        """Return zero points as our formats have them, shape (outputs, groups)."""
        layout, bits = self._layout, self._bits
        if layout.zeros not in self._parts:
            return None
        zeros = layout.unpack_zeros(self._parts[layout.zeros].read(), bits)
        zeros = zeros[:, : self.shape[0]]
        own = self._settings.get("checkpoint_format", self._settings.get("format", "gptq"))
        if layout.packs_inputs and own != "gptq_v2":
            zeros = (zeros + 1) & (2**bits - 1)
        expected = self._num_groups, self.shape[0]
        if zeros.shape != expected:
            raise ValueError(f"zero points of shape {tuple(zeros.shape)}, scales of {expected}")
        return (zeros ^ 128 if bits == 8 else zeros).view(torch.int8).T.contiguous()

    def _read(self, stored: Codes, num_rows: int) -> Codes:
        """Read codes and scales, and add them to what is known."""
        layout, parts, num_inputs = self._layout, self._parts, self.shape[1]
        order, zeros = stored.order, stored.zeros
        with self._fitting():
            codes = layout.unpack(parts[layout.codes].read(), self._bits)[:num_rows, :num_inputs]
            codes = (codes if order is None else codes[:, order]).contiguous()
            scales = parts[layout.scales].read()
            scales = (scales.T if layout.is_by_input else scales)[:num_rows].contiguous()
            if codes.shape != (num_rows, num_inputs):
                raise ValueError(f"codes of shape {tuple(codes.shape)} for {num_rows} outputs")
        if self._bits == 8:
            codes = (codes ^ 128).view(torch.int8)
        zeros = None if zeros is None else zeros[:num_rows]
        return replace(stored, codes=codes, scales=scales, zeros=zeros)


def word_weights(
    stored: Mapping[str, PlainWeight], settings: Mapping[str, Any], names: Collection[str]
) -> dict[str, CheckpointWeight]:
    """Return the weights of a checkpoint, the parts of each quantized layer as one.

    Args:
        stored: What its files have.
        settings: Settings of the quantization, see ``is_in_words``.
        names: Those of the model's weights: biases of zeros that it lacks are left out.

    Raises:
        BrokenCheckpoint: Parts of a layer are missing.
        UnsupportedModel: A layer has another number of bits.
    """
    weights: dict[str, CheckpointWeight] = dict(stored)
    layers: dict[str, dict[str, PlainWeight]] = {}
    for full_name, part in stored.items():
        layer, _, name = full_name.rpartition(".")
        if is_part(name, part.format, settings):
            layers.setdefault(layer, {})[name] = part
            del weights[full_name]
    for layer, parts in layers.items():
        name, bias = f"{layer}.weight", f"{layer}.bias"
        weights[name] = WordWeight(layer, parts, settings)
        is_needless = bias not in names and (name in names or ".experts." in name)
        if bias in stored and is_needless and not stored[bias].plain(torch.float32).any():
            del weights[bias]
    return weights


def codes_of_words(
    weights: Weights, settings: Mapping[str, Any], model: "PreTrainedModel"
) -> Quantization:
    """Return how to pack a model that was read as a whole.

    Args:
        weights: As ``word_weights`` returns them.
        settings: Settings of the quantization.
        model: Has their numbers.

    Raises:
        UnsupportedModel: A quantized layer is not a linear layer of the model.
    """
    parameters, modules = dict(model.named_parameters()), dict(model.named_modules())
    quantized = {name: own for name, own in as_in_model(weights, model).items() if own.kind}
    stacks, method = dict(expert_weights(model)), METHODS[settings["quant_method"]]
    stored = {}
    for name, weight in quantized.items():
        module = modules.get(name.removesuffix(".weight"))
        if is_plain_linear(module) and module.weight.shape == weight.shape:
            stored[id(module.weight)] = weight.codes()
        elif name in stacks:
            stored[id(stacks[name].weight)] = weight.codes()
        elif name not in parameters or parameters[name].shape != weight.shape:
            raise UnsupportedModel(
                f"{name} is quantized by {method}, but is no linear layer of "
                f"{type(model).__name__}: {INSTEAD}"
            )
    kinds = ", ".join(sorted({weight.kind for weight in quantized.values()}))
    return Quantization(f"{method} {kinds}", stored, activations_of(settings))
