"""Loading a checkpoint ends in a model or in an error that names the cause."""

import shutil
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from huggingface_hub.errors import LocalEntryNotFoundError

from ostinato.errors import BrokenCheckpoint, ConfigError, MissingTokenizer, ModelNotFound
from ostinato.runner.checkpoints.checkpoint import fingerprint, weight_files
from ostinato.runner.checkpoints.model_resolver import EMBEDDED_MODELS, resolve_model
from ostinato.runner.loaded_model import LoadedModel
from ostinato.runner.model_loader import load_model
from tests.runner.bench import has_same_weights
from tests.runner.conftest import Served
from tests.support.models.checkpoints import (
    Checkpoints,
    make_config,
    save_checkpoint,
    without_tokenizer,
)
from tests.support.models.model_families import EOS_ID, MAX_LENGTH, VOCAB_SIZE


def test_a_loaded_model_says_what_the_engine_needs_to_know(served: Served):
    loaded = served("gemma2")

    assert loaded.eos_token_ids == {EOS_ID}
    assert (loaded.max_model_len, loaded.vocab_size) == (MAX_LENGTH, VOCAB_SIZE)
    assert loaded.dtype == torch.float64 and loaded.device == torch.device("cpu")
    assert not loaded.model.training
    layers = [(n.num_kv_heads, n.key_dim, n.value_dim) for n in loaded.kv_spec.layers]
    assert layers == [(2, 16, 16)] * 2
    assert [n.sliding_window for n in loaded.kv_spec.layers] == [8, None]


def test_keys_and_values_may_differ_in_size(served: Served):
    """DeepSeek-V3's keys are 16 + 8 wide, its values 12."""
    layer = served("deepseek_v3", "float32").kv_spec.layers[0]

    assert (layer.num_kv_heads, layer.key_dim, layer.value_dim) == (4, 24, 12)


def test_text_goes_to_ids_and_back_through_the_models_tokenizer(served: Served):
    tokenizer = served("llama").require_tokenizer()

    ids = tokenizer("The same prefix, another suffix.")["input_ids"]

    assert tokenizer.decode(ids) == "The same prefix, another suffix."


@pytest.mark.parametrize(
    ("name", "expected"),
    [("float32", torch.float32), ("bfloat16", torch.bfloat16), ("float16", torch.float16)],
)
def test_a_model_computes_in_the_dtype_asked_for(name, expected, checkpoints: Checkpoints):
    loaded = load_model(checkpoints.path("llama"), name)

    assert loaded.dtype == expected
    assert {p.dtype for p in loaded.model.parameters()} == {expected}


def test_auto_is_the_dtype_of_the_checkpoint(checkpoints: Checkpoints):
    assert load_model(checkpoints.path("qwen2")).dtype == torch.float32
    assert load_model(checkpoints.path("llama", dtype="bfloat16")).dtype == torch.bfloat16


def test_an_unknown_dtype_is_refused_with_the_choices():
    with pytest.raises(ConfigError, match=r"dtype='int8'.*bfloat16"):
        load_model("tiny-shakespeare", "int8")


def test_a_sharded_checkpoint_is_the_same_model(checkpoints: Checkpoints, tmp_path: Path):
    save_checkpoint(tmp_path / "shards", make_config("llama"), max_shard_size="50KB")
    assert len(weight_files(tmp_path / "shards")) > 2

    sharded, whole = (
        load_model(path, "float32") for path in (tmp_path / "shards", checkpoints.path("llama"))
    )
    assert has_same_weights(sharded, whole)


def test_the_embedded_model_is_found_by_its_name():
    assert EMBEDDED_MODELS == ("tiny-shakespeare",)
    loaded = load_model("tiny-shakespeare")

    assert loaded.tokenizer is not None and loaded.max_model_len >= 2048


@pytest.mark.parametrize(("given", "expected"), [([1, 5], {1, 5}), (None, set())])
def test_all_end_of_sequence_ids_are_known(checkpoints: Checkpoints, given: Any, expected: Any):
    assert load_model(checkpoints.path("llama", eos_token_id=given)).eos_token_ids == expected


def test_loading_prints_nothing(checkpoints: Checkpoints, capfd: pytest.CaptureFixture[str]):
    load_model(checkpoints.path("gpt2"))

    printed = capfd.readouterr()
    assert printed.out == "" and printed.err == ""


