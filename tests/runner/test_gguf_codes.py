"""A GGUF file's own codes are multiplied with: the very numbers that the file has."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from ostinato.runner.forward.codes import CodeFormat, Codes, encode, joined
from ostinato.runner.forward.packed_linear import PackedLinear
from ostinato.runner.forward.quantized import QuantizedWeight
from ostinato.runner.gguf_codes import exact_codes
from ostinato.runner.model_loader import LoadedModel, load_model
from tests.runner.bench import own_logits, random_prompt
from tests.support.checkpoints import Checkpoints
from tests.support.gguf_files import save_gguf
from tests.support.instruction_sets import needs_library

pytestmark = needs_library

SIZES: dict[str, Any] = {"hidden_size": 64, "head_dim": 128}
"""Rows that blocks of 32 divide; heads as Qwen3 has them, which files do not say."""


def quantized_layers(loaded: LoadedModel) -> list[QuantizedWeight]:
    layers = [m.packed for m in loaded.model.modules() if isinstance(m, PackedLinear)]
    return [packed for packed in layers if isinstance(packed, QuantizedWeight)]


@pytest.mark.parametrize(
    ("kind", "bits"), [("Q8_0", 8), ("Q5_0", 8), ("Q5_1", 8), ("Q4_0", 4), ("Q4_1", 4)]
)
def test_a_file_runs_from_its_own_codes(checkpoints: Checkpoints, tmp_path: Path, kind, bits):
    """The probe's difference from the modules with the file's numbers is none but of sums."""
    file = save_gguf(tmp_path / "tiny.gguf", checkpoints.path("qwen3", **SIZES), kind)
    plain = load_model(file, "float32", forward="plain")
    loaded = load_model(file, "float32")

    layers = quantized_layers(loaded)
    assert layers and all(layer.format.bits == bits for layer in layers)
    assert loaded.weight_format == f"codes of the file (GGUF {kind})"
    assert loaded.fingerprint != plain.fingerprint
    theirs, ours = plain.model.state_dict(), loaded.model.state_dict()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    prompt = random_prompt(1, 12)
    assert torch.allclose(own_logits(loaded, prompt), own_logits(plain, prompt), atol=1e-4)


def test_a_file_with_plain_weights_has_no_codes(checkpoints: Checkpoints, tmp_path: Path):
    loaded = load_model(save_gguf(tmp_path / "tiny.gguf", checkpoints.path("qwen3", **SIZES)))
    assert loaded.quantization is None and not quantized_layers(loaded)


@pytest.mark.parametrize("kind", ["Q4_K", "Q5_K", "Q6_K"])
@pytest.mark.parametrize("turned", [False, True])
def test_blocks_of_256_become_codes_where_their_groups_are_of_32(kind: str, turned: bool):
    """Rows may be turned as llama.cpp turns those of queries and keys."""
    type_ = gguf.GGMLQuantizationType[kind]
    size = gguf.GGML_QUANT_SIZES[type_][1]
    random = np.random.default_rng(0)
    blocks = random.integers(0, 256, (16 * 2, size), dtype=np.uint8)
    scale = slice(-2, None) if kind == "Q6_K" else slice(0, 2)
    blocks[:, scale] = random.random((32, 1)).astype(np.float16).view(np.uint8)
    if kind != "Q6_K":
        blocks[:, 2:4] = random.random((32, 1)).astype(np.float16).view(np.uint8)
    data = blocks.reshape(16, -1)
    weight = torch.from_numpy(gguf.dequantize(data, type_))
    if turned:
        weight = weight.view(4, 2, 2, -1).transpose(1, 2).reshape(weight.shape)
    tensor = SimpleNamespace(tensor_type=type_, data=data, shape=np.array([512, 16]))

    found = exact_codes(tensor, weight, [2, 4])

    if kind == "Q6_K":
        assert found is None
    else:
        assert found is not None and torch.equal(found.plain(), weight)
        assert exact_codes(tensor, weight.bfloat16(), [4]) is not None, "as it was rounded"
        assert exact_codes(tensor, weight + 1, [4]) is None, "other numbers"


def test_codes_of_several_formats_are_joined_without_loss():
    """As where a file keeps values in more bits than queries and keys."""
    formats = [CodeFormat(4, 32), CodeFormat(4, 64, has_minima=True), CodeFormat(8, 128)]
    parts: list[Codes] = [encode(torch.randn(3, 200), format) for format in formats]
    plain = torch.cat([part.plain() for part in parts])

    for some in (parts, parts[:1] * 2, parts[1:]):
        found = joined(some)
        assert torch.equal(found.plain(), torch.cat([part.plain() for part in some]))
    assert torch.equal(QuantizedWeight(joined(parts), torch.float32).plain(), plain)
