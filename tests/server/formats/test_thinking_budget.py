"""A bound on reasoning: after so many tokens its end is forced, through every API that has one."""

import asyncio
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from ostinato import AsyncLLM
from ostinato.server.config import ServerConfig
from ostinato.server.state import ServerState
from tests.support.servers.servers import serving

ASK = [{"role": "user", "content": "How is the weather?"}]


@pytest.fixture(scope="module")
def url(marked: AsyncLLM) -> Iterator[str]:
    settings = ServerConfig(model_names=("scribe",), reasoning_parser="qwen3")
    with serving(ServerState(marked, settings)) as address:
        yield address


def post(url: str, path: str, **more: Any) -> httpx.Response:
    body = {"model": "scribe", "messages": ASK, "max_tokens": 40, "temperature": 0, **more}
    return httpx.post(f"{url}{path}", json=body, timeout=60)


def closing(llm: AsyncLLM) -> int:
    [token] = asyncio.run(llm.encode("</think>"))
    return token


@pytest.mark.parametrize("budget", [0, 1, 7])
def test_the_mark_follows_so_many_tokens_of_reasoning(url: str, marked: AsyncLLM, budget: int):
    """In each of two continuations, and usage counts the mark besides them."""
    answer = post(
        url, "/v1/chat/completions", thinking_token_budget=budget, n=2, return_token_ids=True,
        temperature=1.0, seed=3, logit_bias={str(closing(marked)): -100}, ignore_eos=True,
    ).json()  # fmt: skip
    for choice in answer["choices"]:
        ids = choice["token_ids"]
        assert [place for place, token in enumerate(ids) if token == closing(marked)] == [budget]
    details = answer["usage"]["completion_tokens_details"]
    assert details["reasoning_tokens"] == (2 * (budget + 1) if budget else 0)


def test_reasoning_that_ends_by_itself_is_as_without_a_budget(url: str, marked: AsyncLLM):
    """Its own mark ends it; a second one is not forced."""
    early = {"logit_bias": {str(closing(marked)): 100}, "return_token_ids": True}
    plain, bounded = (
        post(url, "/v1/chat/completions", **early, **more).json()["choices"][0]["token_ids"]
        for more in ({}, {"thinking_token_budget": 9})
    )
    assert plain == bounded


def test_a_preempted_answer_keeps_its_budget(url: str, marked: AsyncLLM):
    """Its tokens are computed again, and counted once."""

    async def answer(num_resets: int) -> list[int]:
        ask = {"thinking_token_budget": 12, "return_token_ids": True, "ignore_eos": True,
               "logit_bias": {str(closing_id): -100}}  # fmt: skip
        task = asyncio.create_task(asyncio.to_thread(post, url, "/v1/chat/completions", **ask))
        for _ in range(num_resets):
            await marked.reset_prefix_cache(preempt_running=True)
        return (await task).json()["choices"][0]["token_ids"]

    closing_id = closing(marked)
    for num_resets in (0, 30):
        ids = asyncio.run(answer(num_resets))
        assert [place for place, token in enumerate(ids) if token == closing_id] == [12]


def test_anthropics_budget_is_kept(url: str, marked: AsyncLLM):
    """Its tokens and the mark are more than 1,024, and an answer follows."""
    thinking = {"type": "enabled", "budget_tokens": 1024}
    answer = post(url, "/v1/messages", thinking=thinking, max_tokens=1100, seed=1).json()
    assert [block["type"] for block in answer["content"]][:1] == ["thinking"]
    assert answer["usage"]["output_tokens"] <= 1100


def test_a_budget_without_a_mark_is_refused_and_a_hint_is_not(scribe):
    """A chat names a bound that cannot be kept; Anthropic's clients send one to every model."""
    answer = post(scribe[0], "/v1/chat/completions", thinking_token_budget=5)
    assert answer.status_code == 400
    assert "thinking_token_budget=5: no mark is known" in answer.json()["error"]["message"]
    thinking = {"type": "enabled", "budget_tokens": 1024}
    assert post(scribe[0], "/v1/messages", thinking=thinking, max_tokens=1025,
                stop_sequences=["a", "e", "i"]).status_code == 200  # fmt: skip
    assert post(scribe[0], "/v1/chat/completions", thinking_token_budget=-2).status_code == 400
