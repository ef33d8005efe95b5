"""Tiny checkpoints of GPTQ and AWQ, packed as their formats define it."""

import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.support.models.checkpoints import (
    edit_config,
    make_config,
    rewritten_weights,
    save_checkpoint,
)

AWQ_OUTPUTS = (0, 2, 4, 6, 1, 3, 5, 7)

KINDS: dict[str, dict[str, Any]] = {
    "GPTQ": {"method": "gptq"},
    "GPTQ, symmetric": {"method": "gptq", "is_symmetric": True},
    "GPTQ by columns": {"method": "gptq", "group_size": -1},
    "GPTQ in act-order": {"method": "gptq", "act_order": True},
    "GPTQ v2": {"method": "gptq", "checkpoint_format": "gptq_v2"},
    "GPTQ in 8 bits": {"method": "gptq", "bits": 8},
    "GPTQ v2 in 8 bits": {"method": "gptq", "bits": 8, "checkpoint_format": "gptq_v2"},
    "AWQ": {"method": "awq", "version": "gemm", "zero_point": True},
}
"""Arguments of ``save_words``, one for each kind of checkpoint."""


def into_words(numbers: Tensor, bits: int) -> Tensor:
    """Pack (rows, columns) into (rows, columns * bits / 32), the first in the lowest bits."""
    wide = numbers.long().view(len(numbers), -1, 32 // bits)
    return (wide << torch.arange(0, 32, bits)).sum(2).to(torch.uint32).view(torch.int32)


def save_words(
    path: Path,
    method: str,
    bits: int = 4,
    group_size: int = 32,
    is_symmetric: bool = False,
    act_order: bool = False,
    dtype: str = "float32",
    changes: dict[str, Any] | None = None,
    family: str = "llama",
    kept: str = "^$",
    wide: str = "^$",
    orders_by: str = r"gate|up|w[13]",
    chosen: str = r"(proj|w[123])\.weight$",
    **settings: Any,
) -> dict[str, Tensor]:
    """Write a checkpoint of random codes.

    Args:
        path: Its folder.
        method: ``gptq`` or ``awq``.
        bits: Bits of a code.
        group_size: Inputs of a group, or -1.
        is_symmetric: Whether all zero points are in the middle.
        act_order: Whether groups are of inputs in any order, one of the layers of an input.
        dtype: Of everything else.
        changes: Of the config.
        family: The model type.
        kept: Names of layers that are not quantized, a pattern.
        wide: Names of layers in 8 bits.
        chosen: Names of layers that are quantized if they are not kept.
        orders_by: What differs in the names of an expert's layers of one order.
        settings: Of the quantization.

    Returns:
        What the quantized weights are in float64, by name.
    """
    sizes = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16, **(changes or {})}
    save_checkpoint(path, make_config(family, dtype=dtype, **sizes))
    random = torch.Generator().manual_seed(bits)
    plain = {}
    orders: dict[tuple[int, str], Tensor] = {}
    own_bits = bits
    with rewritten_weights(path) as weights:
        for name in [name for name in weights if re.search(chosen, name)]:
            if re.search(kept, name):
                continue
            bits = 8 if re.search(wide, name) else own_bits
            num_outputs, num_inputs = weights.pop(name).shape
            size = num_inputs if group_size == -1 else group_size
            num_groups = -(-num_inputs // size)
            groups = torch.arange(num_inputs) // size
            if act_order:  # layers of one input have one order
                own = re.sub(orders_by, "", name) if ".experts." in name else ""
                drawn = torch.randperm(num_inputs, generator=random)
                order = orders.setdefault((num_inputs, own), drawn)
                groups = groups[order]
            num_codes = 2**bits
            codes = torch.randint(0, num_codes, (num_inputs, num_outputs), generator=random)
            zeros = torch.randint(1, num_codes, (num_groups, num_outputs), generator=random)
            if is_symmetric:
                zeros = torch.full_like(zeros, num_codes // 2)
            scales = (torch.rand(zeros.shape, generator=random) * 0.3 / num_codes).half()
            plain[name] = ((codes - zeros[groups]).double() * scales.double()[groups]).T
            layer = name.removesuffix("weight")
            weights[f"{layer}scales"] = scales
            if method == "awq":
                for part, numbers in (("qweight", codes), ("qzeros", zeros)):
                    turned = numbers.view(len(numbers), -1, 8)[:, :, AWQ_OUTPUTS].flatten(1)
                    weights[f"{layer}{part}"] = into_words(turned, 4)
                continue
            weights[f"{layer}qweight"] = into_words(codes.T, bits).T.contiguous()
            less = 0 if settings.get("checkpoint_format") == "gptq_v2" else 1
            weights[f"{layer}qzeros"] = into_words(zeros - less, bits)
            weights[f"{layer}g_idx"] = groups.int()
    stored = {"quant_method": method, "bits": own_bits, "group_size": group_size, **settings}
    if method == "gptq":
        stored |= {"desc_act": act_order, "sym": is_symmetric}
    edit_config(path, quantization_config=stored)
    return plain
