"""What requests sample with where they do not say."""

import json
import shutil
from pathlib import Path
from typing import Any

import gguf
import pytest

from ostinato import LLM, SamplingParams
from ostinato.engine.requests.read_defaults import read_defaults
from ostinato.engine.requests.sampling_params import GenerationDefaults
from ostinato.engine.settings.config import EngineConfig
from ostinato.errors import ConfigError
from ostinato.runner.checkpoints.fetched_models import FETCHED_MODELS
from tests.support.models.checkpoints import Checkpoints
from tests.support.models.gguf_files import save_gguf

OWN = {
    "temperature": 0.6,
    "top_p": 0.95,
    "top_k": 20,
    "min_p": None,
    "repetition_penalty": 1.05,
    "max_new_tokens": 7,
    "do_sample": True,
    "eos_token_id": [3, 4],
}
"""As a checkpoint has it."""

FILLED = {
    "temperature": 0.6, "top_p": 0.95, "top_k": 20, "repetition_penalty": 1.05, "max_tokens": 7
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a generation config."""
    (tmp_path / "generation_config.json").write_text(json.dumps(OWN))
    return tmp_path


def defaults(checkpoint: Path, **settings: Any) -> GenerationDefaults:
    return read_defaults(EngineConfig(model="m", **settings), checkpoint)


def test_a_checkpoints_values_are_the_defaults_and_nulls_are_none(folder: Path):
    assert defaults(folder).values == FILLED
    assert defaults(folder).eos_token_ids is None, "the loader reads the checkpoint's own"
    assert "temperature 0.6" in str(defaults(folder))
    assert "generation_config.json" in str(defaults(folder))


def test_vllm_reads_no_file_and_a_path_reads_another_one(folder: Path, tmp_path: Path):
    empty = tmp_path / "model"
    empty.mkdir()
    assert defaults(folder, generation_config="vllm").params() == SamplingParams()
    assert defaults(empty).params() == SamplingParams()
    for path in (folder, folder / "generation_config.json"):
        other = defaults(empty, generation_config=path)
        assert other.values == FILLED
        assert other.eos_token_ids == {3, 4}


def test_an_override_replaces_single_values_and_limits_answers(folder: Path):
    override = {"temperature": 0.1, "max_new_tokens": 5, "eos_token_id": 9}
    changed = defaults(folder, override_generation_config=override)
    assert changed.values == FILLED | {"temperature": 0.1, "max_tokens": 5}
    assert (changed.max_tokens, changed.eos_token_ids) == (5, {9})
    assert changed.fill(SamplingParams(max_tokens=50), {"max_tokens"}).max_tokens == 5
    assert changed.fill(SamplingParams(max_tokens=2), {"max_tokens"}).max_tokens == 2


def test_what_a_request_gives_wins_also_where_it_is_the_general_default(folder: Path):
    given = SamplingParams(temperature=1.0, top_p=0.5, max_tokens=50)
    filled = defaults(folder).fill(given, {"temperature", "top_p", "max_tokens"})
    assert (filled.temperature, filled.top_p, filled.top_k) == (1.0, 0.5, 20)
    assert filled.max_tokens == 50
    assert defaults(folder).fill(SamplingParams(max_tokens=None), set()).max_tokens == 7


def test_a_default_number_of_tokens_yields_to_a_requests_own_minimum(folder: Path):
    filled = defaults(folder).fill(SamplingParams(max_tokens=None, min_tokens=9), {"min_tokens"})
    assert (filled.min_tokens, filled.max_tokens) == (9, None)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"temperature": -1}', "temperature=-1.* override_generation_config"),
        ("[1]", "is not a JSON object: .* generation_config='vllm'"),
        ("{", "is not valid JSON"),
    ],
)
def test_a_broken_file_is_refused_with_a_way_out(tmp_path: Path, content: str, message: str):
    (tmp_path / "generation_config.json").write_text(content)
    with pytest.raises(ConfigError, match=message):
        defaults(tmp_path)
    assert defaults(tmp_path, generation_config="vllm").values == {}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"generation_config": "/no/such/file"}, "must be 'auto', 'vllm', a generation_config"),
        ({"generation_config": 5}, "generation_config=5: must be"),
        ({"override_generation_config": [1]}, "must be like {'temperature'"),
        ({"override_generation_config": {"temprature": 1}}, "'temprature' is none of temperature"),
        ({"override_generation_config": {"eos_token_id": "x"}}, "eos_token_id='x' must be an id"),
        ({"override_generation_config": {"top_p": 7}}, "top_p=7"),
    ],
)
def test_settings_that_name_no_config_are_refused(tmp_path: Path, settings: Any, message: str):
    with pytest.raises(ConfigError, match=message):
        defaults(tmp_path, **settings)


def test_a_gguf_file_has_llama_cpps_keys(
    checkpoints: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """They are read by the reader that loads the weights."""
    plain, file = tmp_path / "plain.gguf", tmp_path / "sampled.gguf"
    save_gguf(plain, checkpoints.path("qwen3"))
    assert defaults(plain).values == {}
    save_gguf(
        file,
        checkpoints.path("qwen3"),
        extra=lambda writer: (
            writer.add_float32("general.sampling.temp", 0.5),
            writer.add_int32("general.sampling.top_k", 40),
        ),
    )
    assert defaults(file).values == {"temperature": 0.5, "top_k": 40}
    with monkeypatch.context() as patched:  # gguf's own takes ten seconds for 150,000 words
        patched.delattr(gguf, "GGUFReader")
        assert defaults(file).values == {"temperature": 0.5, "top_k": 40}


def test_a_fetched_model_samples_as_its_page_recommends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("OSTINATO_MODELS", str(tmp_path))
    file = tmp_path / "smollm2.gguf"
    assert defaults(file).values == FETCHED_MODELS["smollm2"].sampling


def test_an_llm_samples_with_its_checkpoints_values(checkpoints: Checkpoints, tmp_path: Path):
    """``generate(None)`` takes ``get_default_sampling_params()``; a given object is whole."""
    path = tmp_path / "model"
    shutil.copytree(checkpoints.path("llama"), path)
    own = {"temperature": 0.0, "max_new_tokens": 5, "repetition_penalty": 1.5}
    (path / "generation_config.json").write_text(json.dumps(own))
    with LLM(path, dtype="float32", num_blocks=16) as llm:
        params = llm.get_default_sampling_params()
        assert (params.temperature, params.max_tokens, params.repetition_penalty) == (0, 5, 1.5)
        [by_default] = llm.generate([[5, 6, 7]], use_tqdm=False)
        [same] = llm.generate([[5, 6, 7]], params, use_tqdm=False)
        given = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
        [whole] = llm.generate([[5, 6, 7]], given, use_tqdm=False)
        params.max_tokens = 3  # type: ignore[misc]
        assert llm.get_default_sampling_params().max_tokens == 5, "each call has its own"
    assert by_default.outputs[0].token_ids == same.outputs[0].token_ids
    assert len(by_default.outputs[0].token_ids) <= 5
    assert len(whole.outputs[0].token_ids) == 9


def test_a_text_ends_at_the_ids_of_an_override(checkpoints: Checkpoints):
    greedy = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    path = checkpoints.path("llama")
    with LLM(path, dtype="float32", num_blocks=16) as llm:
        [plain] = llm.generate([[5, 6, 7]], greedy, use_tqdm=False)
    ids = plain.outputs[0].token_ids
    override = {"eos_token_id": [ids[3]]}
    with LLM(path, dtype="float32", num_blocks=16, override_generation_config=override) as llm:
        ending = SamplingParams(temperature=0, max_tokens=8)
        [ended] = llm.generate([[5, 6, 7]], ending, use_tqdm=False)
    assert ended.outputs[0].token_ids == ids[: ids.index(ids[3]) + 1]