@pytest.mark.parametrize("name", ["./nowhere", "/nowhere/at/all", "~nobody/x", "a/b/c", ""])
def test_a_path_to_nowhere_is_not_asked_of_the_hub(name: str, monkeypatch: pytest.MonkeyPatch):
    def unreachable(*_: object, **__: object) -> None:
        pytest.fail("asked the hub")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", unreachable)

    with pytest.raises(ModelNotFound, match=r"no such directory.*tiny-shakespeare"):
        load_model(name)


def test_a_hub_that_cannot_be_reached_is_a_model_not_found(monkeypatch: pytest.MonkeyPatch):
    """The message says what was tried."""

    def unreachable(*_: object, **__: object) -> None:
        raise LocalEntryNotFoundError("Cannot reach the hub.\nMany more lines.")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", unreachable)

    with pytest.raises(ModelNotFound) as refusal:
        load_model("somebody/some-model")

    message = str(refusal.value)
    assert "somebody/some-model" in message and "tiny-shakespeare" in message
    assert "no directory" in message and "Cannot reach the hub." in message
    assert "Many more lines" not in message


def test_a_name_is_fetched_from_the_hub_without_pickles_and_code(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
):
    asked: dict[str, Any] = {}

    def fetch(name: str, revision: str | None, allow_patterns: list[str]) -> str:
        asked.update(name=name, patterns=allow_patterns)
        return str(checkpoints.path("llama"))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)

    assert resolve_model("somebody/some-model") == checkpoints.path("llama")
    assert asked["name"] == "somebody/some-model"
    assert not {"*.bin", "*.py", "*.pt", "*"} & set(asked["patterns"])


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("truncated", r"model\.safetensors .* is not a complete safetensors file"),
        ("missing shard", r"1 of \d+ weight files are missing: model-00002-of"),
        ("no weights", r"neither model\.safetensors nor"),
        ("missing weights", r"1 missing keys .* model\.layers\.1\.mlp\.up_proj\.weight"),
        ("unexpected weights", r"1 unexpected keys .* stranger"),
        ("mismatched weights", r"model\.norm\.weight|do not load"),
        ("no config", r"config\.json is missing"),
        ("corrupt config", r"config\.json is not valid JSON"),
        ("config without type", r"config\.json: has no model_type"),
        ("impossible config", r"config\.json is not understood.*hidden_size"),
        ("corrupt tokenizer", r"the tokenizer does not load"),
    ],
)
def test_a_broken_checkpoint_is_named_with_its_fault(fault, said, checkpoints: Checkpoints):
    with pytest.raises(BrokenCheckpoint, match=said):
        load_model(checkpoints.broken(fault))


def test_an_empty_directory_is_a_broken_checkpoint(tmp_path: Path):
    with pytest.raises(BrokenCheckpoint, match=r"config\.json is missing"):
        load_model(tmp_path)


def test_a_model_without_tokenizer_loads_and_says_so_when_text_is_needed(
    checkpoints: Checkpoints, tmp_path: Path
):
    bare = without_tokenizer(checkpoints.path("llama"), tmp_path / "bare")

    loaded = load_model(bare)

    assert loaded.tokenizer is None
    with pytest.raises(MissingTokenizer, match=r"tokenizer\.json.*token ids"):
        loaded.require_tokenizer()


def fingerprint_of(path: Path) -> bytes:
    return fingerprint(path, weight_files(path))


def test_a_fingerprint_is_of_the_content_not_of_names_or_times(
    served: Served, checkpoints: Checkpoints, tmp_path: Path
):
    original = checkpoints.path("llama")
    copied = Path(shutil.copytree(original, tmp_path / "elsewhere"))

    assert fingerprint_of(copied) == fingerprint_of(original) == served("llama").fingerprint


@pytest.mark.parametrize("file", ["config.json", "model.safetensors"])
def test_one_byte_changes_a_fingerprint(file: str, checkpoints: Checkpoints, tmp_path: Path):
    original = checkpoints.path("llama")
    changed = Path(shutil.copytree(original, tmp_path / "changed"))
    content = bytearray((changed / file).read_bytes())
    content[-2] ^= 1
    (changed / file).write_bytes(content)

    assert fingerprint_of(changed) != fingerprint_of(original)


def test_two_loads_share_nothing_and_know_the_same(checkpoints: Checkpoints):
    first, second = (load_model(checkpoints.path("qwen3")) for _ in range(2))

    assert isinstance(first, LoadedModel) and first.model is not second.model
    assert first.kv_spec == second.kv_spec and first.fingerprint == second.fingerprint
