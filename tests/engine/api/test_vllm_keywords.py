"""Programs written for vLLM: what means the same works, the rest is refused with a way out."""

import asyncio
from typing import Any

import numpy as np
import pytest

from ostinato import LLM, AsyncLLM, SamplingParams
from ostinato.engine.requests.prompts import Prompt
from ostinato.engine.requests.sampling_params import RequestOutputKind
from ostinato.errors import InvalidSamplingParams, RequestError, UnsupportedCall
from tests.engine.api.llm_calls import greedy
from tests.engine.loop.stepping import async_llm, last
from tests.support.engines import MakeLLM
from tests.support.models.checkpoints import Checkpoints
from tests.support.models.model_families import VOCAB_SIZE

PROMPT = list(range(3, 30))


def params(**changes: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": 6, "ignore_eos": True, **changes})


def ids_of(llm: LLM, prompt: Any = PROMPT, **changes: Any) -> list[int]:
    return greedy(llm, prompt, **{"max_tokens": 6, "ignore_eos": True, **changes}).token_ids


# --- sampling ---


def test_the_second_argument_has_vllms_name(llm: LLM):
    [output] = llm.generate(prompts=[PROMPT], sampling_params=params(), use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 6


@pytest.mark.parametrize(
    ("spelled", "plain"),
    [
        ({"top_k": -1}, {"top_k": 0}),
        ({"seed": -1}, {"seed": None}),
        ({"best_of": 1}, {}),
        ({"best_of": None, "logits_processors": None, "extra_args": None}, {}),
        ({"bad_words": None, "stop": None, "logit_bias": None}, {}),
        ({"spaces_between_special_tokens": True, "flat_logprobs": False}, {}),
        ({"use_beam_search": False, "length_penalty": 1.0, "early_stopping": False}, {}),
        ({"guided_decoding": None, "skip_clone": True, "thinking_token_budget": None}, {}),
    ],
)
def test_parameters_that_ask_for_nothing_special_are_accepted(spelled, plain):
    assert SamplingParams(**spelled) == SamplingParams(**plain)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"best_of": 3}, "best_of=3 is not supported: .* cumulative_logprob"),
        ({"logits_processors": [print]}, "logits_processors=.* use logit_bias, allowed_token_ids"),
        ({"extra_args": {"a": 1}}, "extra_args={'a': 1} is not supported: there are no sampling"),
        ({"guided_decoding": "x"}, "use structured_outputs=StructuredOutputs"),
        ({"use_beam_search": True}, r"call beam_search\(\)"),
        ({"max_token": 5}, "there is no keyword 'max_token': did you mean 'max_tokens'"),
        ({"temprature": 5}, "did you mean 'temperature'"),
        ({"best_off": 5}, "did you mean 'best_of'"),
        ({"output_kind": "delta"}, "output_kind='delta': must be a RequestOutputKind"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens=0 leaves no prompt"),
        ({"truncate_prompt_tokens": -2}, "must be an integer, from -1 to"),
        ({"truncate_prompt_tokens": 10**20}, "must be an integer, from -1 to 2147483647"),
        ({"allowed_token_ids": []}, "allowed_token_ids is empty"),
        ({"bad_words": [""]}, "bad_words='': must be a string that is not empty"),
        ({"bad_words_ids": [[]]}, "bad_words_ids has an empty row"),
    ],
)
def test_parameters_that_cannot_be_had_are_refused_with_a_way_out(given, message):
    with pytest.raises(InvalidSamplingParams, match=message):
        SamplingParams(**given)


def test_parameters_can_be_changed_and_are_checked_at_once(llm: LLM):
    """A copy stays as it is, and so does what a refused value would have replaced."""
    mutable: Any = llm.get_default_sampling_params()
    copied = mutable.clone()
    mutable.max_tokens, mutable.stop = 3, "end"

    assert (mutable.max_tokens, mutable.stop) == (3, ("end",))
    assert copied == SamplingParams()
    for name, value in (("max_tokens", 0), ("max_token", 5)):
        with pytest.raises(InvalidSamplingParams, match="max_tokens"):
            setattr(mutable, name, value)
    assert mutable.max_tokens == 3


