"""The codes of GPTQ, AWQ and compressed-tensors, read without their libraries.

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
           weight_packed      (outputs, inputs / n)  adjacent inputs; or, of int-quantized,
           weight             (outputs, inputs)      bytes with a sign
           weight_zero_point  (outputs / n, groups)  adjacent outputs; none if it is symmetric
           weight_scale       (outputs, groups)
           weight_g_idx       (inputs,)

Sources: GPTQ, arXiv 2210.17323; AWQ, arXiv 2306.00978; the layouts are those that AutoGPTQ,
AutoAWQ and compressed-tensors write.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ostinato.runner.forward.codes import BY_TOKEN, PLAIN, Activations
from ostinato.runner.settings import GROUP_STEP

METHODS = {"gptq": "GPTQ", "awq": "AWQ", "compressed-tensors": "compressed-tensors"}
_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
_FORMATS = ("pack-quantized", "int-quantized")


@dataclass(frozen=True, slots=True)
class Layout:
    """How a layer is stored.

    Attributes:
        codes: Name of the codes.
        zeros: Name of the zero points.
        scales: Name of the scales.
        groups: Name of the inputs' groups.
        others: Names of further parts.
        unpack: Returns codes from 0 on, shape (outputs, inputs), by what is stored and the bits.
        unpack_zeros: Returns zero points likewise, shape (groups, outputs).
        is_by_input: Whether inputs, and groups, are the first dimension.
        packs_inputs: Whether inputs, not outputs, share a word, where they are.
    """

    codes: str
    zeros: str
    scales: str
    groups: str
    others: tuple[str, ...]
    unpack: Callable[[Tensor, int], Tensor]
    unpack_zeros: Callable[[Tensor, int], Tensor]
    is_by_input: bool = False
    packs_inputs: bool = False

    @property
    def parts(self) -> tuple[str, ...]:
        """Names of all parts."""
        return (self.codes, self.zeros, self.scales, self.groups, *self.others)


def _unpacked(words: Tensor, bits: int) -> Tensor:
    """Unpack words, shape (rows, words) to (rows, words * 32 / bits), the lowest bits first."""
    octets = words.contiguous().view(torch.uint8)
    if bits == 8:
        return octets
    return torch.stack((octets & 15, octets >> 4), -1).flatten(1)


def _turned(words: Tensor, bits: int) -> Tensor:
    """Unpack words of AWQ, shape (rows, words) to (words * 8, rows)."""
    columns = _unpacked(words, bits).T.contiguous()
    return columns.view(-1, 8, len(words))[:, _AWQ_PLACES].flatten(0, 1)


def _of_signed(codes: Tensor, bits: int) -> Tensor:
    return (codes + 2 ** (bits - 1) if bits < 8 else codes ^ -128).view(torch.uint8)


_GPTQ = Layout(
    *("qweight", "qzeros", "scales", "g_idx", ()),
    lambda words, bits: _unpacked(words.T, bits),
    _unpacked,
    is_by_input=True,
    packs_inputs=True,
)
_AWQ = Layout(
    *("qweight", "qzeros", "scales", "g_idx", ()),
    _turned,
    lambda words, bits: _turned(words, bits).T,
    is_by_input=True,
)
_PACKED = Layout(
    *("weight_packed", "weight_zero_point", "weight_scale", "weight_g_idx", ("weight_shape",)),
    _unpacked,
    lambda words, bits: _unpacked(words.T, bits),
)
_SIGNED = Layout(
    *("weight", "weight_zero_point", "weight_scale", "weight_g_idx", ()),
    _of_signed,
    lambda words, bits: _unpacked(words.T, bits),
)
_LAYOUTS: Mapping[str, tuple[Layout, ...]] = {
    "gptq": (_GPTQ,),
    "awq": (_AWQ,),
    "compressed-tensors": (_PACKED, _SIGNED),
}


def is_part(name: str, kind: str, settings: Mapping[str, Any]) -> bool:
    """Return whether a tensor is a part of a quantized layer.

    Args:
        name: Its name in the layer.
        kind: Its format in the file.
        settings: Settings of the quantization.
    """
    is_known = any(name in layout.parts for layout in _LAYOUTS[settings["quant_method"]])
    return is_known and (name != _SIGNED.codes or kind == "I8")


def layout_of(parts: Collection[str], settings: Mapping[str, Any]) -> Layout:
    """Return how a layer of some parts is stored."""
    return _LAYOUTS[settings["quant_method"]][-1 if _SIGNED.codes in parts else 0]


def is_in_words(settings: Mapping[str, Any]) -> bool:
    """Return whether all quantized weights of a checkpoint are codes that are read here."""
    if settings.get("quant_method") != "compressed-tensors":
        return settings.get("quant_method") in METHODS
    groups = _groups(settings)
    return (
        all(_fits(group, settings) for group in groups)
        and len(set(map(_activation_bits, groups))) == 1
        and (settings.get("sparsity_config") or {}).get("format", "dense") == "dense"
        and not settings.get("transform_config")
    )


def activations_of(settings: Mapping[str, Any]) -> Activations:
    """Return what rows become before they are multiplied, by settings that are in words."""
    return BY_TOKEN if any(map(_activation_bits, _groups(settings))) else PLAIN


def are_asymmetric(settings: Mapping[str, Any]) -> bool:
    """Return whether all layers have zero points."""
    return all(group["weights"].get("symmetric") is False for group in _groups(settings))


def signed_bits(settings: Mapping[str, Any]) -> int:
    """Return the bits of codes that are stored as bytes."""
    return max(int(group["weights"]["num_bits"]) for group in _groups(settings))


def _groups(settings: Mapping[str, Any]) -> Collection[Mapping[str, Any]]:
    groups = settings.get("config_groups")
    return groups.values() if isinstance(groups, Mapping) else ()


def _fits(group: Mapping[str, Any], settings: Mapping[str, Any]) -> bool:
    """Return whether our codes represent the layers of a group of a compressed-tensors config."""
    weights, format = group.get("weights") or {}, group.get("format") or settings.get("format")
    size, is_symmetric = weights.get("group_size"), weights.get("symmetric", True)
    strategy = weights.get("strategy") or ("channel" if size == -1 else "group")
    return (
        format in _FORMATS[: 2 if is_symmetric else 1]
        and weights.get("type", "int") == "int"
        and weights.get("num_bits") in (4, 8)
        and (
            strategy == "channel"
            or (strategy == "group" and not (is_symmetric and (size or 1) % GROUP_STEP))
        )
        and _activation_bits(group) is not None
        and group.get("output_activations") is None
    )


def _activation_bits(group: Mapping[str, Any]) -> int | None:
    """Return 8 if activations have dynamic scales per token, 0 if they are plain; else None."""
    rows = group.get("input_activations")
    if rows is None:
        return 0
    is_ours = rows.get("type", "int") == "int" and rows.get("num_bits") == 8
    is_ours &= rows.get("symmetric", True) and rows.get("strategy") == "token"
    return 8 if is_ours and rows.get("dynamic") is True else None
