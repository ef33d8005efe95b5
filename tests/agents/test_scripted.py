"""The scripted model: its answers are computed like any other, and obey the request's grammar."""

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import httpx
import pytest

from tests.support.cache.cache_views import num_common
from tests.support.models.scripted_model import (
    ScriptedLLM,
    ToolLoop,
    Turn,
    scripted_server,
    written_call,
)
from tests.support.waiting import wait_until

SH: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "sh",
        "description": "Run a command.",
        "parameters": {
            "type": "object",
            "properties": {"command": {"type": "string"}},
            "required": ["command"],
        },
    },
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[httpx.Client, ScriptedLLM]]:
    """Serve a model that answers by calls of ``sh``."""
    loop = ToolLoop("Play", "sh", lambda step: {"command": f"echo {step}"}, num_calls=3)
    with (
        scripted_server(tmp_path_factory.mktemp("scripted"), loop) as (url, llm),
        httpx.Client(base_url=url, timeout=60) as client,
    ):
        yield client, llm


def ask(client: httpx.Client, messages: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    body = {"model": "local", "messages": messages, "tools": [SH], **more}
    answer = client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["message"]


def num_prepared(llm: ScriptedLLM) -> int:
    """Return the tokens of what is prepared inside the loop of the last request."""
    prompt = llm.turns[-1].prompt
    heads = [head for head in llm.engine.rebase.heads if head.in_loop and head.is_whole]
    ours = (head for head in heads if [*head.key.tokens[: head.start]] == prompt[: head.start])
    return max((head.end for head in ours), default=0)


def play_loop(
    client: httpx.Client,
    messages: list[dict[str, Any]],
    question: str,
    run_tool: Callable[[], str] = lambda: "done\n",
) -> None:
    """Ask, and send results until a text comes, as a client that keeps no reasoning."""
    messages.append({"role": "user", "content": question})
    while True:
        answer = ask(client, messages)
        assert answer.pop("reasoning")
        messages.append({k: v for k, v in answer.items() if v is not None})
        if not (calls := answer.get("tool_calls")):
            return
        messages.append({"role": "tool", "tool_call_id": calls[0]["id"], "content": run_tool()})


def test_the_loop_after_a_question_hits_what_the_ledger_and_the_idle_steps_left(server):
    """The client sends no reasoning, and the template drops that of the loop before.

    Inside both loops the ledger puts the reasoning back, so each turn hits all before it. At the
    question the template drops it, and the idle steps have computed that prompt up to its words.
    The first test of this server, so that all that is prepared is for this conversation.
    """
    client, llm = server
    llm.turns = list[Turn]()
    messages: list[dict[str, Any]] = [{"role": "system", "content": "You help with rivers."}]
    play_loop(client, messages, "Play.")
    wait_until(
        lambda: [head for head in llm.engine.rebase.heads if head.is_whole and not head.in_loop]
    )
    prepared = llm.engine.rebase.counts
    play_loop(client, messages, "Play once more.")

    assert [turn.text.count("<think>") for turn in llm.turns] == [0, 1, 2, 3] * 2
    usable = [min(b.num_reusable, a.num_before) for b, a in pairwise(llm.turns)]
    shares = [turn.num_cached / most for turn, most in zip(llm.turns[1:], usable, strict=True)]
    assert min(shares) >= 1.0, shares
    assert llm.engine.rebase.counts.used == prepared.computed > 100


def test_while_a_tool_runs_the_prompt_behind_its_loop_is_prepared(server):
    """Up to the result; the question then comes as soon as the answer has ended."""
    client, llm = server
    messages: list[dict[str, Any]] = [{"role": "system", "content": "You help with mountains."}]

    prepared = [0]

    def run_tool() -> str:
        wait_until(lambda: num_prepared(llm) > prepared[-1])
        prepared.append(num_prepared(llm))
        return "done\n"

    used = llm.engine.rebase.counts.used
    play_loop(client, messages, "Play.", run_tool)
    ask(client, [*messages, {"role": "user", "content": "And now?"}])
    question, before = llm.turns[-1], llm.turns[-2]
    parted = num_common(before.prompt, question.prompt)
    assert llm.engine.rebase.counts.used - used >= prepared[-1] - parted > 100
    assert question.num_cached >= prepared[-1]


def test_an_append_only_client_hits_all_but_the_last_token(server):
    client, llm = server
    llm.turns = list[Turn]()
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "You help."},
        {"role": "user", "content": "Play."},
    ]
    for step in range(4):
        answer = ask(client, messages)
        assert answer["reasoning"] == f"Step {step} comes now."
        messages.append({k: v for k, v in answer.items() if v is not None})
        for call in answer.get("tool_calls", ()):
            result = {"role": "tool", "tool_call_id": call["id"], "content": f"{step}\n"}
            messages.append(result)
    assert messages[-1]["content"] == "All 3 calls are done."
    for earlier, later in pairwise(llm.turns):
        assert later.num_cached == earlier.num_reusable


def test_a_forced_call_may_stand_an_empty_line_behind_the_reasoning(server):
    """As the template writes it, and the model does of its own accord."""
    client, llm = server
    script = llm.script
    llm.script = lambda _: "<think>\nWell.\n</think>\n\n" + written_call("sh", {"command": "ls"})
    answer = ask(client, [{"role": "user", "content": "Play."}], tool_choice="required")
    llm.script = script
    assert answer["reasoning"] == "Well." and answer["content"] is None
    assert [call["function"]["name"] for call in answer["tool_calls"]] == ["sh"]
