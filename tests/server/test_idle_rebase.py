"""Where the template drops reasoning, the next prompt is cached up to the user's words."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from ostinato import AsyncLLM
from ostinato.server.config import ServerConfig
from ostinato.server.state import ServerState
from tests.support.models.chat_templates import FAMILIES
from tests.support.models.checkpoints import Checkpoints, checkpoints, make_tokenizer
from tests.support.servers.prefix_probe import ENDPOINTS
from tests.support.servers.servers import await_idle, serving
from tests.support.waiting import wait_until

__all__ = ["checkpoints"]

TOOL = {
    "type": "function",
    "function": {
        "name": "read_file",
        "description": "Read a file.",
        "parameters": {"type": "object", "properties": {"path": {"type": "string"}}},
    },
}


@pytest.fixture(scope="module")
def checkpoint(checkpoints: Checkpoints) -> Path:
    """A random Llama with a template that drops reasoning at a user message."""
    path = checkpoints.path("llama", max_position_embeddings=4096)
    tokenizer = make_tokenizer()
    tokenizer.chat_template = FAMILIES["qwen3"]
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture(params=["auto", "off"])
def mode(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def state(checkpoint: Path, mode: str) -> Iterator[ServerState]:
    llm = AsyncLLM(checkpoint, dtype="float32", num_blocks=1024, idle_rebase=mode)
    yield ServerState(llm, ServerConfig(model_names=("m",)))
    await_idle(llm)
    llm.shutdown()


@pytest.fixture
def http(state: ServerState) -> Iterator[httpx.Client]:
    with serving(state) as url, httpx.Client(base_url=url, timeout=60) as client:
        yield client


def ask(http: httpx.Client, messages: list[dict[str, Any]], **more: Any) -> Any:
    body = {
        "model": "m", "messages": messages, "tools": [TOOL], "temperature": 0, "max_tokens": 8,
        "ignore_eos": True, **more,
    }  # fmt: skip
    answer = http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def called(number: int) -> list[dict[str, Any]]:
    """A call with reasoning, and its result."""
    function = {"name": "read_file", "arguments": f'{{"path": "part{number}.txt"}}'}
    call = {"id": f"call0000{number}", "type": "function", "function": function}
    reasoning = f"Part {number} is missing, and the answer needs it; read it first. " * 3
    return [
        {
            "role": "assistant", "content": "", "tool_calls": [call],
            "reasoning_content": reasoning,
        },
        {"role": "tool", "tool_call_id": call["id"], "content": f"The {number} rivers. " * 8},
    ]  # fmt: skip


def loop(http: httpx.Client) -> list[dict[str, Any]]:
    """Play a tool loop to its answer; returns the conversation with it."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": "How many rivers are there?"}]
    for number in range(1, 5):
        ask(http, messages)
        messages += called(number)
    answer = ask(http, messages, structured_outputs={"choice": ["There are seven."]},
                 ignore_eos=False, max_tokens=64)  # fmt: skip
    choice = answer["choices"][0]
    assert choice["finish_reason"] == "stop"
    return [*messages, {"role": "assistant", "content": choice["message"]["content"]}]


def stats(http: httpx.Client) -> dict[str, int]:
    return http.get("/admin/stats").json()["idle_rebase"]


def test_the_user_message_after_a_tool_loop_hits_all_but_the_users_words(
    http: httpx.Client, mode: str
):
    """At least 99 % of what an append-only client would hit; without idle steps a fraction."""
    messages = loop(http)
    if mode == "auto":
        wait_until(lambda: stats(http)["heads"] == 1 and stats(http)["queued"] == 0)
        assert stats(http)["pending"] == stats(http)["computed"] > 0
    words = "And which of them is the longest?"
    answer = ask(http, [*messages, {"role": "user", "content": words}])
    endpoint = ENDPOINTS["/v1/chat/completions"]
    cached, prompt = endpoint.cached(answer), endpoint.total(answer)
    rest = {"prompt": f"{words}<|im_end|>\n<|im_start|>assistant\n", "add_special_tokens": False}
    ideal = prompt - http.post("/tokenize", json={"model": "m", **rest}).json()["count"]
    counts = stats(http)
    if mode == "off":
        assert counts["computed"] == 0
        assert cached < 0.5 * prompt
        return
    assert cached >= 0.99 * ideal, f"{cached} of {ideal}"
    assert counts["used"] >= 0.95 * counts["computed"] > 0
    again = ask(http, [*messages, {"role": "user", "content": words}], cache={"read": False})
    assert again["choices"] == answer["choices"], "a hit gives what computing gives"
    page = http.get("/metrics").text
    assert 'ostinato_idle_rebase_tokens_total{outcome="used"}' in page
    told = http.get(f"/v1/explain/{answer['id']}").json()
    assert told["num_prepared_tokens"] == counts["used"]


ANSWER = {"structured_outputs": {"choice": ["There are seven."]}, "temperature": 0}
QUESTION = "How many rivers reach the northern sea, and how long is each one of them?"


@pytest.mark.parametrize(
    ("path", "more"),
    [
        ("/v1/chat/completions", {}),
        ("/v1/chat/completions", {"stream": True}),
        ("/v1/responses", {}),
        ("/v1/messages", {"max_tokens": 99}),
    ],
)
def test_each_api_offers_the_prompt_after_its_answer(
    state: ServerState,
    http: httpx.Client,
    mode: str,
    path: str,
    more: dict[str, Any],
    caplog: pytest.LogCaptureFixture,
):
    """With thinking switched off, each answer opens with marks that the template drops later.

    Elsewhere only the frame up to the user's words is missing, which is more than a block here.
    """
    off = {"chat_template_kwargs": {"enable_thinking": False}} if "chat" in path else {}
    body = {**ENDPOINTS[path].body(QUESTION), "model": "m"}
    answer = http.post(path, json={**body, **ANSWER, **off, **more})
    assert answer.status_code == 200, answer.text
    if mode == "off":
        assert stats(http)["heads"] == 0
    else:
        wait_until(lambda: stats(http)["pending"] > 0)
    assert not [record for record in caplog.records if record.levelname == "ERROR"]
