"""Tool loops through every API: each turn continues with what the model wrote.

The model is random, so its tokens are none that a tokenizer would choose; its words are dictated.
Clients respell arguments and drop reasoning, as agents do.
"""

import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import httpx
import pytest

from ostinato import AsyncLLM
from ostinato.server.config import ServerConfig
from ostinato.server.state import ServerState
from tests.server.formats.conftest import says
from tests.support.models.chat_families import FAMILIES
from tests.support.models.checkpoints import make_config, save_checkpoint
from tests.support.servers.prefix_probe import ENDPOINTS
from tests.support.servers.servers import await_idle, serving

LEDGER = "x-ostinato-ledger"
PARAMETERS = {"type": "object"}


def written(turn: int, thought: str = "Hm.") -> str:
    """Return what the model writes to call a tool, with spaces and an order of its own."""
    call = f'{{"name": "read", "arguments": {{"p":{turn},  "a": true}}}}'
    return f"<think>\n{thought}\n</think>\n\n<tool_call>\n{call}\n</tool_call>"


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerState]:
    path = tmp_path_factory.mktemp("ledger")
    tokenizer = FAMILIES["qwen"].tokenizer()
    sizes = {"max_position_embeddings": 4096, "vocab_size": len(tokenizer)}
    save_checkpoint(path, make_config("llama", **sizes))
    tokenizer.save_pretrained(path)
    # Prompts are not prepared in idle steps, which would hit what the ledger alone does not.
    settings = {"eviction_policy": "lru", "idle_rebase": "off"}
    llm = AsyncLLM(str(path), dtype="float32", num_blocks=2048, **settings)
    state = ServerState(llm, ServerConfig(model_names=("m",), reasoning_parser="qwen3"))
    assert state.formats.reasoning is not None
    dictated = replace(state.formats.reasoning, before_text="")  # reasoning follows grammars too
    state.formats = replace(state.formats, reasoning=dictated)
    yield state
    llm.shutdown()


@pytest.fixture
def http(state: ServerState) -> Iterator[httpx.Client]:
    with serving(state) as url, httpx.Client(base_url=url, timeout=60) as client:
        yield client
    await_idle(state.llm)
    turns = state.llm.engine.prompts.turns
    assert turns is not None
    turns.ledger.check()


class Chat:
    """A careless client of ``/v1/chat/completions``."""

    path = "/v1/chat/completions"
    tools: Any = ({"type": "function", "function": {"name": "read", "parameters": PARAMETERS}},)

    def __init__(self, salt: str, **more: Any) -> None:
        self.items: list[Any] = [self.user("Look at ten files.")]
        self.salt, self.more = salt, more
        self.header = ""
        self.counts: list[tuple[int, int, int]] = []  # of each turn: prompt, hits, answer
        self.num_kept = 0  # tokens of the newest prompt that are as they were generated
        self.answer: dict[str, Any] = {}

    def user(self, text: str) -> Any:
        return {"role": "user", "content": text}

    def body(self, text: str) -> dict[str, Any]:
        return {"messages": self.items, "max_completion_tokens": 200, "return_token_ids": True}

    def ask(self, http: httpx.Client, text: str) -> dict[str, Any]:
        """Have the model write a text, and add to the conversation what this client makes of it."""
        body = {"model": "m", "tools": list(self.tools), "cache_salt": self.salt, **self.more}
        answer = http.post(self.path, json={**body, **self.body(text), **says(text)})
        assert answer.status_code == 200, answer.text
        self.header, self.answer = answer.headers.get(LEDGER, ""), answer.json()
        endpoint, usage = ENDPOINTS[self.path], self.answer["usage"]
        num_written = usage.get("completion_tokens") or usage["output_tokens"]
        prompt = endpoint.total(self.answer), endpoint.cached(self.answer)
        self.counts.append((*prompt, num_written))
        details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or usage
        self.num_kept = details.get("kept_tokens", 0)
        self.items += self.sent_back(self.answer)
        return self.answer

    def sent_back(self, answer: dict[str, Any]) -> list[Any]:
        message = answer["choices"][0]["message"]
        assert message.get("reasoning") or not message.get("tool_calls")
        calls = message.get("tool_calls") or []
        for call in calls:
            given = json.loads(call["function"]["arguments"])
            call["function"]["arguments"] = json.dumps(given, sort_keys=True, indent=1)
        kept = {"role": "assistant", "content": message["content"]}
        return [{**kept, "tool_calls": calls} if calls else kept]

    def result(self, text: str) -> None:
        """Send the result of the last call."""
        name = self.items[-1]["tool_calls"][0]["id"]
        self.items.append({"role": "tool", "tool_call_id": name, "content": text})