def test_a_request_keeps_the_parameters_that_it_came_with(llm: LLM):
    """The heart reads them in every step."""
    mutable: Any = params()
    request = llm.engine.make_request(Prompt(token_ids=PROMPT), mutable)
    mutable.max_tokens = 99
    assert request.params.max_tokens == 6


def test_a_conversation_is_returned_as_the_text_that_the_template_made(bard: LLM):
    messages = [{"role": "user", "content": "Who art thou?"}]
    [output] = bard.chat(messages, params(), use_tqdm=False)
    assert bard.get_tokenizer()(output.prompt)["input_ids"] == output.prompt_token_ids


def test_a_reset_says_whether_it_did(llm: LLM):
    ids_of(llm)
    assert llm.reset_prefix_cache() is True

    llm.engine.add(llm.engine.make_request(Prompt(token_ids=PROMPT), params()))
    llm.engine.step()
    assert llm.reset_prefix_cache() is False
    while llm.engine.step():
        pass


def test_only_allowed_tokens_are_generated(llm: LLM):
    free = ids_of(llm, max_tokens=12)
    allowed = [7, 11, 200]

    assert not set(free) <= set(allowed)
    assert set(ids_of(llm, max_tokens=12, allowed_token_ids=allowed)) <= set(allowed)
    drawn = ids_of(llm, temperature=1.0, seed=3, max_tokens=12, allowed_token_ids=allowed)
    assert set(drawn) <= set(allowed)
    assert ids_of(llm, allowed_token_ids=list(range(VOCAB_SIZE))) == free[:6]


def test_allowed_tokens_of_one_request_leave_the_others_alone(llm: LLM):
    alone = ids_of(llm)
    both = llm.generate([PROMPT, PROMPT], [params(allowed_token_ids=[5]), params()], use_tqdm=False)
    assert [output.outputs[0].token_ids for output in both] == [[5] * 6, alone]


def test_allowed_tokens_that_are_all_banned_end_the_request_with_the_reason(
    checkpoints: Checkpoints,
):
    llm = LLM(checkpoints.path("llama", eos_token_id=2), dtype="float64", num_blocks=32)
    with pytest.raises(Exception, match="allowed_token_ids, bad_words and min_tokens together"):
        ids_of(llm, allowed_token_ids=[2], min_tokens=3, ignore_eos=False)


def test_a_bad_word_is_not_generated(bard: LLM):
    """The model would say it; the token that would complete it is not drawn."""
    usual = greedy(bard, "ROMEO:", max_tokens=40).text
    word = max(usual.split(), key=len)

    other = greedy(bard, "ROMEO:", max_tokens=40, bad_words=[word]).text

    assert word in usual and word not in other
    assert other.startswith(usual[: usual.index(word) + len(word) - 1])


def test_a_row_of_bad_ids_is_broken_at_its_last_token(llm: LLM):
    usual = ids_of(llm)
    other = ids_of(llm, bad_words_ids=[usual[1:4], [usual[0], usual[0]]])

    assert other[:3] == usual[:3] and other[3] != usual[3]


def test_a_bad_word_of_one_token_is_banned_everywhere_and_in_both_spellings(make_llm: MakeLLM):
    """``word`` and `` word`` are two tokens of a byte-level tokenizer."""
    llm = make_llm("llama", num_blocks=64)
    tokenizer = llm.get_tokenizer()
    pairs = [
        (plain[0], spaced[0], word)
        for word in ("the", "a", "in", "o", "e")
        for plain, spaced in [
            [tokenizer(s + word, add_special_tokens=False)["input_ids"] for s in ("", " ")]
        ]
        if len(plain) == len(spaced) == 1 and plain != spaced
    ]
    request = llm.engine.make_request(
        Prompt(token_ids=PROMPT), params(bad_words=[word for _, _, word in pairs])
    )
    rows = request.params.bad_words_ids
    assert pairs, "no word of the tokenizer has two spellings"
    assert list(rows) == [(token,) for plain, spaced, _ in pairs for token in (plain, spaced)]


