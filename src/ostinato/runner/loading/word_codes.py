"""Checkpoints of GPTQ and AWQ: codes of 4 or 8 bits in words of 32, read without their libraries.

Also those of compressed-tensors with packed zero points, which ``transformers`` misreads.

::

    weight = (code - zero) * scale

    GPTQ   qweight  (inputs / n, outputs)  n = 32 / bits adjacent inputs, the first lowest
           qzeros   (groups, outputs / n)  adjacent outputs; minus one, except in gptq_v2
           scales   (groups, outputs)
           g_idx    (inputs,)              the group of each input, unordered with desc_act
    AWQ    qweight  (inputs, outputs / 8)  outputs 0 2 4 6 1 3 5 7 of eight, the first lowest
           qzeros   (groups, outputs / 8)  likewise
           scales   (groups, outputs)

    compressed-tensors
           weight_packed      (outputs, inputs / n)  adjacent inputs
           weight_zero_point  (outputs / n, groups)  adjacent outputs
           weight_scale       (outputs, groups)
           weight_g_idx       (inputs,)

Sources: GPTQ, arXiv 2210.17323; AWQ, arXiv 2306.00978; the layouts are those that AutoGPTQ,
AutoAWQ and compressed-tensors write.
"""

from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from torch import Tensor

from ostinato.errors import BrokenCheckpoint, UnsupportedModel
from ostinato.runner.forward.codes import CodeFormat, Codes
from ostinato.runner.forward.plain_layers import is_plain_linear
from ostinato.runner.forward.quantized import Quantization
from ostinato.runner.quantization import INSTEAD
from ostinato.runner.settings import GROUP_STEP

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_METHODS = {"gptq": "GPTQ", "awq": "AWQ", "compressed-tensors": "compressed-tensors"}
_PARTS = ("qweight", "qzeros", "scales")
_PARTS_OF_TENSORS = ("weight_packed", "weight_zero_point", "weight_scale")
_OTHER_PARTS = ("g_idx", "weight_g_idx", "weight_shape")
_AWQ_OUTPUTS = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass(frozen=True, slots=True, eq=False)
class WordCheckpoint:
    """A checkpoint.

    Attributes:
        method: The quantization method, for messages.
        codes: Codes of each quantized layer, by its name.
        state: All weights by name, those of quantized layers dequantized.
    """

    method: str
    codes: Mapping[str, Codes]
    state: dict[str, Tensor]

    def quantization_of(self, model: "PreTrainedModel") -> Quantization:
        """Return how to pack the model of this state.

        Raises:
            UnsupportedModel: A quantized layer is not a linear layer of the model.
        """
        modules = dict(model.named_modules())
        stored = {}
        for name, codes in self.codes.items():
            module = modules.get(name)
            if not is_plain_linear(module) or module.weight.shape != codes.codes.shape:
                raise UnsupportedModel(
                    f"{name} is quantized by {self.method}, but is no linear layer of "
                    f"{type(model).__name__} (experts are joined): {INSTEAD}"
                )
            stored[id(module.weight)] = codes
        kinds = sorted({f"W{codes.format.bits}A16" for codes in self.codes.values()})
        return Quantization(f"{self.method} {', '.join(kinds)}", stored)


def is_in_words(settings: Mapping[str, Any]) -> bool:
    """Return whether a checkpoint has codes in words of 32 bits."""
    if settings.get("quant_method") != "compressed-tensors":
        return settings.get("quant_method") in _METHODS
    groups = settings.get("config_groups")
    return (
        settings.get("format") == "pack-quantized"
        and isinstance(groups, Mapping)
        and bool(groups)
        and all(map(_has_packed_zeros, groups.values()))
    )


def _has_packed_zeros(group: Mapping[str, Any]) -> bool:
    weights = group.get("weights") or {}
    return (
        weights.get("symmetric") is False
        and weights.get("num_bits") in (4, 8)
        and weights.get("strategy") in ("group", "channel")
        and group.get("input_activations") is None
    )


def read_words(
    path: Path, files: Iterable[Path], settings: Mapping[str, Any], dtype: torch.dtype
) -> WordCheckpoint:
    """Read a checkpoint whose config ``check_quantization`` accepts.

    Args:
        path: For errors.
        files: Safetensors.
        settings: Settings of its quantization.
        dtype: Dtype of dequantized weights.

    Raises:
        BrokenCheckpoint: Parts of a layer are missing, or do not fit each other.
    """
    unpack, needed = {
        "gptq": (_gptq, _PARTS),
        "awq": (_awq, _PARTS),
        "compressed-tensors": (_tensors, _PARTS_OF_TENSORS),
    }[settings["quant_method"]]
    state: dict[str, Tensor] = {}
    parts: dict[str, dict[str, Tensor]] = {}
    with ExitStack() as opened:
        for file in files:
            tensors = opened.enter_context(safe_open(str(file), "pt"))
            for name in tensors.keys():  # noqa: SIM118 - it is no dict
                layer, _, part = name.rpartition(".")
                if part in (*needed, *_OTHER_PARTS):
                    parts.setdefault(layer, {})[part] = tensors.get_tensor(name)
                else:
                    state[name] = tensors.get_tensor(name)
        for layer, layer_parts in parts.items():
            if missing := set(needed) - layer_parts.keys():
                raise BrokenCheckpoint(f"{path}: {layer} has no {', '.join(sorted(missing))}")
        try:
            codes = {layer: unpack(layer_parts, settings) for layer, layer_parts in parts.items()}
        except (RuntimeError, ValueError) as error:
            raise BrokenCheckpoint(f"{path}: parts of a layer do not fit: {error}") from error
    codes = _without_needless_zeros(codes)
    state |= {f"{layer}.weight": each.plain(dtype) for layer, each in codes.items()}
    return WordCheckpoint(_METHODS[settings["quant_method"]], codes, state)