class Listing(Chat):
    """A client that sends calls and results back as text, as smolagents does."""

    def sent_back(self, answer: dict[str, Any]) -> list[Any]:
        calls = answer["choices"][0]["message"].get("tool_calls") or []
        for call in calls:
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
        return [{"role": "assistant", "content": f"Calling tools:\n{calls}"}]

    def result(self, text: str) -> None:
        self.items.append(self.user(f"Observation:\n{text}"))


class Responses(Chat):
    """A careless and stateless client of ``/v1/responses``."""

    path = "/v1/responses"
    tools = ({"type": "function", "name": "read", "parameters": PARAMETERS},)

    def body(self, text: str) -> dict[str, Any]:
        return {"input": self.items, "max_output_tokens": 200, "store": False}

    def sent_back(self, answer: dict[str, Any]) -> list[Any]:
        items = [item for item in answer["output"] if item["type"] != "reasoning"]
        for item in items:
            if item["type"] == "function_call":
                given = json.loads(item["arguments"])
                item["arguments"] = json.dumps(given, sort_keys=True, indent=1)
        return items

    def result(self, text: str) -> None:
        name = self.items[-1]["call_id"]
        self.items.append({"type": "function_call_output", "call_id": name, "output": text})


class Messages(Chat):
    """A careless client of ``/v1/messages``, whose arguments are objects anyway."""

    path = "/v1/messages"
    tools = ({"name": "read", "input_schema": PARAMETERS},)

    def body(self, text: str) -> dict[str, Any]:
        return {"messages": self.items, "max_tokens": 200}

    def sent_back(self, answer: dict[str, Any]) -> list[Any]:
        content = [block for block in answer["content"] if block["type"] != "thinking"]
        return [{"role": "assistant", "content": content}]

    def result(self, text: str) -> None:
        name = self.items[-1]["content"][-1]["id"]
        block = {"type": "tool_result", "tool_use_id": name, "content": text}
        self.items.append({"role": "user", "content": [block]})


class AppendOnly:
    """A client that sends the tokens of the prompt, of the answer and of what follows."""

    def __init__(self, first: list[int], salt: str) -> None:
        self.ids, self.salt = first, salt
        self.num_missed: list[int] = []

    def ask(self, http: httpx.Client, text: str) -> None:
        body = {"model": "m", "prompt": self.ids, "cache_salt": self.salt, "max_tokens": 200}
        more = {"return_token_ids": True, "skip_special_tokens": False}
        answer = http.post("/v1/completions", json={**body, **more, **says(text)}).json()
        endpoint = ENDPOINTS["/v1/completions"]
        self.num_missed.append(endpoint.total(answer) - endpoint.cached(answer))
        self.ids = [*self.ids, *answer["choices"][0]["token_ids"]]

    def result(self, text: str) -> None:
        opened = f"\n<bos>user\n<tool_response>\n{text}\n</tool_response><eos>\n<bos>assistant\n"
        tokenizer = FAMILIES["qwen"].tokenizer()
        self.ids += tokenizer(opened, add_special_tokens=False)["input_ids"]


NUM_TURNS = 10


def tool_loop(http: httpx.Client, client: Any, num_turns: int = NUM_TURNS) -> Any:
    for turn in range(num_turns):
        client.ask(http, written(turn))
        client.result(f"file {turn}")
    return client


@pytest.fixture(scope="module")
def append_only(state: ServerState) -> list[int]:
    """Return how many tokens miss in each turn of a client that only appends."""
    with serving(state) as url, httpx.Client(base_url=url, timeout=60) as http:
        chat = Chat("first")
        ids = chat.ask(http, "Hello.")["prompt_token_ids"]
        return list(tool_loop(http, AppendOnly(ids, "append-only")).num_missed)


@pytest.mark.parametrize("client", [Chat, Responses, Messages])
def test_a_careless_client_hits_what_an_append_only_client_hits(
    http: httpx.Client, client: type[Chat], append_only: list[int]
):
    """Ten calls, to the token: only the new result and the last token are computed."""
    agent = tool_loop(http, client(client.__name__))
    num_missed = [prompt - hits for prompt, hits, _ in agent.counts]
    assert num_missed == append_only
    restored = f"turns={NUM_TURNS - 1}, restored={NUM_TURNS - 1}"
    assert agent.header.startswith(restored) and f"reasoning={NUM_TURNS - 1}" in agent.header


def test_calls_that_come_back_as_text_hit_like_calls(http: httpx.Client):
    agent = tool_loop(http, Listing("listed"), 3)
    assert "listed-calls=2" in agent.header
    for (before, _, answer), (_, hits, _) in pairwise(agent.counts):
        assert hits == before + answer - 1


