"""Every API's conversations find all tokens of their earlier turns, through a server.

A random model at temperature 1, whose answers no tokenizer would write as it does.
"""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from ostinato import AsyncLLM
from ostinato.server.config import ServerConfig
from ostinato.server.state import ServerState
from tests.support.checkpoints import Checkpoints, checkpoints
from tests.support.conversations import WORDS, num_shown, talking_checkpoint
from tests.support.servers import await_idle, serving

__all__ = ["checkpoints"]

NUM_TURNS = 6
LETTERS = {"structured_outputs": {"regex": "[a-z ]{50}"}}
"""An answer without special tokens, which would not be part of its text."""


@pytest.fixture(scope="module")
def state(checkpoints: Checkpoints) -> Iterator[ServerState]:
    llm = AsyncLLM(str(talking_checkpoint(checkpoints)), num_blocks=512)
    yield ServerState(llm, ServerConfig(model_names=("random",)))
    llm.shutdown()


@pytest.fixture
def http(state: ServerState) -> Iterator[httpx.Client]:
    with serving(state) as url, httpx.Client(base_url=url, timeout=60) as client:
        yield client
    await_idle(state.llm)


def post(client: httpx.Client, path: str, body: dict[str, Any]) -> dict[str, Any]:
    answer = client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


class Chat:
    """``/v1/chat/completions``: the client sends all messages each time."""

    def __init__(self, **more: Any) -> None:
        self.messages: list[dict[str, str]] = []
        self.more = more
        self.num_kept = 0

    def ask(self, client: httpx.Client, text: str, seed: int) -> tuple[int, int, int]:
        """Return prompt tokens, those of them that hit, and tokens of the answer that are shown."""
        self.messages.append({"role": "user", "content": text})
        body = {"messages": self.messages, "max_tokens": 10, "return_token_ids": True}
        sampling = {"seed": seed, "allowed_token_ids": list(WORDS), "model": "random"}
        answer = post(client, "/v1/chat/completions", {**body, **sampling, **self.more})
        [choice], usage = answer["choices"], answer["usage"]
        content = choice["message"]["content"]
        self.messages.append({"role": "assistant", "content": content})
        details = usage["prompt_tokens_details"]
        self.num_kept = details.get("kept_tokens", 0)
        shown = num_shown(content, choice["token_ids"])
        return usage["prompt_tokens"], details["cached_tokens"], shown


class Messages(Chat):
    """``/v1/messages``."""

    def ask(self, client: httpx.Client, text: str, seed: int) -> tuple[int, int, int]:
        self.messages.append({"role": "user", "content": text})
        body = {"messages": self.messages, "max_tokens": 10, "seed": seed, "model": "random"}
        answer = post(client, "/v1/messages", {**body, **LETTERS, **self.more})
        content, usage = answer["content"], answer["usage"]
        self.messages.append({"role": "assistant", "content": content[0]["text"]})
        cached, self.num_kept = usage["cache_read_input_tokens"], usage.get("kept_tokens", 0)
        total = usage["input_tokens"] + cached + usage["cache_creation_input_tokens"]
        return total, cached, usage["output_tokens"]


class Responses(Chat):
    """``/v1/responses``: the server remembers what was said."""

    previous: str | None = None

    def ask(self, client: httpx.Client, text: str, seed: int) -> tuple[int, int, int]:
        body = {"input": text, "max_output_tokens": 10, "model": "random", "temperature": 1.0}
        answer = post(
            client,
            "/v1/responses",
            {**body, **LETTERS, "previous_response_id": self.previous, **self.more},
        )
        self.previous, usage = answer["id"], answer["usage"]
        details = usage["input_tokens_details"]
        cached, self.num_kept = details["cached_tokens"], details.get("kept_tokens", 0)
        return usage["input_tokens"], cached, usage["output_tokens"]


def num_missed(client: httpx.Client, talk: Chat) -> int:
    """Hold a conversation, and count tokens of earlier turns that missed, but the last (law 4)."""
    known, missed = 0, 0
    for turn in range(NUM_TURNS):
        prompt, cached, answer = talk.ask(client, f"What about {turn}?", turn)
        missed += max(0, known - 1 - cached)
        known = prompt + answer
    return missed


@pytest.mark.parametrize("talk", [Chat, Messages, Responses])
def test_every_turn_hits_all_tokens_of_those_before_it(http: httpx.Client, talk: type[Chat]):
    """And usage tells how many tokens came back as they were generated."""
    kept = talk()
    assert num_missed(http, kept) == 0
    assert kept.num_kept == 10 * (NUM_TURNS - 1)


@pytest.mark.parametrize("talk", [Chat, Messages, Responses])
def test_on_request_every_text_is_tokenized_anew(http: httpx.Client, talk: type[Chat]):
    """Then turns miss, where the answers are random enough."""
    anew = talk(keep_tokens=False)
    num_lost = num_missed(http, anew)
    assert anew.num_kept == 0
    assert num_lost > 10 or talk is not Chat


def test_tokenize_shows_the_tokens_that_the_next_turn_would_have(http: httpx.Client):
    talk = Chat()
    talk.ask(http, "What is kept?", 1)
    body = {"messages": talk.messages, "add_generation_prompt": False}
    kept = post(http, "/tokenize", body)["tokens"]
    anew = post(http, "/tokenize", {**body, "keep_tokens": False})["tokens"]
    text = post(http, "/detokenize", {"tokens": kept})["prompt"]
    assert kept != anew and text == post(http, "/detokenize", {"tokens": anew})["prompt"]
