"""Checkpoints in FP8: read weight by weight, as plain numbers or as codes of 8 bits."""

from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from safetensors.torch import load_file, save_file

from ostinato.errors import BrokenCheckpoint
from ostinato.runner.forward.weight_refs import weight_bytes
from ostinato.runner.model_loader import load_model
from tests.runner.experts.test_stored_codes import stacked
from tests.support.instruction_sets import needs_library
from tests.support.models.checkpoints import Checkpoints
from tests.support.models.quantized import BLOCK, Scales, save_fp8

pytestmark = needs_library

SIZES: dict[str, dict[str, Any]] = {
    "qwen3": {"hidden_size": 80, "intermediate_size": 144},  # no multiples of a block
    "qwen3_moe": {"moe_intermediate_size": 48, "num_experts": 24},
    "deepseek_v3": {},
}


def numbers_of(path: Path, scales: Scales) -> dict[str, torch.Tensor]:
    """Return the definition: codes times scales, in float32, by the names in the file."""
    state = load_file(path / "model.safetensors")
    numbers = {}
    for name, weight in state.items():
        if "_scale" in name:
            continue
        own = state.get(f"{name}_scale_inv", state.get(f"{name}_scale"))
        if own is None:
            numbers[name] = weight.float()
            continue
        if scales == "block":
            own = own.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
            own = own[: len(weight), : weight.shape[1]]
        numbers[name] = weight.float() * own
    return numbers


@pytest.mark.parametrize("family", SIZES)
@pytest.mark.parametrize("scales", get_args(Scales))
def test_weights_are_codes_times_scales(
    checkpoints: Checkpoints, tmp_path: Path, family: str, scales: Scales
):
    """Dense, with experts, and of a family that is read as a whole (DeepSeek)."""
    path = save_fp8(checkpoints.path(family, **SIZES[family]), tmp_path / "fp8", scales)
    loaded = load_model(path, "bfloat16", weight_cache_bytes=0)

    assert loaded.forward.name == "fused"
    numbers = numbers_of(path, scales)
    for name, kept in stacked(numbers, loaded.model.state_dict()).items():
        assert torch.equal(kept, numbers[name].to(kept.dtype)), name
    assert len(numbers) > 20


def test_weights_are_quantized_to_8_bits_while_they_are_read(
    checkpoints: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """One at a time: all together exist neither in float32 nor in the compute dtype."""
    monkeypatch.setattr("ostinato.runner.model_loader.read_whole", None)
    path = checkpoints.path("qwen3_moe", **SIZES["qwen3_moe"])
    fp8 = save_fp8(path, tmp_path / "fp8", "block")
    plain = load_model(fp8, "bfloat16", weight_cache_bytes=0)
    small = load_model(fp8, "bfloat16", quantization="int8", weight_cache_bytes=0)

    assert small.forward.name == "fused" and small.weight_format.startswith("int8")
    assert weight_bytes(small.model) < 0.7 * weight_bytes(plain.model)


@pytest.mark.parametrize("lost", ["weight_scale_inv", "columns"])
def test_codes_without_scales_that_fit_are_refused(
    checkpoints: Checkpoints, tmp_path: Path, lost: str
):
    path = save_fp8(checkpoints.path("qwen3", **SIZES["qwen3"]), tmp_path / "fp8", "block")
    state = load_file(path / "model.safetensors")
    name = "model.layers.0.mlp.down_proj.weight_scale_inv"
    scales = state.pop(name)
    if lost == "columns":
        state[name] = scales[:, :1].contiguous()
    save_file(state, path / "model.safetensors", metadata={"format": "pt"})

    with pytest.raises(BrokenCheckpoint, match=r"down_proj.weight in FP8, of shape .* has scales"):
        load_model(path, "bfloat16", weight_cache_bytes=0)