def test_without_kept_tokens_the_same_client_misses_its_earlier_turns(
    http: httpx.Client, append_only: list[int]
):
    """So the test above can fail."""
    agent = tool_loop(http, Chat("plain", keep_tokens=False), 3)
    (*_, last), missed = agent.counts, append_only[2]
    assert last[0] - last[1] > 1.5 * missed and not agent.header


@pytest.mark.parametrize("client", [Chat, Responses, Messages])
def test_usage_says_how_many_tokens_are_as_they_were_generated(
    http: httpx.Client, client: type[Chat]
):
    """All of the earlier answers, or none on request; ``/tokenize`` shows both."""
    kept = tool_loop(http, client(f"kept {client.path}"), 4)
    assert kept.num_kept == sum(answer for *_, answer in kept.counts[:-1])
    anew = tool_loop(http, client(f"anew {client.path}", keep_tokens=False), 4)
    assert anew.num_kept == 0 and anew.header == ""
    if client is Chat:
        body = {"messages": kept.items, "tools": list(kept.tools), "cache_salt": kept.salt}
        first, second = (
            http.post("/tokenize", json={**body, "keep_tokens": keep}).json()["tokens"]
            for keep in (True, False)
        )
        assert first != second


def streamed(http: httpx.Client, agent: Chat, text: str) -> list[dict[str, Any]]:
    """Ask as a stream, and return the data of its events."""
    body = {"model": "m", "tools": list(agent.tools), "cache_salt": agent.salt, "stream": True}
    sent = {**body, **agent.body(text), **says(text), **agent.more}
    with http.stream("POST", agent.path, json=sent) as answer:
        agent.header = answer.headers.get(LEDGER, "")
        lines = [line.removeprefix("data: ") for line in answer.iter_lines()]
        return [json.loads(line) for line in lines if line.startswith("{")]


def test_streamed_turns_are_noted_before_their_stream_ends(http: httpx.Client):
    """With ``/v1/messages``, as Claude Code streams."""
    agent = Messages("streamed")
    events = streamed(http, agent, written(0))
    [start] = [e for e in events if e.get("content_block", {}).get("type") == "tool_use"]
    block = {**start["content_block"], "input": {"a": True, "p": 0}}
    agent.items.append({"role": "assistant", "content": [block]})
    agent.result("ok")
    agent.ask(http, "Done.")
    assert agent.header.startswith("turns=1, restored=1")


# --- the next question ---------------------------------------------------------------------------


def second_question(http: httpx.Client, salt: str, **more: Any) -> tuple[Chat, str]:
    """Call two tools, answer, and be asked again; returns the client and the request's id."""
    agent = Chat(salt, **more)
    agent.items = [agent.user(f"Look, {salt}.")]  # nothing that another tenant has sent
    for turn in range(2):
        agent.ask(http, written(turn, thought="A thought of more than one block."))
        agent.result("ok")
    agent.ask(http, "<think>\nDone, I think.\n</think>\n\nIt is done.")
    agent.items.append(agent.user("Really?"))
    return agent, agent.ask(http, "Yes.")["id"]


def test_explain_names_what_the_template_dropped(http: httpx.Client):
    agent, name = second_question(http, "explained")
    assert "dropped-reasoning=3" in agent.header
    explanation = http.get(f"/v1/explain/{name}")
    assert explanation.status_code == 200, explanation.text
    sentences = [span["sentence"] for span in explanation.json()["spans"]]
    [sentence] = [s for s in sentences if "dropped" in s]
    assert sentence.startswith("the template dropped the reasoning of message 1: ")
    place = next(s for s in explanation.json()["spans"] if s.get("reason") == "template dropped")
    assert sentence.endswith(f"tokens from token {place['start']:,} on")


def test_keep_reasoning_hits_all_of_the_turns_before(http: httpx.Client):
    agent, _ = second_question(http, "kept", keep_reasoning="always")
    (before, _, answer), (prompt, hits, _) = agent.counts[-2:]
    assert hits == before + answer - 1 < prompt
    assert "dropped" not in agent.header
    refused = http.post(agent.path, json={**agent.body(""), "model": "m", "keep_reasoning": "no"})
    assert refused.status_code == 400 and "keep_reasoning" in refused.text


# --- sealed names of turns -----------------------------------------------------------------------


def two_answers(http: httpx.Client, salt: str) -> tuple[list[Responses], list[dict[str, Any]]]:
    """Answer twice at one place, with equal calls; returns both clients and the first's items."""
    included = {"include": ["reasoning.encrypted_content"]}
    first, second = (Responses(salt, **included) for _ in range(2))
    items = first.ask(http, written(0, thought="The first thought."))["output"]
    second.ask(http, written(0, thought="The second thought."))
    return [first, second], items


