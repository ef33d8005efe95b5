"""gpt-oss as it is published, and as a GGUF file: experts stay in the 4 bits of MXFP4."""

from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
import transformers

from ostinato.errors import BrokenCheckpoint
from ostinato.runner.forward.gguf_codes import BlockRows
from ostinato.runner.forward.quantized import QuantizedWeight
from ostinato.runner.loaded_model import LoadedModel
from ostinato.runner.loading.mxfp4_source import Mxfp4Weight
from ostinato.runner.model_loader import load_model
from tests.runner.bench import has_same_bits_in_any_steps, packed_experts
from tests.support.instruction_sets import needs_library
from tests.support.models.checkpoints import Checkpoints
from tests.support.models.gguf_files import save_gguf
from tests.support.models.quantized import save_mxfp4

pytestmark = needs_library

YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 64,
    "rope_theta": 10000.0,
}
SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "head_dim": 32,
    "num_local_experts": 24,
    "rope_parameters": YARN,
}
"""More experts than the trial takes."""


@pytest.fixture
def published(checkpoints: Checkpoints, tmp_path: Path) -> Path:
    return save_mxfp4(checkpoints.path("gpt_oss", **SIZES), tmp_path / "published")


def formats_of(loaded: LoadedModel) -> set[str]:
    weights = packed_experts(loaded)
    return {str(w.format) if isinstance(w, QuantizedWeight) else "plain" for w in weights}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_published_checkpoint_keeps_4_bits_and_is_what_transformers_reads(
    published: Path, dtype: Any
):
    """Read weight by weight, packed from its own blocks, and fused."""
    loaded = load_model(published, dtype, weight_cache_bytes=0)
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        published,
        dtype=getattr(torch, dtype),
        quantization_config=transformers.Mxfp4Config(dequantize=True),
    )

    assert (loaded.forward.name, loaded.forward.reason) == ("fused", "")
    assert loaded.weight_format == "codes of the file (MXFP4)"
    assert formats_of(loaded) == {"mxfp4 in groups of 32"}
    own, other = loaded.model.state_dict(), reference.state_dict()
    assert own.keys() == other.keys()
    assert all(torch.equal(own[name], other[name]) for name in other)


def test_no_layer_of_a_published_checkpoint_is_ever_plain(
    published: Path, monkeypatch: pytest.MonkeyPatch
):
    """But for the 16 experts of each layer that the trial compares with the modules."""
    unpacked: list[Mxfp4Weight] = []
    plain = Mxfp4Weight.plain

    def noted(self: Mxfp4Weight, *arguments: Any) -> torch.Tensor:
        unpacked.append(self)
        return plain(self, *arguments)

    monkeypatch.setattr(Mxfp4Weight, "plain", noted)
    load_model(published, "bfloat16", weight_cache_bytes=0)

    assert len(unpacked) == len(set(unpacked)) == 4 * 16


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_sequence_has_the_same_logits_in_whatever_steps_it_is_computed(
    published: Path, dtype: Any
):
    assert has_same_bits_in_any_steps(load_model(published, dtype, weight_cache_bytes=0))


def slices_of(blocks: Any) -> Any:
    """Return what reads some rows of blocks."""
    return lambda first, last: blocks[first:last]


def test_experts_of_any_width_are_filled_up_to_whole_tiles():
    """Each of 48 outputs, where tiles have 32."""
    rows = torch.randn(3, 48, 64).view(-1, 64).numpy()
    blocks = gguf.quantize(rows, gguf.GGMLQuantizationType.Q4_0).reshape(3, 48, -1)
    parts = [BlockRows("Q4_0", 48, 64, slices_of(own)) for own in blocks]

    packed = QuantizedWeight.of_rows(parts, torch.float32, unit=32).plain().view(3, 64, 64)

    numbers = gguf.dequantize(blocks, gguf.GGMLQuantizationType.Q4_0)
    assert torch.equal(packed[:, :48], torch.from_numpy(numbers))
    assert not packed[:, 48:].any()


def test_a_checkpoint_without_scales_is_refused(checkpoints: Checkpoints, tmp_path: Path):
    broken = save_mxfp4(checkpoints.path("gpt_oss", **SIZES), tmp_path / "broken", scales=False)
    with pytest.raises(BrokenCheckpoint, match=r"needs model\.layers\.0\..*_scales of shape"):
        load_model(broken, "bfloat16", weight_cache_bytes=0)


@pytest.mark.parametrize("kind", ["F32", "MXFP4"])
def test_a_gguf_file_of_gpt_oss_is_the_model_that_it_was_made_of(
    checkpoints: Checkpoints, tmp_path: Path, kind: str
):
    """With its RoPE, its sinks and the order of its gates, which transformers does not read."""
    path = checkpoints.path("gpt_oss", **SIZES)
    file = save_gguf(tmp_path / "tiny.gguf", path, kind, "gpt-oss")
    loaded = load_model(file, "float32", weight_cache_bytes=0)
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)

    assert (loaded.forward.name, loaded.forward.reason) == ("fused", "")
    assert formats_of(loaded) == {"plain" if kind == "F32" else "mxfp4 in groups of 32"}
    assert {name: loaded.config.rope_parameters[name] for name in YARN} == YARN
    own, type_ = loaded.model.state_dict(), gguf.GGMLQuantizationType[kind]
    for name, weight in model.state_dict().items():
        if kind != "F32" and weight.ndim > 1 and "_bias" not in name and "router" not in name:
            is_expert = ".experts." in name
            rows = weight.transpose(1, 2).contiguous() if is_expert else weight
            blocks = gguf.quantize(rows.numpy(), type_)
            weight = torch.from_numpy(gguf.dequantize(blocks, type_))
            weight = weight.transpose(1, 2) if is_expert else weight
        assert torch.equal(own[name], weight), name


def test_a_gguf_file_of_gpt_oss_without_scaled_rope_has_plain_rope(
    checkpoints: Checkpoints, tmp_path: Path
):
    plain = {"rope_type": "default", "rope_theta": 10000.0}
    path = checkpoints.path("gpt_oss", **{**SIZES, "rope_parameters": plain})
    file = save_gguf(tmp_path / "tiny.gguf", path, "F32", "gpt-oss")

    assert load_model(file, "float32", weight_cache_bytes=0).config.rope_parameters == plain
