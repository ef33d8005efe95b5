"""Which tokens ``LLM.generate`` samples: seeds, continuations, biases, penalties, log-probs."""

from itertools import pairwise
from typing import Any

import pytest

from ostinato import LLM, SamplingParams
from tests.engine.api.llm_calls import GREEDY, PROMPTS, greedy, tokens_of
from tests.support.engines import MakeLLM
from tests.support.models.model_families import VOCAB_SIZE


def test_the_same_seed_gives_the_same_tokens_in_any_company(make_llm: MakeLLM):
    """Alone, among strangers, in chunks, cached, and after preemptions."""
    params = SamplingParams(seed=7, max_tokens=12, ignore_eos=True)
    others = SamplingParams(seed=8, max_tokens=12, ignore_eos=True)
    alone = tokens_of(make_llm("llama").generate([PROMPTS[0]], params, use_tqdm=False))[0]

    for settings in (
        {},
        {"max_num_batched_tokens": 5, "max_num_seqs": 3},
        {"num_blocks": 14},
        {"index": "hash", "num_blocks": 14},
    ):
        llm = make_llm("llama", **settings)
        batch = [*PROMPTS[1:4], PROMPTS[0], *PROMPTS[4:]]
        for _ in range(2):
            each = [params if prompt is PROMPTS[0] else others for prompt in batch]
            assert tokens_of(llm.generate(batch, each, use_tqdm=False))[3] == alone
        if "num_blocks" in settings:
            assert llm.engine.scheduler_stats.num_preemptions > 0


def test_other_seeds_give_other_tokens(llm: LLM):
    params = [SamplingParams(seed=seed, max_tokens=8, ignore_eos=True) for seed in range(6)]

    outputs = llm.generate([PROMPTS[0]] * 6, params, use_tqdm=False)

    assert len(set(map(tuple, tokens_of(outputs)))) == 6


def test_without_a_seed_the_engines_seed_decides(make_llm: MakeLLM):
    """Two runs of one program agree; two requests of one run do not."""
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    runs = [
        tokens_of(make_llm("llama", seed=seed).generate([PROMPTS[0]] * 2, params, use_tqdm=False))
        for seed in (1, 1, 2)
    ]

    assert runs[0] == runs[1]
    assert len(set(map(tuple, runs[0] + runs[2]))) == 4


def test_several_continuations_differ_and_the_first_is_the_seeds_own(llm: LLM):
    many = SamplingParams(n=5, seed=3, max_tokens=8, ignore_eos=True)
    one = SamplingParams(n=1, seed=3, max_tokens=8, ignore_eos=True)

    completions = llm.generate([PROMPTS[0]], many, use_tqdm=False)[0].outputs

    assert [completion.index for completion in completions] == list(range(5))
    assert len({tuple(completion.token_ids) for completion in completions}) == 5
    assert [completions[0].token_ids] == tokens_of(llm.generate([PROMPTS[0]], one, use_tqdm=False))


def test_more_continuations_than_seats_are_all_made(make_llm: MakeLLM):
    """Seven continuations for two seats and a small pool: who finds no room waits."""
    params = SamplingParams(n=7, seed=3, max_tokens=8, ignore_eos=True)
    roomy, narrow = make_llm("llama"), make_llm("llama", max_num_seqs=2, num_blocks=9)

    outputs = [llm.generate([PROMPTS[0]], params, use_tqdm=False)[0] for llm in (roomy, narrow)]

    one, other = ([completion.token_ids for completion in output.outputs] for output in outputs)
    assert one == other
    assert len(one) == 7


def test_the_most_likely_token_alone_is_greedy(llm: LLM):
    params = SamplingParams(top_k=1, temperature=2.0, seed=1, max_tokens=8, ignore_eos=True)

    assert tokens_of(llm.generate(PROMPTS, params, use_tqdm=False)) == tokens_of(
        llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    )


def test_a_bias_forces_and_forbids_tokens(llm: LLM):
    prompt, [favourite] = PROMPTS[0], greedy(llm, PROMPTS[0], max_tokens=1).token_ids

    assert greedy(llm, prompt, max_tokens=3, logit_bias={42: 100.0}).token_ids == [42] * 3
    forbidden = greedy(llm, prompt, max_tokens=1, logit_bias={favourite: -100.0})
    assert forbidden.token_ids != [favourite]


def test_penalties_count_what_was_generated(llm: LLM):
    """Log-probs come before penalties: so from them the choice can be made once more."""
    penalties = {"presence_penalty": 0.7, "frequency_penalty": 0.9}
    biases = dict.fromkeys(range(20, 24), 8.0)
    rest = {"max_tokens": 20, "ignore_eos": True, "logit_bias": biases, "logprobs": VOCAB_SIZE}

    completion = greedy(llm, PROMPTS[0], **penalties, **rest)

    def score(logprobs: dict[int, Any], token: int, before: list[int]) -> float:
        count = before.count(token)
        bias = 8.0 * (20 <= token < 24)
        return float(logprobs[token].logprob) + bias - 0.7 * (count > 0) - 0.9 * count

    assert completion.logprobs is not None
    for place, (token, logprobs) in enumerate(
        zip(completion.token_ids, completion.logprobs, strict=True)
    ):
        before = completion.token_ids[:place]
        assert token == max(logprobs, key=lambda t: score(logprobs, t, before))
    assert len(set(completion.token_ids)) > 3


def test_a_strong_repetition_penalty_forbids_what_was_seen(llm: LLM):
    penalty = {"repetition_penalty": 1e6}

    tokens = greedy(llm, PROMPTS[0], max_tokens=30, ignore_eos=True, **penalty).token_ids

    assert len({*tokens, *PROMPTS[0]}) == 30 + len(PROMPTS[0])


def test_log_probabilities_name_the_token_and_its_alternatives(llm: LLM):
    params = SamplingParams(seed=4, max_tokens=6, ignore_eos=True, logprobs=3, prompt_logprobs=2)

    output = llm.generate([PROMPTS[0]], params, use_tqdm=False)[0]
    completion = output.outputs[0]

    assert completion.logprobs is not None and output.prompt_logprobs is not None
    assert len(completion.logprobs) == 6
    for token, logprobs in zip(completion.token_ids, completion.logprobs, strict=True):
        assert next(iter(logprobs)) == token
        assert len(logprobs) == (3 if logprobs[token].rank <= 3 else 4)
        assert {1, 2, 3} <= {entry.rank for entry in logprobs.values()}
        best = sorted(logprobs.values(), key=lambda entry: entry.rank)
        assert all(one.logprob >= other.logprob for one, other in pairwise(best))
        assert all(entry.logprob < 0.0 for entry in best)
    mine = [lp[t].logprob for t, lp in zip(completion.token_ids, completion.logprobs, strict=True)]
    assert completion.cumulative_logprob == pytest.approx(sum(mine))

    assert output.prompt_logprobs[0] is None
    assert len(output.prompt_logprobs) == len(PROMPTS[0])
    for token, entry in zip(PROMPTS[0][1:], output.prompt_logprobs[1:], strict=True):
        assert entry is not None and next(iter(entry)) == token


def test_log_probabilities_say_what_tokens_read_like(bard: LLM):
    completion = greedy(bard, "ROMEO:", max_tokens=4, logprobs=0)

    assert completion.logprobs is not None
    pieces = [entry.decoded_token or "" for row in completion.logprobs for entry in row.values()]
    assert "".join(pieces) == completion.text