@pytest.mark.parametrize("is_sent", [True, False])
def test_a_sealed_name_chooses_the_turn_that_was_written(http: httpx.Client, is_sent: bool):
    """Two turns mean the same at one place; without a name, the newest is taken."""
    both, (item, call) = two_answers(http, f"sealed {is_sent}")
    agent = Responses(f"sealed {is_sent}")
    agent.items.append({"type": "reasoning", "summary": []})
    if is_sent:
        agent.items[-1]["encrypted_content"] = item["encrypted_content"]
    agent.items.append({**call, "call_id": "of the client's own"})
    agent.result("ok")
    agent.ask(http, "Done.")
    prompt, _, answer = both[not is_sent].counts[0]
    assert agent.counts[0][1] == prompt + answer - 1
    assert ("seals=1" in agent.header) is is_sent


@pytest.mark.parametrize("what", ["another tenant's", "forged", "of another vendor", "empty"])
def test_a_sealed_name_of_no_turn_here_has_no_effect_and_says_so(http: httpx.Client, what: str):
    _, (item, _) = two_answers(http, "victim")
    name = item["encrypted_content"]
    sent = {
        "another tenant's": name,
        "forged": name[:-4] + "AAAA",
        "of another vendor": "gAAAAABo" + "x" * 300,
        "empty": "ost1_",
    }[what]
    agent = Responses("attacker")
    agent.items.append({"type": "reasoning", "summary": [], "encrypted_content": sent})
    call = {"type": "function_call", "call_id": "x", "name": "read"}
    agent.items.append({**call, "arguments": '{"p": 0, "a": true}'})
    agent.result("ok")
    agent.ask(http, "Done.")
    assert agent.header == "ignored-seals=1"


def test_a_signature_of_thinking_names_the_turn_too(http: httpx.Client):
    """Also where the text is omitted, and as redacted thinking."""
    omitted = {"thinking": {"type": "adaptive", "display": "omitted"}}
    for kind in ("thinking", "redacted_thinking"):
        agent = Messages(f"signed {kind}", **omitted)
        [block, call] = agent.ask(http, written(0))["content"]
        assert block["thinking"] == "" and block["signature"]
        redacted = {"type": kind, "data": block["signature"]}
        shown = block if kind == "thinking" else redacted
        agent.items[-1] = {"role": "assistant", "content": [shown, call]}
        agent.result("ok")
        agent.ask(http, "Done.")
        assert "restored-reasoning=1" in agent.header and ", seals=1" in agent.header


# --- attacks -------------------------------------------------------------------------------------


def test_call_ids_of_another_tenant_bring_nothing_of_it(http: httpx.Client):
    """The same conversation, ids and all, under another salt: rendered plainly, nothing hits."""
    victim = Chat("owner")
    victim.ask(http, written(0, thought="A secret."))
    victim.result("ok")
    stolen = Chat("thief")
    stolen.items = list(victim.items)
    victim.ask(http, "Done.")
    stolen.ask(http, "Done.")
    assert victim.header.startswith("turns=1") and stolen.header == ""
    assert stolen.counts[-1][1] == 0
    assert stolen.counts[-1][0] < victim.counts[-1][0], "no thought of another tenant"


def test_a_conversation_edited_in_the_middle_gets_nothing_behind_the_edit(http: httpx.Client):
    agent = tool_loop(http, Chat("edited"), 3)
    agent.items[4] = {**agent.items[4], "content": "another result"}
    agent.ask(http, "Done.")
    assert agent.header.startswith("turns=2,")


def test_an_erased_tenant_has_no_turns(http: httpx.Client, state: ServerState):
    agent = Chat("gone")
    agent.ask(http, written(0))
    agent.result("ok")
    receipt = http.post("/admin/erase", json={"cache_salt": "gone"})
    assert receipt.status_code == 200, receipt.text
    assert receipt.json()["num_turns"] == 1
    agent.ask(http, "Done.")
    assert agent.header == ""


def test_the_metrics_count_what_was_put_back(http: httpx.Client):
    def metrics() -> dict[str, float]:
        lines = http.get("/metrics").text.splitlines()
        named = [line.rsplit(" ", 1) for line in lines if line.startswith("ostinato_ledger_")]
        return {name: float(value) for name, value in named}

    before = metrics()
    agent = Chat("metrics")
    agent.ask(http, written(0))
    agent.result("ok")
    agent.ask(http, "Done.")
    after = metrics()
    for name in ("noted", "restored", "restored_reasoning"):
        more = 2 if name == "noted" else 1
        key = f"ostinato_ledger_{name}_turns_total"
        assert after[key] == before[key] + more, name
    assert after["ostinato_ledger_turns"] >= 2 and after["ostinato_ledger_bytes"] > 1000
