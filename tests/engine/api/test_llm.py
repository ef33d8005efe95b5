"""The offline face: batches in, results in the field's familiar shape out."""

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest

from ostinato import LLM, SamplingParams
from ostinato.engine.loop.engine import Engine
from ostinato.engine.requests.prompts import Prompt
from ostinato.engine.settings.config import EngineConfig
from ostinato.errors import InvalidSamplingParams, RequestError
from tests.engine.api.llm_calls import GREEDY, PROMPTS, greedy, tokens_of
from tests.support.engines import MakeLLM
from tests.support.models.checkpoints import Checkpoints
from tests.support.models.model_families import EOS_ID

# --- results ---


def test_results_have_the_familiar_shape(bard: LLM):
    output = bard.generate("ROMEO:", GREEDY, use_tqdm=False)[0]
    completion = output.outputs[0]

    assert output.prompt == "ROMEO:"
    assert output.prompt_token_ids == bard.get_tokenizer()("ROMEO:")["input_ids"]
    assert (output.finished, output.error, output.num_cached_tokens) == (True, None, 0)
    assert (completion.index, completion.finish_reason, completion.stop_reason) == (
        0,
        "length",
        None,
    )
    assert completion.text == bard.get_tokenizer().decode(completion.token_ids)
    assert len(completion.token_ids) == 8
    assert completion.logprobs is completion.cumulative_logprob is output.prompt_logprobs is None


def test_moments_come_in_order(llm: LLM):
    timings = llm.generate(PROMPTS, GREEDY, use_tqdm=False)[-1].timings
    moments = (timings.arrival, timings.first_scheduled, timings.first_token, timings.finished)

    assert None not in moments
    assert list(moments) == sorted(moments)


def test_a_clock_may_start_at_zero(checkpoints: Checkpoints):
    """The first token comes at zero, and each later one a second later."""
    now_s = 0.0
    config = EngineConfig.of(checkpoints.path("llama"), {"num_blocks": 8})
    engine = Engine(config, clock=lambda: now_s)
    engine.add(engine.make_request(Prompt(token_ids=PROMPTS[0]), GREEDY))

    states = []
    while engine.has_work:
        states = engine.step()
        now_s += 1.0

    timings = states[0].output().timings
    assert (timings.first_token, timings.finished) == (0.0, 7.0)


def test_batches_may_run_in_other_threads(llm: LLM):
    """Signals belong to the main thread, and are left alone."""
    with ThreadPoolExecutor(1) as pool:
        ran = pool.submit(llm.generate, PROMPTS, GREEDY, use_tqdm=False)

    assert tokens_of(ran.result()) == tokens_of(llm.generate(PROMPTS, GREEDY, use_tqdm=False))


def test_outputs_come_in_the_order_of_the_prompts(llm: LLM):
    """The first runs longest, the last is served first."""
    lengths = range(9, 3, -1)
    params = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in lengths]

    outputs = llm.generate(PROMPTS, params, use_tqdm=False, priority=list(range(6, 0, -1)))

    assert [output.prompt_token_ids for output in outputs] == PROMPTS
    assert list(map(len, tokens_of(outputs))) == list(lengths)


def test_lower_priority_numbers_run_first(make_llm: MakeLLM):
    """One at a time: the order of the first steps is that of the priorities."""
    llm = make_llm("llama", max_num_seqs=1)

    outputs = llm.generate(PROMPTS[:4], GREEDY, use_tqdm=False, priority=[2, 0, 3, -1])

    starts = [output.timings.first_scheduled or 0.0 for output in outputs]
    assert sorted(range(4), key=starts.__getitem__) == [3, 1, 0, 2]


@pytest.mark.parametrize("count", [0, 1, 7])
def test_one_setting_for_all_or_one_per_prompt(count: int, llm: LLM):
    with pytest.raises(
        RequestError, match=f"{count} sampling_params for 6 prompts: give one for all"
    ):
        llm.generate(PROMPTS, [GREEDY] * count, use_tqdm=False)
    with pytest.raises(RequestError, match=f"{count} priority for 6 prompts"):
        llm.generate(PROMPTS, GREEDY, use_tqdm=False, priority=[1] * count)


@pytest.mark.parametrize(
    "params", [{"max_tokens": 5}, 5, "greedy", {}, [None], [{"max_tokens": 5}], [[GREEDY]]]
)
def test_what_is_no_sampling_params_is_refused(params: Any, llm: LLM):
    with pytest.raises(InvalidSamplingParams, match="must be SamplingParams"):
        llm.generate([PROMPTS[0]], params, use_tqdm=False)


@pytest.mark.parametrize("priority", ["high", 1.5, [None], ["a"], float("nan")])
def test_a_priority_is_an_integer(priority: Any, llm: LLM):
    with pytest.raises(RequestError, match=r"priority=.*: must be an integer"):
        llm.generate([PROMPTS[0]], GREEDY, use_tqdm=False, priority=priority)


def test_progress_is_shown_on_stderr(llm: LLM, capsys: pytest.CaptureFixture[str]):
    """Prefill and decode tokens per second, and the share of cached tokens."""
    llm.generate(PROMPTS[:1] * 2, GREEDY)

    out, err = capsys.readouterr()
    assert out == ""
    assert "Generating: 100%" in err
    assert "2/2" in err
    assert "prefill " in err and "decode " in err and "tok/s" in err
    assert "cached 36.4%" in err  # two blocks of 4, among 22 tokens


