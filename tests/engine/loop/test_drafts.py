"""Drafts in an engine: what they change besides time is counted, and nothing else changes."""

import asyncio
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ostinato import LLM, AsyncLLM, RequestOutput, SamplingParams
from ostinato.core.ids import SequenceId
from ostinato.drafts import drafter
from ostinato.engine.grammar.structured_outputs import StructuredOutputs
from ostinato.engine.loop import drafting
from ostinato.errors import ConfigError, InvalidSamplingParams
from ostinato.sched.sequence import Sequence
from ostinato.sched.step_planner import Drafts
from tests.support.engines import MakeLLM
from tests.support.instruction_sets import needs_library

pytestmark = needs_library

SETTINGS: dict[str, Any] = {"dtype": "float32", "block_size": 16, "num_blocks": 64}
LOOP = [5, 6, 7, 8, 9] * 8
FREE = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, detokenize=False)


class Oracle(Drafts):
    """Knows the answer, and is wrong from its ``num_right``-th guess on."""

    def __init__(self, answer: list[int], num_right: int, num_wrong: int = 0) -> None:
        self.answer, self.num_right, self.num_wrong = answer, num_right, num_wrong
        self.notes: list[tuple[int, int]] = []

    def propose(self, decoding: list[Sequence]) -> "dict[SequenceId, array[int]]":
        return {s.sequence_id: self._guess(s.num_output_tokens) for s in decoding}

    def note(self, sequence: Sequence, num_drafted: int, num_accepted: int) -> None:
        self.notes.append((num_drafted, num_accepted))

    def _guess(self, start: int) -> "array[int]":
        right = self.answer[start : start + self.num_right]
        return array("I", right + [1] * self.num_wrong)


