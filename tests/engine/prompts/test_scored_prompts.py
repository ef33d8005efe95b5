"""Prompts whose every token is scored: what they have in common is looked up, and hits."""

from ostinato import SamplingParams
from ostinato.engine.requests import scored_prompts
from tests.support.engines import MakeLLM

SCORED = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1)
CONTEXT = "To be, or not to be, that is the question: " * 2


def scored(llm, text: str, params: SamplingParams = SCORED, **prompt):
    [output] = llm.generate([{"prompt": text, **prompt}], params, use_tqdm=False)
    return output


def test_choices_that_echo_their_prompt_hit_and_keep_the_bits(make_llm: MakeLLM):
    """As lm-evaluation-harness asks: one request per choice, each with the whole prompt."""
    llm, fresh = (make_llm("llama", dtype="float32", block_size=16) for _ in range(2))
    choices = ["whether", "where", "x"]

    outputs = [scored(llm, CONTEXT + choice) for choice in choices]

    assert outputs[0].num_cached_tokens == 0
    for output, choice in zip(outputs[1:], choices[1:], strict=True):
        assert output.num_cached_tokens >= 0.7 * len(output.prompt_token_ids)
        fresh.reset_prefix_cache()
        assert output.prompt_logprobs == scored(fresh, CONTEXT + choice).prompt_logprobs
    again = scored(llm, CONTEXT + choices[0])
    assert again.prompt_logprobs == outputs[0].prompt_logprobs
    assert again.num_cached_tokens == len(again.prompt_token_ids) - 1


def test_what_is_known_belongs_to_a_tenant_and_is_erased_with_it(make_llm: MakeLLM):
    llm = make_llm("llama", dtype="float32")
    scored(llm, CONTEXT, cache_salt="ann")

    assert scored(llm, CONTEXT, cache_salt="bob").num_cached_tokens == 0
    assert scored(llm, CONTEXT, cache_salt="ann").num_cached_tokens > 0
    llm.erase("ann")
    assert scored(llm, CONTEXT, cache_salt="ann").num_cached_tokens == 0


def test_more_alternatives_than_are_known_are_computed(make_llm: MakeLLM):
    llm = make_llm("llama", dtype="float32")
    scored(llm, CONTEXT)
    more = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=3)

    first = scored(llm, CONTEXT, more)
    fewer = scored(llm, CONTEXT)

    assert first.num_cached_tokens == 0
    assert {len(row) for row in first.prompt_logprobs[1:]} <= {3, 4}
    assert fewer.num_cached_tokens == len(fewer.prompt_token_ids) - 1
    assert {len(row) for row in fewer.prompt_logprobs[1:]} <= {1, 2}


def test_evicted_blocks_are_computed_again_and_their_scores_stay(make_llm: MakeLLM):
    llm = make_llm("llama", dtype="float32")
    first = scored(llm, CONTEXT)
    llm.engine.cache.admin.reset()

    second = scored(llm, CONTEXT)

    assert second.num_cached_tokens == 0
    assert second.prompt_logprobs == first.prompt_logprobs


def test_what_is_kept_is_bounded(make_llm: MakeLLM, monkeypatch):
    monkeypatch.setattr(scored_prompts, "MAX_PROMPTS", 2)
    llm = make_llm("llama", dtype="float32")
    for salt in ("a", "b", "c"):
        scored(llm, CONTEXT, cache_salt=salt)

    assert scored(llm, CONTEXT, cache_salt="a").num_cached_tokens == 0
    assert scored(llm, CONTEXT, cache_salt="c").num_cached_tokens > 0


def test_without_a_cache_no_scored_prompt_is_kept(make_llm: MakeLLM, monkeypatch):
    """Else a second request would compute a part of the logits alone, and count no hit."""
    llm, kept = make_llm("llama", dtype="float32", enable_prefix_caching=False), []
    monkeypatch.setattr(
        scored_prompts.ScoredPrompts, "note", lambda _, *scored: kept.append(scored)
    )
    scored(llm, CONTEXT)

    assert kept == []
