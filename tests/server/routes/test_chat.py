"""`/v1/chat/completions` through OpenAI's own client."""

from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from tokenizers import Tokenizer

import ostinato
from benchmarks.peers.workers.http_client import HttpClient
from ostinato import SamplingParams
from ostinato.server.config import ServerConfig
from ostinato.server.state import ServerState
from tests.support.servers.servers import serving

FOLDER = Path(ostinato.__file__).parent / "models" / "tiny-shakespeare"
MODEL = "tiny-shakespeare"
MESSAGES: Any = [{"role": "user", "content": "Who art thou, stranger?"}]
GREEDY: Any = {"model": MODEL, "messages": MESSAGES, "temperature": 0, "max_completion_tokens": 12}


async def test_the_answer_is_what_the_engine_says(client: openai.OpenAI, state: ServerState):
    answer = client.chat.completions.create(**GREEDY)
    greedy = SamplingParams(temperature=0, max_tokens=12)
    async for output in state.llm.chat(MESSAGES, greedy):
        last = output
    text, num_prompt_tokens = last.outputs[0].text, len(last.prompt_token_ids)

    assert (answer.object, answer.choices[0].message.role) == ("chat.completion", "assistant")
    assert answer.choices[0].message.content == text
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (num_prompt_tokens, 12)


def test_the_next_turn_finds_the_conversation_so_far(client: openai.OpenAI):
    """Law 1: the answer is part of the next prompt, and was computed already."""
    opening = {"role": "user", "content": "What news from Verona, and from Mantua?"}
    first = client.chat.completions.create(**{**GREEDY, "messages": [opening]})
    turns = [opening, first.choices[0].message.to_dict(), {"role": "user", "content": "And then?"}]
    second = client.chat.completions.create(**{**GREEDY, "messages": turns})

    assert first.usage is not None and second.usage is not None
    assert second.usage.prompt_tokens_details is not None
    cached = second.usage.prompt_tokens_details.cached_tokens
    assert cached is not None and cached >= first.usage.prompt_tokens + 11


def test_a_stream_begins_with_the_role_and_adds_up(client: openai.OpenAI):
    sampled = {"model": MODEL, "messages": MESSAGES, "seed": 4, "n": 2, "max_tokens": 15}
    whole = client.chat.completions.create(**sampled)
    options = {"stream": True, "stream_options": {"include_usage": True}}
    *chunks, last = list(client.chat.completions.create(**sampled, **options))
    deltas: dict[int, list[Any]] = {0: [], 1: []}
    for chunk in chunks:
        deltas[chunk.choices[0].index].append(chunk.choices[0])

    for index, pieces in deltas.items():
        assert pieces[0].delta.role == "assistant"
        assert [piece.delta.role for piece in pieces[1:]] == [None] * (len(pieces) - 1)
        text = "".join(piece.delta.content or "" for piece in pieces)
        assert text == whole.choices[index].message.content
        assert [p.finish_reason for p in pieces if p.finish_reason] == ["length"]
    assert last.choices == [] and last.usage.completion_tokens == 30
    assert len({chunk.id for chunk in [*chunks, last]}) == 1


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_come_with_bytes_and_so_many_alternatives(client: openai.OpenAI, stream: bool):
    answer = client.chat.completions.create(**GREEDY, logprobs=True, top_logprobs=2, stream=stream)
    choices = [choice for chunk in (answer if stream else [answer]) for choice in chunk.choices]
    entries = [e for choice in choices if choice.logprobs for e in choice.logprobs.content or ()]

    assert len(entries) == 12
    for entry in entries:
        assert bytes(entry.bytes).decode() == entry.token
        assert entry.top_logprobs[0].token == entry.token  # greedy
        assert len(entry.top_logprobs) == 2
        assert entry.top_logprobs[0].logprob >= entry.top_logprobs[1].logprob


def test_the_sampled_token_alone_has_its_logprob(client: openai.OpenAI):
    answer = client.chat.completions.create(**GREEDY, logprobs=True)

    assert answer.choices[0].logprobs is not None
    content = answer.choices[0].logprobs.content or []
    assert len(content) == 12 and all(entry.top_logprobs == [] for entry in content)


def test_parts_of_a_message_are_joined_and_the_developer_speaks_as_the_system(http: httpx.Client):
    def tokens(*messages: Any) -> list[int]:
        return (
            http.post("/tokenize", json={"messages": messages}).raise_for_status().json()["tokens"]
        )

    parts = [{"type": "text", "text": "Good "}, {"type": "text", "text": "night"}]
    assert tokens({"role": "user", "content": parts}) == tokens(
        {"role": "user", "content": "Good night"}
    )
    assert tokens({"role": "developer", "content": "x"}, *MESSAGES) == tokens(
        {"role": "system", "content": "x"}, *MESSAGES
    )


def test_the_benchmarks_client_streams_chats_and_hits_what_they_begin_with(state: ServerState):
    """OpenAI's client, as `benchmarks/peers` runs it: two chats of two turns, one system prompt."""
    tokenizer: Any = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
    system, ask = (tokenizer.encode(text).ids for text in ("Speak of the sea. " * 8, "And then?"))
    with serving(ServerState(state.llm, ServerConfig(model_names=("model",)))) as url:
        worker = HttpClient()
        worker.tokenizer, worker.port = tokenizer, int(url.rpartition(":")[2])
        served = worker.serve([[(system, 0), (ask, 4), (ask, 4)]] * 2)

    assert served.cached is not None and served.cached[-1] > len(system)
    assert served.tokens == [4] * 4
    for first, last in zip(served.first, served.last, strict=True):
        assert 0 < first <= last <= served.seconds