def test_all_log_probabilities_of_a_small_vocabulary(llm: LLM):
    [output] = llm.generate(PROMPT, params(logprobs=-1, prompt_logprobs=-1), use_tqdm=False)
    rows = output.outputs[0].logprobs or []
    prompt_rows = output.prompt_logprobs or []

    assert [len(row) for row in rows] == [VOCAB_SIZE] * 6
    assert {len(row or {}) for row in prompt_rows[1:]} == {VOCAB_SIZE}
    assert np.exp([entry.logprob for entry in rows[0].values()]).sum() == pytest.approx(1)


def test_more_log_probabilities_than_the_limit_are_refused(make_llm: MakeLLM):
    llm = make_llm("llama", num_blocks=16, max_logprobs=20)
    assert len(llm.generate(PROMPT, params(logprobs=20), use_tqdm=False)) == 1

    for asked, said in ((21, "logprobs=21: "), (-1, "logprobs=-1 is the vocabulary of 320: ")):
        with pytest.raises(InvalidSamplingParams, match=f"{said}at most 20 .* max_logprobs"):
            ids_of(llm, logprobs=asked)


def test_a_prompt_is_cut_at_its_beginning(llm: LLM):
    expected = ids_of(llm, PROMPT[-10:])

    [output] = llm.generate(PROMPT, params(truncate_prompt_tokens=10), use_tqdm=False)

    assert output.prompt_token_ids == PROMPT[-10:]
    assert output.outputs[0].token_ids == expected
    assert ids_of(llm, truncate_prompt_tokens=99) == ids_of(llm)


def test_a_cut_text_keeps_what_the_tokenizer_puts_before_it(llm: LLM):
    """A beginning-of-sequence id stays and counts."""
    text = "the cat sat on the mat and looked at the moon"
    whole = llm.get_tokenizer()(text)["input_ids"]
    bare = llm.get_tokenizer()(text, add_special_tokens=False)["input_ids"]
    num_added = len(whole) - len(bare)

    [output] = llm.generate(text, params(truncate_prompt_tokens=8), use_tqdm=False)

    assert output.prompt_token_ids == whole[:num_added] + bare[num_added - 8 :]
    assert llm.get_tokenizer()(text)["input_ids"] == whole


def test_minus_one_cuts_a_prompt_to_what_leaves_room_for_the_answer(make_llm: MakeLLM):
    llm = make_llm("llama", num_blocks=32, max_model_len=32)
    [output] = llm.generate(list(range(3, 90)), params(truncate_prompt_tokens=-1), use_tqdm=False)
    assert output.prompt_token_ids == list(range(3, 90))[-26:]
    assert (len(output.outputs[0].token_ids), output.outputs[0].finish_reason) == (6, "length")


def test_a_request_may_skip_the_cache(llm: LLM):
    ids_of(llm)
    [skipped] = llm.generate(PROMPT, params(skip_reading_prefix_cache=True), use_tqdm=False)
    [usual] = llm.generate(PROMPT, params(), use_tqdm=False)

    assert (skipped.num_cached_tokens, usual.num_cached_tokens) == (0, 26)


async def stream(llm: AsyncLLM, kind: RequestOutputKind, **changes: Any) -> list[Any]:
    wanted = params(output_kind=kind, logprobs=1, **changes)
    return [output async for output in llm.generate(PROMPT, wanted)]


@pytest.mark.parametrize("n", [1, 3])
def test_a_stream_holds_what_its_output_kind_asks_for(checkpoints: Checkpoints, n: int):
    async def run() -> tuple[list[Any], ...]:
        with async_llm(checkpoints) as llm:
            drawn = {"n": n, "temperature": 1.0, "seed": 5}
            return tuple([await stream(llm, kind, **drawn) for kind in RequestOutputKind])

    cumulative, deltas, final = asyncio.run(run())

    assert len(final) == 1 and final[0].finished
    for index, whole in enumerate(cumulative[-1].outputs):
        parts = [o for output in deltas for o in output.outputs if o.index == index]
        assert final[0].outputs[index] == whole
        assert "".join(part.text for part in parts) == whole.text
        assert [token for part in parts for token in part.token_ids] == whole.token_ids
        assert [row for part in parts for row in part.logprobs] == whole.logprobs
        assert [part.finish_reason for part in parts if part.finished] == ["length"]


