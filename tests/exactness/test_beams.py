"""Beam search: the answers of ``transformers``, whatever was cached, shared or preempted."""

from collections.abc import Sequence

import pytest
from transformers import PreTrainedModel

from ostinato import BeamSearchParams
from ostinato.engine.api.beam_api import BeamSearchOutput
from tests.exactness.conftest import ReferenceOf
from tests.exactness.reference import PROMPTS
from tests.support.engines import MakeLLM
from tests.support.models.references import generate

NUM_NEW = 8


def searched(
    model: PreTrainedModel, prompt: Sequence[int], params: BeamSearchParams, ends: Sequence[int]
) -> tuple[list[list[int]], list[float]]:
    """Return the answers of ``transformers`` with their scores, the best first."""
    whole = generate(
        model,
        prompt,
        params.max_tokens,
        ends,
        num_beams=params.beam_width,
        num_return_sequences=params.beam_width,
        length_penalty=params.length_penalty,
        early_stopping=params.early_stopping,
        return_dict_in_generate=True,
        output_scores=True,
    )
    answers = []
    for row in whole.sequences[:, len(prompt) :].tolist():
        end = next((i + 1 for i, token in enumerate(row) if token in ends), len(row))
        answers.append(row[:end])
    return answers, whole.sequences_scores.tolist()


def assert_same(
    output: BeamSearchOutput,
    model: PreTrainedModel,
    prompt: Sequence[int],
    params: BeamSearchParams,
    ends: Sequence[int] = (),
) -> None:
    answers, scores = searched(model, prompt, params, ends)
    assert [s.tokens[len(prompt) :] for s in output.sequences] == answers
    own = [
        s.cum_logprob / (len(s.tokens) - len(prompt)) ** params.length_penalty
        for s in output.sequences
    ]
    assert own == pytest.approx(scores, rel=1e-5)  # transformers adds up in float32


def params_of(width: int, **changes) -> BeamSearchParams:
    return BeamSearchParams(
        beam_width=width, **{"max_tokens": NUM_NEW, "include_stop_str_in_output": True, **changes}
    )


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "gemma2"])
@pytest.mark.parametrize("width", [2, 6])
def test_the_beams_of_transformers(
    family: str, width: int, make_llm: MakeLLM, reference_of: ReferenceOf
):
    """Cold and all at once, then with hits; windows as well."""
    llm, params = make_llm(family), params_of(width, ignore_eos=True)

    cold = llm.beam_search(PROMPTS, params)
    warm = llm.beam_search(PROMPTS, params)

    for output, again, prompt in zip(cold, warm, PROMPTS, strict=True):
        assert_same(output, reference_of(family).model, prompt, params)
        assert [s.tokens for s in again.sequences] == [s.tokens for s in output.sequences]
        assert again.num_cached_tokens >= len(prompt) - 4


@pytest.mark.one_case_in(3)
@pytest.mark.parametrize("early_stopping", [True, False, "never"])
@pytest.mark.parametrize("length_penalty", [-1.5, 0.0, 1.0, 2.0])
def test_answers_that_end_before_others(
    early_stopping, length_penalty: float, make_llm: MakeLLM, reference_of: ReferenceOf
):
    """A tenth of the vocabulary ends an answer, so that searches stop at different lengths."""
    ends = list(range(4, 104, 10))
    llm = make_llm("llama", config={"eos_token_id": ends})
    params = params_of(4, length_penalty=length_penalty, early_stopping=early_stopping)

    outputs = llm.beam_search(PROMPTS, params)

    for output, prompt in zip(outputs, PROMPTS, strict=True):
        assert_same(output, reference_of("llama").model, prompt, params, ends)
    lengths = {len(s.tokens) for output in outputs for s in output.sequences}
    assert len(lengths) > 2


def test_beams_in_a_pool_that_is_too_small_for_them(make_llm: MakeLLM, reference_of: ReferenceOf):
    llm, params = make_llm("llama", num_blocks=15), params_of(6, ignore_eos=True)

    outputs = llm.beam_search(PROMPTS, params)

    for output, prompt in zip(outputs, PROMPTS, strict=True):
        assert_same(output, reference_of("llama").model, prompt, params)
    assert llm.engine.scheduler_stats.num_preemptions > 0


def test_beams_behind_a_recurrent_state_are_computed_again(
    make_llm: MakeLLM, reference_of: ReferenceOf
):
    """A state cannot be forked between two tokens, so that beams go on from what is kept."""
    llm, params = make_llm("qwen3_next"), params_of(3, ignore_eos=True)

    outputs = llm.beam_search(PROMPTS[:2], params)

    for output, prompt in zip(outputs, PROMPTS, strict=False):
        assert_same(output, reference_of("qwen3_next").model, prompt, params)


def test_the_prompt_is_computed_once_for_all_beams(make_llm: MakeLLM):
    llm, prompt = make_llm("llama"), PROMPTS[0]
    before = llm.engine.runner.num_tokens_computed

    llm.beam_search([prompt], params_of(6, ignore_eos=True))

    rows = llm.engine.runner.num_tokens_computed - before
    assert rows == len(prompt) + 6 * (NUM_NEW - 1)


@pytest.mark.parametrize("width", [2, 7])
def test_hits_and_companions_leave_the_bits_of_beams(width: int, isa: str, make_llm: MakeLLM):
    """In float32, by the native library: alone, beside others, and with hits."""
    llm = make_llm("llama", dtype="float32", block_size=16, num_blocks=128)
    params, prompt = params_of(width, ignore_eos=True, max_tokens=24), PROMPTS[0]

    [alone] = llm.beam_search([prompt], params)
    [warm] = llm.beam_search([prompt], params)
    llm.reset_prefix_cache()
    beside = llm.beam_search([PROMPTS[1], prompt, PROMPTS[2]], params)[1]

    assert warm.num_cached_tokens >= 32
    assert alone.sequences == warm.sequences == beside.sequences
