"""Log-probabilities of a prompt's end are those of the whole prompt, behind a hit as well."""

import pytest

from ostinato import SamplingParams
from ostinato.errors import InvalidSamplingParams
from tests.exactness.conftest import ReferenceOf
from tests.exactness.reference import PROMPTS
from tests.exactness.test_logits import as_rows, assert_close
from tests.support.engines import MakeLLM
from tests.support.models.model_families import VOCAB_SIZE


def scored_from(start: int) -> SamplingParams:
    return SamplingParams(
        temperature=0.0,
        max_tokens=1,
        prompt_logprobs=VOCAB_SIZE,
        prompt_logprob_start=start,
        detokenize=False,
    )


@pytest.mark.one_case_in(3)
@pytest.mark.parametrize("family", ["llama", "gpt2", "mistral", "gemma2"])
@pytest.mark.parametrize("start", [2, 17, 25])
def test_the_end_of_a_prompt_is_scored_behind_a_hit(
    family: str, start: int, make_llm: MakeLLM, reference_of: ReferenceOf
):
    """In chunks of 11 tokens, cold and warm; the hit ends before the first that is scored."""
    llm = make_llm(family, max_num_batched_tokens=11, max_num_seqs=5)
    for attempt in range(2):
        outputs = llm.generate(PROMPTS, scored_from(start), use_tqdm=False)
        for output, prompt in zip(outputs, PROMPTS, strict=True):
            given = output.prompt_logprobs
            assert given is not None and len(given) == len(prompt)
            assert given[:start] == [None] * min(start, len(prompt))
            if start < len(prompt):
                reference = reference_of(family).logprobs(prompt)
                assert_close(as_rows(given), reference[start - 1 : -1])
            assert output.num_cached_tokens < start or start >= len(prompt)
        if attempt and family in ("llama", "gpt2"):
            assert [o.num_cached_tokens for o in outputs if len(o.prompt_token_ids) > start] == [
                start - 1 for prompt in PROMPTS if len(prompt) > start
            ]


def test_preempted_prompts_go_on_where_they_were(make_llm: MakeLLM, reference_of: ReferenceOf):
    """A pool of few blocks; what is known stays, and what follows is computed."""
    llm = make_llm("llama", num_blocks=14, max_num_batched_tokens=8, max_num_seqs=3)

    outputs = llm.generate(PROMPTS, scored_from(9), use_tqdm=False)

    for output, prompt in zip(outputs, PROMPTS, strict=True):
        assert output.prompt_logprobs is not None
        assert_close(as_rows(output.prompt_logprobs), reference_of("llama").logprobs(prompt)[8:-1])


def test_a_start_without_log_probabilities_is_refused():
    with pytest.raises(InvalidSamplingParams, match="prompt_logprob_start=5"):
        SamplingParams(prompt_logprob_start=5)
