"""Checks that a model fits in free memory before its weights are read."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import nn

from ostinato.core.errors import ConfigError
from ostinato.runner.experts.mixture import expert_weights
from ostinato.runner.forward.quantized import Quantization
from ostinato.runner.kv.kv_store import KVSpec
from ostinato.runner.loading.weight_source import WeightSource, packed_members
from ostinato.runner.memory import available_bytes
from ostinato.runner.native.code_packing import BLOCK_KINDS

if TYPE_CHECKING:
    from transformers import PreTrainedModel

KVBytes = Callable[[KVSpec, torch.dtype], int]
"""Bytes that settings give keys and values, for the dtype that a model computes in."""

STEP_BYTES = 2**28
"""Buffers of a step, and what packing a weight needs beside its numbers."""

_NEAREST_BITS = 8.5
"""Bits of a weight in a format of files that the library does not pack, see ``NEAREST``."""

_WORD_BITS = {"W4": 4.375, "W8": 8.375}
"""Bits of a weight of GPTQ, AWQ or compressed-tensors, in groups of 64 with zero points."""

_BITS = {"int8": 8.125, "int4": 5.0, "w8a8": 8.125, "w4a8": 5.0}
"""Bits of a weight that is quantized at load; of the head, those of ``int8``."""


def check_memory(
    model: "PreTrainedModel",
    source: WeightSource,
    quantization: Quantization | None,
    kv: int,
) -> None:
    """Refuse a model that does not fit.

    Args:
        model: Its skeleton.
        source: Its weights.
        quantization: How they are packed.
        kv: Bytes that settings ask for keys and values.

    Raises:
        ConfigError: With the numbers, and what would fit.
    """
    free = available_bytes()
    name = None if quantization is None else quantization.name
    weights, packing = _needed(model, source, name)
    total = weights + max(packing, kv) + STEP_BYTES
    if free is None or total <= free:
        return
    advice = []
    for other in ("int8", "int4"):
        own_weights, own_packing = _needed(model, source, other)
        if (own := own_weights + max(own_packing, kv) + STEP_BYTES) <= free:
            advice.append(f"quantization={other!r} ({gib(own)})")
    if weights + packing + STEP_BYTES <= free:
        advice.append("fewer blocks (num_blocks or kv_cache_memory) or a smaller max_model_len")
    raise ConfigError(
        f"the model needs {gib(total)}: {gib(weights)} of weights, {gib(packing)} while they are "
        f"packed, {gib(kv)} of keys and values, {gib(STEP_BYTES)} for a step; {gib(free)} are "
        "free (MemAvailable, or what the container's limit leaves): "
        f"{' or '.join(advice) or 'a smaller model, or more memory'} would fit"
    )


def _needed(
    model: "PreTrainedModel",
    source: WeightSource,
    quantization: str | None,
) -> tuple[int, int]:
    """Return the bytes that stay, and those of the largest product while it is packed."""
    names = {id(own.weight): name for name, own in packed_members(model, source)}
    head, item_bytes = model.get_output_embeddings(), model.dtype.itemsize
    experts = {id(stack.weight) for _, stack in expert_weights(model)}
    stays, largest = 0.0, 0
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            kind = source.kinds.get(names.get(id(parameter), ""))
            bits = 8.0 * item_bytes
            unpacked = item_bytes
            is_packed = isinstance(module, nn.Linear) or id(parameter) in experts
            if is_packed and quantization in _BITS:
                bits = _BITS["int8" if module is head else quantization]
            elif kind is not None and quantization is not None:
                known = BLOCK_KINDS.get(kind)
                bits = _WORD_BITS.get(kind[:2], _NEAREST_BITS)
                bits = bits if known is None else known.bits_per_weight
                unpacked = 1
            stays += parameter.numel() * bits / 8
            largest = max(largest, parameter.numel() * unpacked)
    return int(stays), 2 * largest


def check_whole(model: "PreTrainedModel", dtype: torch.dtype, is_gguf: bool) -> None:
    """Refuse a model that ``transformers`` cannot read in free memory.

    Args:
        model: On ``meta``.
        dtype: Compute dtype.
        is_gguf: Whether all weights are first converted to float32.

    Raises:
        ConfigError: With the numbers.
    """
    free = available_bytes()
    item_bytes = dtype.itemsize + (4 if is_gguf else 0)
    needed = sum(parameter.numel() for parameter in model.parameters()) * item_bytes + STEP_BYTES
    if free is not None and needed > free:
        raise ConfigError(
            f"{type(model).__name__} is read as a whole, which needs {gib(needed)} in "
            f"{str(dtype).removeprefix('torch.')}; {gib(free)} are free (MemAvailable, or what "
            "the container's limit leaves): a smaller model, or dtype='bfloat16', may fit"
        )


def gib(num_bytes: int) -> str:
    """Write bytes in GiB."""
    return f"{num_bytes / 2**30:.2f} GiB"
