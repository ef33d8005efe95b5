"""Tiny checkpoints in 8 and 4 bits: of compressed-tensors, in FP8, and gpt-oss in MXFP4."""

import shutil
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional

from tests.support.models.checkpoints import (
    edit_config,
    make_config,
    rewritten_weights,
    save_checkpoint,
)

BLOCK = 32
Scales = Literal["block", "channel", "tensor"]

_ARGS: dict[str, Any] = {
    "num_bits": 8,
    "type": "int",
    "symmetric": True,
    "group_size": None,
    "block_structure": None,
    "actorder": None,
    "observer_kwargs": {},
}
BY_TOKEN = {**_ARGS, "strategy": "token", "dynamic": True}
BY_TENSOR = {**_ARGS, "strategy": "tensor", "dynamic": True}
STATIC = {**_ARGS, "strategy": "tensor", "dynamic": False}


def save_w8a8(
    path: Path, family: str = "llama", activations: dict[str, Any] | None = BY_TOKEN, **changes: Any
) -> Path:
    """Write a checkpoint of 8-bit weights, and 8-bit activations unless these are None."""
    save_checkpoint(path, make_config(family, **{"num_hidden_layers": 3, **changes}))
    with rewritten_weights(path) as weights:
        for name in [name for name in weights if name.endswith("proj.weight")]:
            weight = weights[name]
            scale = weight.abs().amax(dim=1, keepdim=True) / 127
            steps = (weight / scale).round().clamp(-128, 127).to(torch.int8)
            weights[name + "_scale"] = scale
            if activations is None:
                del weights[name]
                weights[name + "_packed"] = _packed(steps)
                weights[name + "_shape"] = torch.tensor(weight.shape)
                continue
            weights[name] = steps
            if not activations["dynamic"]:
                scale = torch.full((1,), 0.05).to(weight.dtype)
                weights[name.replace("weight", "input_scale")] = scale
    edit_config(path, quantization_config=_settings(activations))
    return path


def _packed(steps: Tensor) -> Tensor:
    """Put four bytes into one int32, the first in the lowest bits, as weights alone are kept."""
    return (steps.int() + 128).to(torch.uint8).reshape(len(steps), -1, 4).view(torch.int32)[..., 0]


def _settings(activations: dict[str, Any] | None) -> dict[str, Any]:
    group = {
        "targets": ["Linear"],
        "weights": {**_ARGS, "strategy": "channel", "dynamic": False},
        "input_activations": activations,
        "output_activations": None,
    }
    kind = "int-quantized" if activations else "pack-quantized"
    return {**_compressed(kind, group), "global_compression_ratio": None, "kv_cache_scheme": None}


def _compressed(kind: str, group: dict[str, Any]) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "format": kind,
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
    }


def save_w4a16(
    path: Path,
    group_size: int = 32,
    has_zeros: bool = False,
    family: str = "llama",
    **changes: Any,
) -> dict[str, Tensor]:
    """Write a checkpoint of 4-bit weights in groups, symmetric or with zero points.

    Returns:
        What its weights are in float64, by name.
    """
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32

    save_checkpoint(path, make_config(family, **changes))
    plain = {}
    with rewritten_weights(path) as weights:
        for name in [name for name in weights if name.endswith("proj.weight")]:
            weight = weights.pop(name)
            groups = weight.view(len(weight), -1, group_size)
            scale, zeros = groups.abs().amax(2) / 7, torch.zeros(1, 1)
            if has_zeros:
                low, high = groups.amin(2).clamp(max=0), groups.amax(2).clamp(min=0)
                scale = (high - low) / 15
                zeros = (-8 - low / scale).round()
                packed = pack_to_int32(zeros.to(torch.int8), 4, packed_dim=0).contiguous()
                weights[f"{name}_zero_point"] = packed
            steps = (groups / scale[..., None] + zeros[..., None]).round().clamp(-8, 7)
            exact = (steps - zeros[..., None]).double() * scale.double()[..., None]
            plain[name] = exact.view(weight.shape)
            weights[f"{name}_packed"] = pack_to_int32(steps.view(weight.shape).to(torch.int8), 4)
            weights[f"{name}_scale"] = scale
            weights[f"{name}_shape"] = torch.tensor(weight.shape)
    settings = _settings(None)
    own = {"num_bits": 4, "strategy": "group", "group_size": group_size}
    settings["config_groups"]["group_0"]["weights"] |= {**own, "symmetric": not has_zeros}
    edit_config(path, quantization_config=settings)
    return plain


def save_fp8(checkpoint: Path, path: Path, scales: Scales) -> Path:
    """Copy a checkpoint in one file, its linear layers and experts in FP8 (E4M3).

    Args:
        checkpoint: In one file.
        path: The new folder.
        scales: ``block`` as DeepSeek and Qwen publish, the others as compressed-tensors does.
    """
    shutil.copytree(checkpoint, path)
    suffix = "weight_scale_inv" if scales == "block" else "weight_scale"
    with rewritten_weights(path) as state:
        for name in [name for name in state if name.endswith(("_proj.weight", "_mqa.weight"))]:
            weight, own = _in_fp8(state[name].float(), scales)
            state[name], state[f"{name.removesuffix('weight')}{suffix}"] = weight, own
    edit_config(path, quantization_config=_fp8_settings(scales))
    return path


def _in_fp8(weight: Tensor, scales: Scales) -> tuple[Tensor, Tensor]:
    rows, columns = weight.shape
    if scales == "block":
        padded = functional.pad(weight, (0, -columns % BLOCK, 0, -rows % BLOCK))
        blocks = padded.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))
        own = blocks.abs().amax((1, 3)) / 448
        wide = own.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)[:rows, :columns]
    elif scales == "channel":
        own = wide = weight.abs().amax(1, keepdim=True) / 448
    else:
        own = wide = weight.abs().amax().view(1) / 448
    return (weight / wide).to(torch.float8_e4m3fn), own


def _fp8_settings(scales: Scales) -> dict[str, object]:
    if scales == "block":
        return {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "weight_block_size": [BLOCK, BLOCK],
        }
    common = {"num_bits": 8, "type": "float", "symmetric": True}
    weights, rows = {**common, "strategy": scales}, {**common, "strategy": "token", "dynamic": True}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": rows}
    return _compressed("float-quantized", group)


def save_mxfp4(checkpoint: Path, path: Path, scales: bool = True) -> Path:
    """Copy a checkpoint of gpt-oss, its experts replaced by random blocks in MXFP4, as published.

    Args:
        checkpoint: In one file.
        path: The new folder.
        scales: Whether there are scales; without them it is broken.
    """
    shutil.copytree(checkpoint, path)
    random = torch.Generator().manual_seed(0)
    with rewritten_weights(path) as state:
        for name in [name for name in state if name.endswith(("gate_up_proj", "down_proj"))]:
            experts, inputs, outputs = state.pop(name).shape
            groups = experts, outputs, inputs // 32
            drawn = torch.randint(256, (*groups, 16), dtype=torch.uint8, generator=random)
            state[f"{name}_blocks"] = drawn
            if scales:
                exponents = torch.randint(118, 124, groups, dtype=torch.uint8, generator=random)
                state[f"{name}_scales"] = exponents
    left = ["model.layers.*.self_attn", "model.layers.*.mlp.router"]
    settings = {"quant_method": "mxfp4", "modules_to_not_convert": left}
    edit_config(path, quantization_config=settings)
    return path
