"""How a checkpoint pools is read from the files of sentence-transformers."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedConfig

from ostinato import LLM, PoolingParams
from ostinato.engine.scoring.pooling import Pooling
from ostinato.errors import BrokenCheckpoint, ConfigError, InvalidSamplingParams, RequestError
from tests.engine.scoring.conftest import MakeHeaded

LAST = {"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False}
PROMPTS = {"prompts": {"query": "Instruct: find it\nQuery:", "document": ""}}


def modules(*kinds: str) -> list[dict[str, str]]:
    folders = {"Pooling": "1_Pooling"}
    return [
        {"type": f"sentence_transformers.models.{kind}", "path": folders.get(kind, "")}
        for kind in kinds
    ]


def write(path: Path, **files: Any) -> Path:
    (path / "1_Pooling").mkdir(exist_ok=True)
    names = {"pooling": "1_Pooling/config.json", "modules": "modules.json"}
    for name, content in files.items():
        place = names.get(name, "config_sentence_transformers.json")
        (path / place).write_text(json.dumps(content))
    return path


def test_a_checkpoint_without_these_files_pools_the_last_token_and_normalises(tmp_path: Path):
    assert Pooling.read(tmp_path, PreTrainedConfig()) == Pooling()
    assert Pooling().normalizes and not Pooling().is_embedder and not Pooling().refusal


def test_what_they_say_is_obeyed(tmp_path: Path):
    kinds = modules("Transformer", "Pooling")
    path = write(tmp_path, pooling=LAST, modules=kinds, prompts=PROMPTS)
    config = PreTrainedConfig(matryoshka_dimensions=[8, 16])

    pooling = Pooling.read(path, config)

    assert pooling.is_embedder and not pooling.refusal
    assert not pooling.normalizes, "there is no Normalize among the modules"
    assert pooling.dimensions == (8, 16)
    assert pooling.prompts == PROMPTS["prompts"]


@pytest.mark.parametrize(
    ("pooling", "kinds", "named"),
    [
        ({"pooling_mode_mean_tokens": True}, ("Transformer", "Pooling"), "'mean'"),
        ({"pooling_mode": "cls"}, ("Transformer", "Pooling"), "'cls'"),
        (LAST, ("Transformer", "Pooling", "Dense"), "Dense"),
    ],
)
def test_what_needs_all_hidden_states_or_another_layer_is_refused(
    tmp_path: Path, pooling: dict[str, Any], kinds: tuple[str, ...], named: str
):
    path = write(tmp_path, pooling=pooling, modules=modules(*kinds))

    assert named in Pooling.read(path, PreTrainedConfig()).refusal


def test_a_damaged_file_is_named(tmp_path: Path):
    (tmp_path / "modules.json").write_text("{")

    with pytest.raises(BrokenCheckpoint, match=r"modules\.json"):
        Pooling.read(tmp_path, PreTrainedConfig())


@pytest.fixture
def embedder(headed: MakeHeaded, tmp_path: Path) -> LLM:
    """An embedder with prompts by name, and lengths that it was trained for."""
    path = tmp_path / "embedder"
    shutil.copytree(headed("mistral", matryoshka_dimensions=[8, 16]), path)
    kinds = modules("Transformer", "Pooling", "Normalize")
    return LLM(str(write(path, pooling=LAST, modules=kinds, prompts=PROMPTS)), block_size=4)


def test_a_prompt_by_name_precedes_a_text(embedder: LLM):
    """As ``encode(..., prompt_name="query")`` of sentence-transformers does it."""
    [named] = embedder.embed("the bass", prompt_name="query", use_tqdm=False)
    [written] = embedder.embed(PROMPTS["prompts"]["query"] + "the bass", use_tqdm=False)

    assert named.outputs.embedding == pytest.approx(written.outputs.embedding, abs=1e-5)
    with pytest.raises(RequestError, match="query, document"):
        embedder.embed("the bass", prompt_name="other", use_tqdm=False)
    with pytest.raises(RequestError, match="texts"):
        embedder.embed([5, 6], prompt_name="query", use_tqdm=False)
    [score] = embedder.score("the bass", ["a tune"], use_tqdm=False)
    [tune] = embedder.embed("a tune", use_tqdm=False)
    pairs = zip(named.outputs.embedding, tune.outputs.embedding, strict=True)
    assert score.outputs.score == pytest.approx(sum(a * b for a, b in pairs), abs=1e-5)


def test_lengths_are_those_that_the_checkpoint_lists(embedder: LLM):
    for size, is_listed in ((8, True), (16, True), (48, True), (12, False), (64, False)):
        params = PoolingParams(dimensions=size)
        if is_listed:
            [output] = embedder.embed("a", pooling_params=params, use_tqdm=False)
            assert output.outputs.hidden_size == size
        else:
            with pytest.raises(InvalidSamplingParams, match="one of 8, 16"):
                embedder.embed("a", pooling_params=params, use_tqdm=False)


def test_a_mean_pooled_checkpoint_gives_no_embedding(headed: MakeHeaded, tmp_path: Path):
    path = tmp_path / "mean"
    shutil.copytree(headed("mistral"), path)
    llm = LLM(str(write(path, pooling={"pooling_mode_mean_tokens": True})), block_size=4)

    with pytest.raises(InvalidSamplingParams, match="last token"):
        llm.embed("a", use_tqdm=False)


@pytest.mark.parametrize(
    ("settings", "error", "named"),
    [
        ({"score_tokens": "yes"}, ConfigError, "score_tokens='yes'"),
        ({"score_tokens": "a,t", "score_template": "nowhere.jinja"}, ConfigError, "nowhere.jinja"),
    ],
)
def test_settings_of_scores_are_named(make_llm, settings, error, named: str):
    with pytest.raises(error, match=named):
        make_llm("llama", **settings).score("a", ["b"], use_tqdm=False)


def test_a_template_of_ones_own_puts_the_query_first(make_llm, tmp_path: Path):
    template = tmp_path / "pair.jinja"
    template.write_text("{{ instruction }}|{{ query }}|{{ document }}")
    llm = make_llm("llama", score_tokens="a,t", score_template=str(template))

    [output] = llm.score("one", ["two"], instruction="zero", use_tqdm=False)

    assert llm.get_tokenizer().decode(output.prompt_token_ids) == "zero|one|two"
    template.write_text("{{ query }}")
    with pytest.raises(ConfigError, match="both query and document"):
        make_llm("llama", score_tokens="a,t", score_template=str(template)).score(
            "a", ["b"], use_tqdm=False
        )
