"""How a checkpoint pools is read from the files of sentence-transformers."""

import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModel, PreTrainedConfig

from ostinato import LLM, PoolingParams
from ostinato.engine.scoring.pooling import Pooling
from ostinato.errors import BrokenCheckpoint, ConfigError, InvalidSamplingParams, RequestError
from tests.engine.scoring.conftest import MakeHeaded, reference
from tests.exactness.reference import PROMPTS as TOKENS
from tests.exactness.test_logits import TOLERANCE
from tests.support.engines import assert_idle

LAST = {"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False}
PROMPTS = {"prompts": {"query": "Instruct: find it\nQuery:", "document": ""}}


def modules(*kinds: str) -> list[dict[str, Any]]:
    folders = {"Pooling": "1_Pooling"}
    return [
        {
            "idx": index,
            "name": str(index),
            "type": f"sentence_transformers.models.{kind}",
            "path": folders.get(kind, ""),
        }
        for index, kind in enumerate(kinds)
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
        ({"pooling_mode": "mean", "include_prompt": False}, ("Pooling",), "without its prompt"),
        ({"pooling_mode": "cls"}, ("Transformer", "Pooling"), "'cls'"),
        (LAST, ("Transformer", "Pooling", "Dense"), "Dense"),
    ],
)
def test_what_is_pooled_otherwise_or_needs_another_layer_is_refused(
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


@pytest.fixture
def averaging(headed: MakeHeaded, tmp_path: Path) -> Path:
    """A checkpoint that pools the mean of all tokens."""
    shutil.copytree(headed("mistral"), tmp_path / "mean")
    return write(tmp_path / "mean", pooling={"pooling_mode_mean_tokens": True})


def test_a_mean_is_of_all_hidden_states_and_reads_no_block(averaging: Path):
    """Hidden states of a cached prefix are not kept; the explanation says why nothing hit."""
    llm = LLM(str(averaging), dtype="float64", block_size=4)
    model = reference(AutoModel, averaging)
    with torch.inference_mode():
        states = [model(torch.tensor([ids])).last_hidden_state[0] for ids in TOKENS]

    for _ in range(2):  # the second time, the blocks of the first are there
        outputs = llm.embed(TOKENS, pooling_params=PoolingParams(normalize=False), use_tqdm=False)
        for output, rows in zip(outputs, states, strict=True):
            expected = rows.mean(0).tolist()
            assert output.outputs.embedding == pytest.approx(expected, abs=TOLERANCE)
            assert output.num_cached_tokens == 0
    assert "pooling='mean'" in str(llm.explain(outputs[0].request_id))
    assert_idle(llm.engine)


def test_a_mean_has_the_same_bits_however_its_prompt_is_cut(
    averaging: Path, monkeypatch: pytest.MonkeyPatch
):
    """In chunks of four tokens, whole, beside others, and preempted in the middle."""
    whole = LLM(str(averaging), block_size=16)
    cut = LLM(str(averaging), block_size=16, max_num_batched_tokens=4, max_num_seqs=2)
    prompt, *others = TOKENS
    steps = itertools.count()

    [expected] = whole.embed([prompt], use_tqdm=False)
    beside = whole.embed([*others, prompt], use_tqdm=False)[-1]
    [in_chunks] = cut.embed([prompt], use_tqdm=False)
    plan, scheduler = cut.engine.scheduler.plan, cut.engine.scheduler

    def interrupted(*arguments: Any):
        if next(steps) == 3:
            scheduler.preempt_all()
        return plan(*arguments)

    monkeypatch.setattr(scheduler, "plan", interrupted)
    [preempted] = cut.embed([prompt], use_tqdm=False)

    assert scheduler.stats.num_preemptions == 1
    assert beside.outputs == in_chunks.outputs == preempted.outputs == expected.outputs


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
    with pytest.raises(RequestError, match="instruction=5: must be a text"):
        llm.score("one", ["two"], instruction=5, use_tqdm=False)

    assert llm.get_tokenizer().decode(output.prompt_token_ids) == "zero|one|two"
    template.write_text("{{ query }}")
    with pytest.raises(ConfigError, match="both query and document"):
        make_llm("llama", score_tokens="a,t", score_template=str(template)).score(
            "a", ["b"], use_tqdm=False
        )
