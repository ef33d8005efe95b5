"""`/v1/completions` through OpenAI's own client."""

import openai
import pytest

from ostinato import SamplingParams
from ostinato.server.state import ServerState
from tests.server.conftest import continuation

MODEL = "tiny-shakespeare"
GREEDY = {"model": MODEL, "temperature": 0, "max_tokens": 12}


def test_the_text_is_what_the_engine_generates(client: openai.OpenAI, state: ServerState):
    answer = client.completions.create(prompt="ROMEO:\n", **GREEDY)

    assert answer.choices[0].text == continuation(state, "ROMEO:\n", 12)
    assert answer.choices[0].finish_reason == "length"
    assert (answer.object, answer.model) == ("text_completion", MODEL)
    assert answer.usage.prompt_tokens == 7
    assert answer.usage.completion_tokens == 12
    assert answer.usage.total_tokens == 19


def test_the_second_identical_call_reports_its_cached_tokens(client: openai.OpenAI):
    """Law 4: all but one token."""
    prompt = "A prompt that was never sent before, of some length."

    first = client.completions.create(prompt=prompt, **GREEDY)
    second = client.completions.create(prompt=prompt, **GREEDY)

    assert first.usage.prompt_tokens_details.cached_tokens < 5
    assert second.usage.prompt_tokens_details.cached_tokens == len(prompt) - 1
    assert first.choices[0].text == second.choices[0].text


def test_a_stream_adds_up_to_the_whole_text(client: openai.OpenAI):
    whole = client.completions.create(prompt="JULIET:\n", n=3, seed=5, model=MODEL, max_tokens=20)
    texts, reasons = {0: "", 1: "", 2: ""}, {}
    stream = client.completions.create(
        prompt="JULIET:\n", n=3, seed=5, model=MODEL, max_tokens=20, stream=True
    )
    for chunk in stream:
        assert chunk.usage is None
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            if choice.finish_reason:
                reasons[choice.index] = choice.finish_reason

    assert [texts[index] for index in range(3)] == [choice.text for choice in whole.choices]
    assert len(set(texts.values())) == 3
    assert reasons == {0: "length", 1: "length", 2: "length"}


def test_a_stream_ends_with_the_usage_if_asked_to(client: openai.OpenAI):
    stream = client.completions.create(
        prompt="To be", **GREEDY, stream=True, stream_options={"include_usage": True}
    )
    *chunks, last = list(stream)

    assert all(chunk.usage is None and chunk.choices for chunk in chunks)
    assert last.choices == []
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (5, 12)


@pytest.mark.parametrize("stream", [False, True])
def test_many_prompts_are_continued_apart(client: openai.OpenAI, state: ServerState, stream: bool):
    """Two texts, two continuations each: choice ``i * n + j``."""
    prompts = ["Good night", "Farewell"]
    answer = client.completions.create(prompt=prompts, n=2, **GREEDY, stream=stream)
    texts = {index: "" for index in range(4)}
    for chunk in answer if stream else [answer]:
        for choice in chunk.choices:
            texts[choice.index] += choice.text

    expected = [continuation(state, prompt, 12) for prompt in prompts for _ in range(2)]
    assert list(texts.values()) == expected


def test_prompts_may_be_token_ids(client: openai.OpenAI, state: ServerState):
    ids = [[13, 14, 15], [20, 21]]
    both = client.completions.create(prompt=ids, **GREEDY)
    one = client.completions.create(prompt=ids[1], **GREEDY)

    assert [choice.text for choice in both.choices] == [continuation(state, row, 12) for row in ids]
    assert one.choices[0].text == both.choices[1].text
    assert both.usage.prompt_tokens == 5


def test_a_stop_string_ends_the_text(client: openai.OpenAI):
    whole = client.completions.create(prompt="KING:\n", **GREEDY).choices[0].text
    stop = whole[4:6]
    choice = client.completions.create(prompt="KING:\n", **GREEDY, stop=[stop]).choices[0]

    assert choice.text == whole[: whole.index(stop)]
    assert choice.finish_reason == "stop"


def test_logprobs_name_each_token_and_its_alternatives(client: openai.OpenAI):
    choice = client.completions.create(prompt="To be", **GREEDY, logprobs=3).choices[0]

    assert "".join(choice.logprobs.tokens) == choice.text
    assert choice.logprobs.text_offset == list(range(12))
    for token, logprob, top in zip(
        choice.logprobs.tokens,
        choice.logprobs.token_logprobs,
        choice.logprobs.top_logprobs,
        strict=True,
    ):
        assert len(top) == 3
        assert top[token] == logprob == max(top.values())  # greedy


