"""Models with experts: loaded in 16, 8 and 4 bits, and served with the same bits in any batch."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.peers.checkpoint import words
from benchmarks.peers.shapes import write_gguf
from ostinato import LLM, SamplingParams
from ostinato.runner.forward.quantized import QuantizedWeight, StoredRows
from ostinato.runner.forward.weight_refs import weight_bytes
from ostinato.runner.loading.skeleton import TRIAL_EXPERTS
from ostinato.runner.model_loader import load_model
from ostinato.runner.settings import QuantizationName
from tests.runner.bench import (
    has_same_bits_in_any_steps,
    has_same_weights,
    own_logits,
    packed_experts,
    random_prompt,
)
from tests.runner.loading.test_streamed import load_whole
from tests.support.instruction_sets import needs_library
from tests.support.models.checkpoints import Checkpoints, make_config
from tests.support.models.gguf_files import save_gguf
from tests.support.pairs import pairwise

pytestmark = needs_library

SHARED = ["qwen2_moe", "glm4_moe", "granitemoeshared", "cohere2_moe", "phimoe", "hunyuan_v1_moe"]
SIZES = {"hidden_size": 64, "moe_intermediate_size": 32, "head_dim": 32, "num_experts": 24}
PLAIN: dict[str, Any] = {"dtype": "float32", "forward": "plain", "weight_cache_bytes": 0}
MIXTURES = ["qwen3_moe", "gpt_oss", "deepseek_v3", "qwen3_next", "granitemoehybrid", "mixtral"]


@pytest.mark.one_case_in(2)
@pytest.mark.parametrize("family", MIXTURES)
def test_a_mixture_is_packed_and_takes_4_bits(checkpoints: Checkpoints, family: str):
    """None is refused, and its experts are codes as its linear layers are."""
    plain = load_model(checkpoints.path(family), "bfloat16")
    small = load_model(checkpoints.path(family), "bfloat16", quantization="int4")

    assert plain.forward.name in ("packed", "fused") and packed_experts(plain)
    assert len(packed_experts(small)) == len(packed_experts(plain))
    assert weight_bytes(small.model) < weight_bytes(plain.model)
    assert small.weight_format.startswith("int4")


@pytest.mark.parametrize("name", ["w4a8", "w8a8", "int8"])
def test_experts_are_read_from_the_checkpoint_one_layer_at_a_time(
    checkpoints: Checkpoints, name: QuantizationName, monkeypatch: pytest.MonkeyPatch
):
    """As a whole and weight by weight, they become the same codes."""
    path = checkpoints.path("qwen3_moe")
    streamed = load_model(path, "bfloat16", quantization=name, weight_cache_bytes=0)
    settings: Any = {"dtype": "bfloat16", "quantization": name, "weight_cache_bytes": 0}

    assert has_same_weights(streamed, load_whole(path, monkeypatch, **settings))


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pairwise("family", ["qwen3_moe", *SHARED], "quantization", [None, "int4", "w8a8"])
def test_a_sequence_has_the_same_logits_in_whatever_steps_it_is_computed(
    checkpoints: Checkpoints, family: str, dtype: str, quantization: QuantizationName | None
):
    """To the bit, beside another sequence: what a mixture computes of a row is the row's own."""
    loaded = load_model(checkpoints.path(family), dtype, quantization=quantization)
    assert loaded.fused is not None and loaded.fused.promises_bits
    assert has_same_bits_in_any_steps(loaded)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0"])
def test_a_gguf_file_with_experts_is_computed_with_its_own_blocks(
    checkpoints: Checkpoints, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
):
    """Streamed, without loss: the experts' numbers are those that transformers reads.

    There are more experts than the trial takes.
    """
    assert SIZES["num_experts"] > TRIAL_EXPERTS
    path = checkpoints.path("qwen3_moe", **SIZES)
    file = save_gguf(tmp_path / "tiny.gguf", path, kind, "qwen3moe")
    loaded = load_model(file, "float32", weight_cache_bytes=0)
    plain = load_whole(file, monkeypatch, **PLAIN)

    assert (loaded.forward.name, loaded.forward.reason) == ("fused", "")
    packed = [each for each in packed_experts(loaded) if isinstance(each, QuantizedWeight)]
    assert len(packed) == len(packed_experts(loaded)) == 4
    assert {each.format.bits for each in packed} == {8 if kind == "Q8_0" else 4}
    own, other = loaded.model.state_dict(), plain.model.state_dict()
    names = [name for name in other if ".experts." in name]
    assert len(names) == 4
    assert all(torch.equal(own[name], other[name]) for name in names)
    [output] = LLM(str(file)).generate(["The same prefix"], SamplingParams(max_tokens=4))
    assert len(output.outputs[0].token_ids) == 4


def test_a_trial_packs_few_of_the_experts_in_a_gguf_file(
    checkpoints: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Gates, ups and downs of two layers: 16 experts each in the trial, then all 24."""
    path = checkpoints.path("qwen3_moe", **SIZES)
    file = save_gguf(tmp_path / "tiny.gguf", path, "Q4_0", "qwen3moe")
    num_parts: list[int] = []
    of_rows = QuantizedWeight.of_rows

    def counted(parts: Sequence[StoredRows], *settings: Any) -> QuantizedWeight:
        num_parts.append(len(parts))
        return of_rows(parts, *settings)

    monkeypatch.setattr(QuantizedWeight, "of_rows", counted)
    load_model(file, "bfloat16", weight_cache_bytes=0)

    assert [count for count in num_parts if count > 3] == [32, 16, 32, 16, 48, 24, 48, 24]


def test_a_gguf_file_as_people_download_it_is_computed_with_its_own_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Q4_K_M: a row of queries, keys and values has blocks of two formats, and so have experts."""
    sizes = {"hidden_size": 256, "moe_intermediate_size": 256, "head_dim": 64, "vocab_size": 600}
    all_experts = {"num_experts": 4, "num_experts_per_tok": 4}  # routers of ones choose any
    config = make_config("qwen3_moe", **sizes, **all_experts)
    file = tmp_path / "tiny.gguf"
    write_gguf(file, config, "Q4_K_M", words(600))
    loaded = load_model(file, "float32", weight_cache_bytes=0)
    plain = load_whole(file, monkeypatch, **PLAIN)

    formats = {w.format for w in packed_experts(loaded) if isinstance(w, QuantizedWeight)}
    assert {(each.bits, each.group_size) for each in formats} == {(4, 32), (8, 16)}
    assert has_same_weights(loaded, plain)
    prompt = random_prompt(1, 12)
    assert torch.allclose(own_logits(loaded, prompt), own_logits(plain, prompt), atol=1e-4)
