"""Tiny checkpoints of gpt-oss as it is published: experts in MXFP4."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file


def save_mxfp4(checkpoint: Path, path: Path, scales: bool = True) -> Path:
    """Copy a checkpoint of gpt-oss, its experts replaced by random blocks.

    Args:
        checkpoint: In one file.
        path: The new folder.
        scales: Whether there are scales; without them it is broken.
    """
    path.mkdir()
    for file in checkpoint.iterdir():
        (path / file.name).write_bytes(file.read_bytes())
    state, random = load_file(path / "model.safetensors"), torch.Generator().manual_seed(0)
    for name in [name for name in state if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = state.pop(name).shape
        groups = experts, outputs, inputs // 32
        drawn = torch.randint(256, (*groups, 16), dtype=torch.uint8, generator=random)
        state[f"{name}_blocks"] = drawn
        if scales:
            exponents = torch.randint(118, 124, groups, dtype=torch.uint8, generator=random)
            state[f"{name}_scales"] = exponents
    save_file(state, path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "mxfp4",
        "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router"],
    }
    (path / "config.json").write_text(json.dumps(config))
    return path