@pytest.mark.parametrize("stream", [False, True])
def test_echo_begins_with_the_prompt_and_its_logprobs(client: openai.OpenAI, stream: bool):
    """Streamed or not, the pieces add up to prompt and continuation."""
    plain = client.completions.create(prompt="To be", **GREEDY, logprobs=1).choices[0]
    answer = client.completions.create(
        prompt="To be", **GREEDY, logprobs=1, echo=True, stream=stream
    )
    choices = [c for chunk in (answer if stream else [answer]) for c in chunk.choices]
    tokens = [token for c in choices for token in c.logprobs.tokens]
    logprobs = [value for c in choices for value in c.logprobs.token_logprobs]
    offsets = [offset for c in choices for offset in c.logprobs.text_offset]

    assert "".join(c.text for c in choices) == "To be" + plain.text
    assert "".join(tokens) == "To be" + plain.text
    assert logprobs[0] is None and all(value <= 0 for value in logprobs[1:])
    assert logprobs[5:] == pytest.approx(plain.logprobs.token_logprobs, abs=1e-4)
    assert offsets == list(range(17))


def test_a_prompt_is_only_scored_with_echo_and_no_tokens(client: openai.OpenAI):
    answer = client.completions.create(
        prompt="To be", model=MODEL, max_tokens=0, echo=True, logprobs=1
    )

    assert answer.choices[0].text == "To be"
    assert answer.choices[0].logprobs.tokens == list("To be")
    assert answer.usage.completion_tokens == 0


def test_echo_of_token_ids_is_their_text(client: openai.OpenAI, state: ServerState):
    ids = state.llm.engine.loaded.require_tokenizer()("Ay me")["input_ids"]
    answer = client.completions.create(prompt=ids, **GREEDY, echo=True)

    assert answer.choices[0].text == "Ay me" + continuation(state, "Ay me", 12)


def test_a_seed_gives_the_same_text_and_penalties_another(client: openai.OpenAI):
    def text(**more: object) -> str:
        answer = client.completions.create(prompt="O", model=MODEL, seed=3, max_tokens=30, **more)
        return str(answer.choices[0].text)

    assert text() == text()
    assert text() != text(frequency_penalty=2.0)
    assert text() != text(presence_penalty=2.0)
    assert text() != text(extra_body={"repetition_penalty": 1.5})


def test_logit_bias_forbids_and_forces(client: openai.OpenAI, state: ServerState):
    [token] = state.llm.engine.loaded.require_tokenizer()("Q")["input_ids"]
    forced = client.completions.create(prompt="To be", **GREEDY, logit_bias={str(token): 100})

    assert forced.choices[0].text == "Q" * 12


def test_the_extras_of_vllm_do_what_they_say(client: openai.OpenAI, state: ServerState):
    likeliest = continuation(state, "To be", 12)
    [third] = state.llm.engine.loaded.require_tokenizer()(likeliest[2])["input_ids"]

    def answer(**extra: object) -> openai.types.CompletionChoice:
        return client.completions.create(
            prompt="To be", model=MODEL, max_tokens=12, extra_body=extra
        ).choices[0]

    assert answer(top_k=1).text == likeliest
    assert answer(min_p=1.0).text == likeliest
    assert (
        answer(top_k=1, stop_token_ids=[third]).text == likeliest[: likeliest.index(likeliest[2])]
    )
    held = answer(top_k=1, stop_token_ids=[third], min_tokens=6)
    assert held.finish_reason == "length" or len(held.text) >= 5
    assert answer(top_k=1, ignore_eos=True, priority=-3).text == likeliest


def test_the_engine_of_the_server_and_an_engine_alone_agree(
    client: openai.OpenAI, state: ServerState
):
    """Sampled with a seed: what comes through HTTP is what ``LLM`` would give."""
    params = SamplingParams(temperature=0.9, top_p=0.9, seed=11, max_tokens=16)
    expected = continuation(state, "ROMEO:\n", 16, params)
    answer = client.completions.create(
        prompt="ROMEO:\n", model=MODEL, temperature=0.9, top_p=0.9, seed=11, max_tokens=16
    )

    assert answer.choices[0].text == expected