def test_no_progress_is_shown_unasked(llm: LLM, capfd: pytest.CaptureFixture[str]):
    llm.generate(PROMPTS, GREEDY, use_tqdm=False)

    assert capfd.readouterr() == ("", "")


# --- where texts end ---


def test_a_stop_string_ends_the_text_wherever_tokens_end(bard: LLM):
    """Every token is one character, so each of these stop strings spans several."""
    text = greedy(bard, "ROMEO:\n", max_tokens=40).text
    stop = text[17:22]
    assert stop not in text[:17]

    stops = {"max_tokens": 40, "stop": [stop, "zzz"]}
    outputs = [
        greedy(bard, "ROMEO:\n", **stops, include_stop_str_in_output=keep) for keep in (False, True)
    ]

    assert [output.text for output in outputs] == [text[:17], text[:22]]
    for output in outputs:
        assert (output.finish_reason, output.stop_reason) == ("stop", stop)
        assert len(output.token_ids) == 22


def test_text_that_might_have_become_a_stop_string_is_let_go_at_the_end(bard: LLM):
    """The stop string is the rest of the text and something more."""
    text = greedy(bard, "ROMEO:\n", max_tokens=12).text

    output = greedy(bard, "ROMEO:\n", max_tokens=12, stop=text[8:] + "\x00")

    assert (output.text, output.finish_reason) == (text, "length")


def test_no_stop_string_counts_below_min_tokens(bard: LLM):
    text = greedy(bard, "ROMEO:\n", max_tokens=60).text
    first, second = (text.index("e", start) for start in (0, text.index("e") + 1))

    output = greedy(bard, "ROMEO:\n", max_tokens=60, stop="e", min_tokens=first + 1)

    assert output.text == text[:second]


def test_a_stop_id_ends_the_text_and_is_no_part_of_it(bard: LLM):
    plain = greedy(bard, "ROMEO:\n", max_tokens=8)
    end = plain.token_ids[5]
    cut = plain.token_ids.index(end)

    for keep in (False, True):
        stops = {"stop_token_ids": [end], "include_stop_str_in_output": keep}
        output = greedy(bard, "ROMEO:\n", max_tokens=8, **stops)

        assert output.token_ids == plain.token_ids[: cut + 1]
        assert output.text == plain.text[: cut + keep]
        assert (output.finish_reason, output.stop_reason) == ("stop", end)


def test_the_end_of_sequence_waits_for_min_tokens_and_may_be_ignored(llm: LLM):
    """A bias makes the end of sequence the first choice in every step."""
    run = partial(greedy, llm, PROMPTS[0], max_tokens=6, logit_bias={EOS_ID: 100.0})
    at_once, later, ignored = run(), run(min_tokens=3), run(ignore_eos=True)

    assert (at_once.token_ids, at_once.finish_reason) == ([EOS_ID], "stop")
    assert at_once.stop_reason is None and at_once.text == ""
    assert EOS_ID not in later.token_ids[:3]
    assert (later.token_ids[3:], later.finish_reason) == ([EOS_ID], "stop")
    assert (ignored.token_ids, ignored.finish_reason) == ([EOS_ID] * 6, "length")
    assert ignored.text == ""
    assert run(ignore_eos=True, skip_special_tokens=False).text == "<eos>" * 6


def test_one_continuation_may_end_before_the_others(llm: LLM):
    params = SamplingParams(n=6, seed=2, max_tokens=30, stop_token_ids=list(range(3, 30)))

    completions = llm.generate([PROMPTS[0]], params, use_tqdm=False)[0].outputs

    lengths = {len(completion.token_ids) for completion in completions}
    assert len(lengths) > 2
    for completion in completions:
        assert (completion.finish_reason == "stop") == (completion.token_ids[-1] < 30)


# --- the cache, as callers steer it ---


def test_another_salt_finds_nothing(llm: LLM):
    """The same ids under three names: each finds its own, and none another's."""
    asked = [{"prompt_token_ids": PROMPTS[0], "cache_salt": salt} for salt in ("", "a", "b")]

    for expected in (0, 10):
        outputs = [llm.generate(prompt, GREEDY, use_tqdm=False)[0] for prompt in asked]
        assert [output.num_cached_tokens for output in outputs] == [expected] * 3
        assert len(set(map(tuple, tokens_of(outputs)))) == 1


def test_salts_do_not_share_within_a_step_either(llm: LLM):
    asked = [{"prompt_token_ids": PROMPTS[0], "cache_salt": salt} for salt in "abab"]

    outputs = llm.generate(asked, GREEDY, use_tqdm=False)

    assert [output.num_cached_tokens for output in outputs] == [0, 0, 8, 8]


def test_reading_and_writing_are_opted_out_of_apart(llm: LLM):
    ids = PROMPTS[0]
    steps = [
        ({"prompt_token_ids": ids, "cache_write": False}, 0),
        ({"prompt_token_ids": ids}, 0),
        ({"prompt_token_ids": ids, "cache_read": False}, 0),
        ({"prompt_token_ids": ids, "cache_write": False}, 10),
        ({"prompt_token_ids": ids}, 10),
    ]
    for prompt, expected in steps:
        assert llm.generate(prompt, GREEDY, use_tqdm=False)[0].num_cached_tokens == expected


def test_counters_are_of_first_admissions(make_llm: MakeLLM):
    llm = make_llm("llama")
    for _ in range(2):
        llm.generate(PROMPTS[:1], GREEDY, use_tqdm=False)

    first = llm.cache_stats.first
    assert (first.num_requests, first.query_tokens, first.hit_tokens) == (2, 22, 10)
    assert first.hit_ratio == pytest.approx(10 / 22)