def test_a_stream_of_a_text_is_cut_and_spared_bad_words_as_offline(bard: LLM):
    text = "ROMEO: " + "To be, or not to be. " * 4
    wanted = params(max_tokens=24, truncate_prompt_tokens=30, bad_words=["the", "a"])
    [offline] = bard.generate(text, wanted, use_tqdm=False)
    llm = AsyncLLM("tiny-shakespeare", dtype="float32", num_blocks=64)
    try:
        streamed = asyncio.run(last(llm.generate(text, wanted)))
    finally:
        llm.shutdown()

    assert len(offline.prompt_token_ids) == 30
    assert streamed.prompt_token_ids == offline.prompt_token_ids
    assert streamed.outputs[0].text == offline.outputs[0].text


def test_offline_outputs_are_complete_whatever_their_kind(llm: LLM):
    for kind in RequestOutputKind:
        assert len(ids_of(llm, output_kind=kind)) == 6


# --- calls and outputs ---


@pytest.mark.parametrize("name", ["sleep", "encode", "reward"])
def test_methods_that_only_vllm_has_are_refused_by_name(name: str, llm: LLM):
    """``hasattr`` says the truth, and the error says what to use."""
    with pytest.raises(UnsupportedCall, match=rf"LLM\.{name} is not served: .*") as caught:
        getattr(llm, name)("text")

    assert caught.type.__name__ == "UnsupportedCall" and not hasattr(llm, name)


def test_a_method_that_no_engine_has_is_an_ordinary_mistake(llm: LLM):
    with pytest.raises(AttributeError, match="'LLM' object has no attribute 'generat'"):
        llm.generat  # type: ignore[attr-defined]  # noqa: B018


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"lora_request": object()}, "must be a LoRARequest"),
        ({"tokenization_kwargs": {"truncation": True}}, "truncate_prompt_tokens"),
        ({"tqdm": True}, "there is no keyword 'tqdm': did you mean 'use_tqdm'"),
    ],
)
def test_arguments_that_cannot_be_had_are_refused(given: dict[str, Any], message: str, llm: LLM):
    assert llm.generate([PROMPT], params(), use_tqdm=False, lora_request=None, priority=None)
    with pytest.raises(RequestError, match=message):
        llm.generate([PROMPT], params(), **given)


def test_a_conversation_takes_tools_and_what_its_template_reads(llm: LLM):
    template = "{% for t in tools or [] %}{{ t.function.name }}{% endfor %}{{ mood }}!"
    tool = {"type": "function", "function": {"name": "dice", "parameters": {}}}
    [output] = llm.chat(
        [{"role": "user", "content": "hi"}],
        params(),
        use_tqdm=False,
        chat_template=template,
        tools=[tool],
        chat_template_kwargs={"mood": "gay"},
    )
    assert llm.get_tokenizer().decode(output.prompt_token_ids).endswith("dicegay!")


def test_the_last_message_may_be_continued(llm: LLM):
    template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}[end]{% endfor %}"
    [output] = llm.chat(
        [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "well"}],
        params(),
        use_tqdm=False,
        chat_template=template,
        add_generation_prompt=False,
        continue_final_message=True,
    )
    assert llm.get_tokenizer().decode(output.prompt_token_ids).endswith("[assistant]well")


def test_metrics_have_vllms_names(llm: LLM):
    [output] = llm.generate(PROMPT, params(n=2), use_tqdm=False)
    metrics, timings = output.metrics, output.timings

    assert (metrics.arrival_time, metrics.queued_ts) == (timings.arrival, timings.arrival)
    assert metrics.scheduled_ts == timings.first_scheduled
    assert metrics.first_token_ts == timings.first_token
    assert metrics.last_token_ts == timings.last_token == timings.finished
    assert metrics.first_token_latency == timings.time_to_first_token
    assert metrics.num_generation_tokens == 12
