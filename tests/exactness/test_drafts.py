"""Drafts change the time of an answer and nothing else: tokens and log-probabilities to the bit.

Each scene runs twice, with one token per step and with drafts: the engine's own sources, or one
whose guesses are drawn at random, right ones among them. Formats, samplers, penalties, grammars,
forks, preemption and stop strings are drawn.
"""

import random
from array import array
from typing import Any

import pytest

from ostinato import RequestOutput, SamplingParams
from ostinato.core.ids import SequenceId
from ostinato.drafts import drafter
from ostinato.engine.loop import drafting
from ostinato.sched.sequence import Sequence
from ostinato.sched.step_planner import Drafts
from tests.exactness.test_bits import FORMATS, MODELS
from tests.support.engines import MakeLLM
from tests.support.instruction_sets import needs_library
from tests.support.models.model_families import MAX_LENGTH, VOCAB_SIZE

pytestmark = needs_library

PLAIN = [("qwen3", "bfloat16"), ("qwen3", "int8"), ("qwen3", "int4"), ("qwen3", "int8-kv"),
         ("llama", "float32"), ("mistral", "w4a8"), ("gemma2", "bfloat16")]  # fmt: skip


class RightAndWrong(Drafts):
    """A source that knows the answers, and mixes in what is drawn."""

    def __init__(self, rng: random.Random, answers: dict[tuple[int, ...], list[int]]) -> None:
        self.rng, self.answers = rng, answers
        self.num_accepted = 0

    def propose(self, decoding: list[Sequence]) -> "dict[SequenceId, array[int]]":
        return {s.sequence_id: self._guess(s) for s in decoding if self.rng.random() < 0.8}

    def note(self, sequence: Sequence, num_drafted: int, num_accepted: int) -> None:
        self.num_accepted += num_accepted

    def _guess(self, sequence: Sequence) -> "array[int]":
        answer = self.answers.get((*sequence.request.prompt_token_ids, -1, sequence.index), [])
        rest = answer[sequence.num_output_tokens :][: self.rng.randint(0, 9)]
        wrong = [self.rng.randrange(VOCAB_SIZE) for _ in range(self.rng.randint(0, 3))]
        return array("I", rest + wrong)


@pytest.fixture(autouse=True)
def drafts_for_small_models(monkeypatch: pytest.MonkeyPatch):
    """Let tiny models draft, at any price."""
    monkeypatch.setattr(drafting, "MIN_WEIGHT_BYTES", 0)
    monkeypatch.setattr(drafter, "rows_worth", lambda chances, *_: [n for _, n in chances])


def draw_prompt(rng: random.Random) -> list[int]:
    """A prompt that repeats itself, or a stranger."""
    text = [rng.randrange(3, VOCAB_SIZE) for _ in range(rng.randint(1, 40))]
    return (text * 4)[: rng.randint(1, 100)]


def draw_params(rng: random.Random) -> SamplingParams:
    """Sampling parameters of all kinds."""
    return SamplingParams(
        temperature=rng.choice([0.0, 0.0, 0.3, 0.9]),
        seed=rng.randrange(99),
        top_p=rng.choice([1.0, 0.8]),
        top_k=rng.choice([0, 5]),
        min_p=rng.choice([0.0, 0.05]),
        presence_penalty=rng.choice([0.0, 0.0, 0.5]),
        frequency_penalty=rng.choice([0.0, 0.0, 0.3]),
        repetition_penalty=rng.choice([1.0, 1.0, 1.2]),
        logit_bias=rng.choice([{}, {}, {7: 2.0}]),
        bad_words_ids=rng.choice([(), (), ((5,), (9, 11))]),
        logprobs=rng.choice([None, 0, 3]),
        n=rng.choice([1, 1, 1, 2]),
        min_tokens=rng.choice([0, 3]),
        max_tokens=rng.randint(3, 40),
        stop_token_ids=rng.choice([(), (8, 12)]),
        ignore_eos=rng.choice([True, False]),
        detokenize=False,
    )


def essence(outputs: list[RequestOutput]) -> list[Any]:
    """All of an answer that must not change."""
    return [
        [(c.token_ids, c.finish_reason, c.stop_reason, c.logprobs, c.cumulative_logprob)
         for c in output.outputs]
        for output in outputs
    ]  # fmt: skip


def compare(make_llm: MakeLLM, model: str, numbers: str, rng: random.Random, count: int) -> int:
    """Run some prompts with and without drafts; returns how many drafts were right."""
    prompts = [draw_prompt(rng) for _ in range(count)]
    params = [draw_params(rng) for _ in prompts]
    window = {"sliding_window": rng.choice([7, 40])} if model in ("mistral", "gemma2") else {}
    common = {"config": {**MODELS.get(model, {}), **window}, **FORMATS[numbers]}
    pool = {
        "block_size": 16,
        "num_blocks": rng.choice([2, 3, 8]) * (MAX_LENGTH // 16) + 2,
        "max_num_seqs": rng.choice([4, 16]),
        "max_num_batched_tokens": rng.choice([24, 100, 2048]),
    }
    plain = make_llm(model, drafts="off", **pool, **common)
    expected = plain.generate(prompts, params, use_tqdm=False)
    drafted = make_llm(model, **pool, **common)
    assert not drafted.engine.drafting.why_not
    known = {
        (*prompt, -1, index): output.outputs[index].token_ids
        for prompt, output in zip(prompts, expected, strict=True)
        for index in range(len(output.outputs))
    }
    source = RightAndWrong(rng, known)
    for drafts in (drafted.engine.scheduler.drafts, source):
        drafted.engine.scheduler.drafts = drafts
        assert essence(drafted.generate(prompts, params, use_tqdm=False)) == essence(expected)
        drafted.engine.cache.check()
    return source.num_accepted


@pytest.mark.parametrize(("model", "numbers"), PLAIN)
def test_answers_are_the_same_bits_with_and_without_drafts(
    make_llm: MakeLLM, model: str, numbers: str
):
    rng = random.Random(f"{model} {numbers}")
    assert compare(make_llm, model, numbers, rng, 20) > 100


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("numbers", FORMATS)
def test_ten_thousand_answers_are_the_same_bits(make_llm: MakeLLM, numbers: str, seed: int):
    """Seven formats, twenty seeds, three rounds of 28 prompts: 11,760."""
    rng = random.Random(f"{numbers} {seed}")
    accepted = [
        compare(make_llm, rng.choice(["qwen3", "llama", "mistral", "gemma2"]), numbers, rng, 28)
        for _ in "abc"
    ]
    assert sum(accepted) > 300