def _gptq(parts: Mapping[str, Tensor], settings: Mapping[str, Any]) -> Codes:
    words, scales, groups = parts["qweight"], parts["scales"], parts.get("g_idx")
    # The number of bits may differ between layers; it follows from the shapes.
    bits = settings["bits"] if groups is None else 32 * len(words) // len(groups)
    codes = _unpacked(words.T, bits)
    zeros = _unpacked(parts["qzeros"], bits)[:, : scales.shape[1]]
    own = settings.get("checkpoint_format", settings.get("format", "gptq"))
    if own != "gptq_v2":
        zeros = (zeros + 1) & (2**bits - 1)
    return _codes(bits, codes, zeros, scales, None if groups is None else groups.long())


def _awq(parts: Mapping[str, Tensor], settings: Mapping[str, Any]) -> Codes:
    place = torch.tensor(_AWQ_OUTPUTS).argsort()

    def unpacked(words: Tensor) -> Tensor:
        return _unpacked(words, 4).view(len(words), -1, 8)[:, :, place].flatten(1)

    codes = unpacked(parts["qweight"]).T
    return _codes(4, codes, unpacked(parts["qzeros"]), parts["scales"], None)


def _tensors(parts: Mapping[str, Tensor], settings: Mapping[str, Any]) -> Codes:
    words, zeros, scales = (parts[name] for name in _PARTS_OF_TENSORS)
    num_inputs, groups = int(parts["weight_shape"][1]), parts.get("weight_g_idx")
    bits = 32 * words.shape[1] // num_inputs
    codes = _unpacked(words, bits)[:, :num_inputs]
    own = _unpacked(zeros.T, bits)[:, : len(scales)]
    return _codes(bits, codes, own, scales.T, None if groups is None else groups.long())


def _unpacked(words: Tensor, bits: int) -> Tensor:
    """Unpack words, shape (rows, words) to (rows, words * 32 / bits), the lowest bits first."""
    octets = words.contiguous().view(torch.uint8)
    if bits == 8:
        return octets
    return torch.stack((octets & 15, octets >> 4), -1).flatten(1)


def _codes(bits: int, codes: Tensor, zeros: Tensor, scales: Tensor, groups: Tensor | None) -> Codes:
    """Return the codes of a layer.

    Args:
        bits: Bits of a code.
        codes: Unsigned, shape (outputs, inputs).
        zeros: Unsigned, shape (groups, outputs).
        scales: Shape (groups, outputs).
        groups: The group of each input; None if groups are in order.
    """
    num_inputs, num_groups = codes.shape[1], len(scales)
    if bits not in (4, 8):
        raise ValueError(f"{bits} bits")
    if zeros.shape != scales.shape or scales.shape[1] != len(codes):
        raise ValueError(f"codes {codes.shape}, zeros {zeros.shape}, scales {scales.shape}")
    size = -(-num_inputs // num_groups)
    order = None
    if groups is not None:
        size = int(torch.bincount(groups, minlength=num_groups).max())
        in_order = torch.arange(num_inputs) // size
        if not torch.equal(groups, in_order):
            order = groups.argsort(stable=True)
            codes = codes[:, order]
            if not torch.equal(groups[order], in_order):
                raise ValueError(f"groups of g_idx are not all of {size} inputs")
    if num_groups == 1:
        size = -(-num_inputs // GROUP_STEP) * GROUP_STEP
    elif size % GROUP_STEP:
        raise ValueError(f"groups of {size} inputs")
    if bits == 8:
        codes, zeros = ((each.int() - 128).to(torch.int8) for each in (codes, zeros))
    format = CodeFormat(8 if bits == 8 else 4, size, has_zeros=True)
    zeros = zeros.to(torch.int8).T.contiguous()
    return Codes(format, codes.contiguous(), scales.T.contiguous(), zeros=zeros, order=order)


def _without_needless_zeros(codes: Mapping[str, Codes]) -> dict[str, Codes]:
    """Remove zero points if all are those of the format without zero points."""
    if any(not _has_usual_zeros(each) for each in codes.values()):
        return dict(codes)
    return {
        name: replace(each, format=replace(each.format, has_zeros=False), zeros=None)
        for name, each in codes.items()
    }


def _has_usual_zeros(codes: Codes) -> bool:
    assert codes.zeros is not None
    return bool((codes.zeros == replace(codes.format, has_zeros=False).zero).all())
