"""Checkpoints of GPTQ and AWQ run from their own codes, or are refused by name."""

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from ostinato import LLM, SamplingParams
from ostinato.errors import BrokenCheckpoint, UnsupportedModel
from ostinato.runner.forward.quantized import QuantizedWeight
from ostinato.runner.model_loader import load_model
from tests.runner.bench import own_logits, random_prompt
from tests.runner.experts.test_stored_codes import check
from tests.support.instruction_sets import needs_library
from tests.support.models.checkpoints import edit_config
from tests.support.models.quantized import save_w4a16
from tests.support.models.word_checkpoints import KINDS, save_words

pytestmark = needs_library

PROMPT = random_prompt(1, 20)


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_runs_from_its_own_codes(kind: str, tmp_path: Path):
    """By the definition in float64, without a copy in plain numbers."""
    exact = check(tmp_path, save_words(tmp_path, **KINDS[kind]))
    rounded = load_model(tmp_path, "bfloat16")
    for loaded in (exact, rounded):
        assert loaded.fused is not None and loaded.forward.reason == ""
        packed = loaded.model.model.layers[0].mlp.down_proj.packed
        assert isinstance(packed, QuantizedWeight)
        assert packed.format.bits == KINDS[kind].get("bits", 4)
        assert packed.format.has_zeros == ("symmetric" not in kind)
        assert (packed.codes().order is not None) == ("act-order" in kind)
        codes_bytes = packed.num_rows * packed.num_columns * packed.format.bits // 8
        assert packed.nbytes <= 1.25 * codes_bytes + 2 * packed.num_rows * 3 + 4 * 96
    expected = own_logits(exact, PROMPT)
    away = (own_logits(rounded, PROMPT) - expected).square().mean().sqrt() / expected.std()
    assert away <= 0.1
    method, bits = kind.partition(" ")[0].strip(","), packed.format.bits
    assert loaded.weight_format == f"codes of the file ({method} W{bits}A16)"


def test_a_checkpoint_of_compressed_tensors_with_zero_points_runs_from_its_own_codes(
    tmp_path: Path,
):
    """Which transformers does not load: it expects zero points that are not packed."""
    pytest.importorskip("compressed_tensors")
    sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
    loaded = check(tmp_path, save_w4a16(tmp_path, has_zeros=True, dtype="float32", **sizes))
    assert loaded.weight_format == "codes of the file (compressed-tensors W4A16)"


def test_what_is_cached_of_a_checkpoint_in_act_order_is_what_is_computed(tmp_path: Path):
    save_words(tmp_path, "gptq", act_order=True, dtype="bfloat16")
    llm = LLM(str(tmp_path), num_blocks=32, block_size=4)
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    answers = [llm.generate([PROMPT], params, use_tqdm=False)[0] for _ in range(2)]
    assert answers[1].num_cached_tokens and answers[1].num_cached_tokens >= 16
    assert answers[0].outputs[0].token_ids == answers[1].outputs[0].token_ids
    llm.close()


@pytest.mark.parametrize(
    ("given", "changes", "said"),
    [
        ({"method": "gptq"}, {"bits": 3}, "GPTQ in 3 bits: only 4"),
        ({"method": "awq"}, {"bits": 8}, "AWQ in 8 bits: only 4"),
        ({"method": "gptq"}, {"group_size": 16}, "groups of 16: sizes are multiples of 32"),
        ({"method": "gptq"}, {"checkpoint_format": "marlin"}, "laid out as 'marlin': read are"),
        ({"method": "awq"}, {"version": "GEMV"}, "laid out as 'GEMV': read are gemm"),
    ],
)
def test_what_is_not_read_is_refused_before_weights_are(given, changes, said, tmp_path: Path):
    save_words(tmp_path, **given)
    config = json.loads((tmp_path / "config.json").read_text())
    edit_config(tmp_path, quantization_config=config["quantization_config"] | changes)
    with pytest.raises(UnsupportedModel, match=f"{said}.*quantization='int4'"):
        load_model(tmp_path)


def test_a_layer_of_which_parts_do_not_fit_is_a_broken_checkpoint(tmp_path: Path):
    save_words(tmp_path, "awq")
    weights = load_file(tmp_path / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.qzeros"
    zeros = weights.pop(name)
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(BrokenCheckpoint, match=r"up_proj has no qzeros"):
        load_model(tmp_path)
    save_file({**weights, name: zeros[:1]}, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(BrokenCheckpoint, match=r"parts of .*up_proj.weight do not fit"):
        load_model(tmp_path)