@pytest.fixture(autouse=True)
def drafts_for_small_models(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let tiny models draft, at any price."""
    monkeypatch.setattr(drafting, "MIN_WEIGHT_BYTES", 0)
    monkeypatch.setattr(drafter, "rows_worth", lambda chances, *_: [n for _, n in chances])
    yield


def run(llm: LLM, prompt: list[int], params: SamplingParams = FREE) -> RequestOutput:
    [output] = llm.generate([prompt], params, use_tqdm=False)
    return output


def steps_of(llm: LLM, prompt: list[int], params: SamplingParams = FREE) -> int:
    """Steps that an answer takes."""
    before = llm.engine.scheduler_stats.num_steps
    run(llm, prompt, params)
    return llm.engine.scheduler_stats.num_steps - before


def test_right_drafts_take_fewer_steps_and_are_counted(make_llm: MakeLLM):
    """Thirty tokens: one with the prompt, then five per step where four drafts are right."""
    llm = make_llm("qwen3", **SETTINGS)
    answer = run(make_llm("qwen3", drafts="off", **SETTINGS), LOOP)
    oracle = llm.engine.scheduler.drafts = Oracle(answer.outputs[0].token_ids, num_right=4)
    assert steps_of(llm, LOOP) == 1 + 6
    output = run(llm, LOOP)
    assert output.outputs[0].token_ids == answer.outputs[0].token_ids
    assert sum(drafted for drafted, _ in oracle.notes) == 2 * output.num_drafted_tokens
    assert output.num_accepted_tokens == 29 - 6


def test_wrong_drafts_cost_rows_and_nothing_else(make_llm: MakeLLM):
    llm = make_llm("qwen3", **SETTINGS)
    answer = run(make_llm("qwen3", drafts="off", **SETTINGS), LOOP).outputs[0].token_ids
    llm.engine.scheduler.drafts = Oracle(answer, num_right=0, num_wrong=3)
    before = llm.engine.runner.num_tokens_computed
    assert run(llm, LOOP).outputs[0].token_ids == answer
    computed = llm.engine.runner.num_tokens_computed - before
    assert computed == len(LOOP) + 29, "wrong drafts are not tokens that were computed (law 1)"
    assert llm.engine.scheduler_stats.computed_output_tokens == 29


@pytest.mark.parametrize("num_right", [1, 3, 7])
def test_the_next_turn_hits_what_was_drafted(make_llm: MakeLLM, num_right: int):
    """All of prompt and answer but the last token, whose keys and values no step computed."""
    llm = make_llm("qwen3", **SETTINGS)
    answer = run(make_llm("qwen3", drafts="off", **SETTINGS), LOOP).outputs[0].token_ids
    llm.engine.scheduler.drafts = Oracle(answer, num_right, num_wrong=2)
    assert run(llm, LOOP).outputs[0].token_ids == answer
    follow_up = run(llm, [*LOOP, *answer, 11, 12])
    assert follow_up.num_cached_tokens == len(LOOP) + len(answer) - 1
    cold = run(make_llm("qwen3", drafts="off", **SETTINGS), [*LOOP, *answer, 11, 12])
    assert follow_up.outputs[0].token_ids == cold.outputs[0].token_ids


def test_a_stop_string_ends_an_answer_in_the_middle_of_right_drafts():
    """What follows the stop string was computed, and is neither in the answer nor in the cache."""
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    with LLM("tiny-shakespeare", dtype="float32", drafts="off", num_blocks=64) as plain:
        [free] = plain.generate(["ROMEO:"], params, use_tqdm=False)
        words = free.outputs[0].text.split()
        stopping = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, stop=[words[3]])
        [expected] = plain.generate(["ROMEO:"], stopping, use_tqdm=False)
    with LLM("tiny-shakespeare", dtype="float32", num_blocks=64) as llm:
        llm.engine.scheduler.drafts = Oracle(free.outputs[0].token_ids, num_right=15)
        [output] = llm.generate(["ROMEO:"], stopping, use_tqdm=False)
        assert output.outputs == expected.outputs
        assert output.outputs[0].stop_reason == words[3]
        ids = [*output.prompt_token_ids, *free.outputs[0].token_ids]
        [again] = llm.generate([{"prompt_token_ids": ids}], FREE, use_tqdm=False)
    num_tokens = len(output.prompt_token_ids) + len(output.outputs[0].token_ids)
    assert again.num_cached_tokens == num_tokens - 1


def test_a_grammar_drafts_what_it_forces():
    """Where an expression leaves no choice, its text comes in few steps."""
    form = StructuredOutputs(regex="My lord, (yes|no), I will go with thee to the garden(,|;) sir")
    params = SamplingParams(temperature=0, max_tokens=80, structured_outputs=form)
    answers = []
    for mode in ("off", "auto"):
        with LLM("tiny-shakespeare", dtype="float32", drafts=mode, num_blocks=64) as llm:
            [output] = llm.generate(["ROMEO:"], params, use_tqdm=False)
            answers.append(output.outputs[0])
            accepted = llm.engine.drafting.counts.accepted
    assert answers[0] == answers[1]
    assert "thee to the garden" in answers[1].text
    assert output.num_accepted_tokens > 0
    assert accepted["grammar"] > 0


def test_a_stream_gets_all_tokens_of_a_step_at_once():
    """As many pieces as steps, at most, which join to the answer without drafts."""

    async def pieces(mode: str) -> list[RequestOutput]:
        llm = AsyncLLM("tiny-shakespeare", dtype="float32", drafts=mode, num_blocks=64)
        params = SamplingParams(temperature=0, max_tokens=60, logprobs=1)
        outputs = [output async for output in llm.generate("To be, or not to be: ", params)]
        llm.shutdown()
        return outputs

    plain, drafted = (asyncio.run(pieces(mode)) for mode in ("off", "auto"))
    assert drafted[-1].outputs == plain[-1].outputs
    assert drafted[-1].num_accepted_tokens > 0
    assert len(drafted) <= 60 - drafted[-1].num_accepted_tokens, "a late reader takes several"


def test_a_request_may_go_without_drafts(make_llm: MakeLLM):
    llm = make_llm("qwen3", **SETTINGS)
    off = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, detokenize=False,
                         drafts="off")  # fmt: skip
    assert run(llm, LOOP, off).num_drafted_tokens == 0
    with pytest.raises(InvalidSamplingParams, match=r"drafts='never'.*'auto' or 'off'"):
        SamplingParams(drafts="never")


def test_a_recorded_engine_takes_one_token_per_step(make_llm: MakeLLM, tmp_path: Path):
    """A replay repeats the steps of a trace, and knows nothing of drafts."""
    llm = make_llm("qwen3", **SETTINGS)
    llm.start_recording(tmp_path / "trace")
    assert steps_of(llm, LOOP) == 30
    llm.stop_recording()


def test_models_whose_rows_may_differ_go_without(make_llm: MakeLLM):
    for family, settings, reason in (
        ("qwen3", {"attention": "torch"}, "other bits beside others"),
        ("qwen3_next", {}, "states"),
        ("qwen3", {"drafts": "off"}, "drafts='off'"),
    ):
        engine = make_llm(family, **{**SETTINGS, **settings}).engine
        assert reason in engine.drafting.why_not
        assert type(engine.scheduler.drafts) is Drafts


def test_vllms_drafts_from_text_are_these(make_llm: MakeLLM):
    config = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4}
    llm = make_llm("qwen3", speculative_config=config, **SETTINGS)
    assert llm.engine.config.drafts == "auto"
    with pytest.raises(ConfigError, match="speculative_config"):
        make_llm("qwen3", speculative_config={"method": "eagle", "model": "x"}, **SETTINGS)
    with pytest.raises(ConfigError, match="another name of drafts"):
        make_llm("qwen3", speculative_config={"method": "suffix"}, drafts="off", **SETTINGS)
