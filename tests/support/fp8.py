"""Tiny checkpoints with linear layers in FP8 (E4M3), and scales of blocks, rows or tensors."""

import json
from pathlib import Path
from typing import Literal

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional

BLOCK = 32
Scales = Literal["block", "channel", "tensor"]


def save_fp8(checkpoint: Path, path: Path, scales: Scales) -> Path:
    """Copy a checkpoint in one file, its linear layers and experts in FP8.

    Args:
        checkpoint: In one file.
        path: The new folder.
        scales: ``block`` as DeepSeek and Qwen publish, the others as compressed-tensors does.
    """
    path.mkdir()
    for file in checkpoint.iterdir():
        (path / file.name).write_bytes(file.read_bytes())
    state = load_file(path / "model.safetensors")
    suffix = "weight_scale_inv" if scales == "block" else "weight_scale"
    for name in [name for name in state if name.endswith(("_proj.weight", "_mqa.weight"))]:
        weight, own = _encoded(state[name].float(), scales)
        state[name], state[f"{name.removesuffix('weight')}{suffix}"] = weight, own
    save_file(state, path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] = _settings(scales)
    (path / "config.json").write_text(json.dumps(config))
    return path


def _encoded(weight: Tensor, scales: Scales) -> tuple[Tensor, Tensor]:
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


def _settings(scales: Scales) -> dict[str, object]:
    if scales == "block":
        return {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "weight_block_size": [BLOCK, BLOCK],
        }
    weights = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": scales}
    rows = {"num_bits": 8, "type": "float", "dynamic": True, "strategy": "token"}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {
            "group_0": {"targets": ["Linear"], "weights": weights, "input_activations": rows}
        },
    }
