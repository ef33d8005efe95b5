"""Tiny checkpoints in the format of compressed-tensors, as llm-compressor writes them."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.support.checkpoints import edit_config, make_config, save_checkpoint

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
    weights = load_file(path / "model.safetensors")
    quantized = [name for name in weights if name.endswith("proj.weight")]
    for name in quantized:
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
            weights[name.replace("weight", "input_scale")] = torch.full((1,), 0.05).to(weight.dtype)
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    edit_config(path, quantization_config=_settings(activations))
    return path


def _packed(steps: torch.Tensor) -> torch.Tensor:
    """Put four bytes into one int32, the first in the lowest bits, as weights alone are kept."""
    return (steps.int() + 128).to(torch.uint8).reshape(len(steps), -1, 4).view(torch.int32)[..., 0]


def _settings(activations: dict[str, Any] | None) -> dict[str, Any]:
    group = {
        "targets": ["Linear"],
        "weights": {**_ARGS, "strategy": "channel", "dynamic": False},
        "input_activations": activations,
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "int-quantized" if activations else "pack-quantized",
        "quantization_status": "compressed",
        "global_compression_ratio": None,
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "config_groups": {"group_0": group},
    }


def save_w4a16(
    path: Path,
    group_size: int = 32,
    has_zeros: bool = False,
    family: str = "llama",
    **changes: Any,
) -> dict[str, torch.Tensor]:
    """Write a checkpoint of 4-bit weights in groups, symmetric or with zero points.

    Returns:
        What its weights are in float64, by name.
    """
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32

    save_checkpoint(path, make_config(family, **changes))
    weights = load_file(path / "model.safetensors")
    plain = {}
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
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    settings = _settings(None)
    own = {"num_bits": 4, "strategy": "group", "group_size": group_size}
    settings["config_groups"]["group_0"]["weights"] |= {**own, "symmetric": not has_zeros}
    edit_config(path, quantization_config=settings)
    return plain
