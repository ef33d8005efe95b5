"""Requests in the shapes that coding agents send: accepted, obeyed or set aside, and said so."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from ostinato.protocol.dialects import DIALECTS, MESSAGES
from ostinato.server.state import ServerState
from tests.server.formats.conftest import says

IGNORED, SET_ASIDE = "x-ostinato-ignored-fields", "x-ostinato-set-aside"


@pytest.fixture
def http(tool_scribe: tuple[str, ServerState]) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=tool_scribe[0], timeout=60) as client:
        yield client


@pytest.fixture
def tool_client(tool_scribe: tuple[str, ServerState]) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{tool_scribe[0]}/v1", api_key="none", max_retries=0) as client:
        yield client


def claude_code(checksum: str = "8fa", question: str = "Say hello.") -> dict[str, Any]:
    """Return a request as Claude Code 2.1 sends it, in our own words and shorter."""
    kept = {"type": "ephemeral", "scope": "global", "ttl": "1h"}
    billing = f"x-anthropic-billing-header: cc_version=2.1.330.{checksum}; cc_entrypoint=cli;"
    return {
        "model": "scribe",
        "max_tokens": 4,
        "metadata": {"user_id": "someone"},
        "system": [
            {"type": "text", "text": billing},
            {"type": "text", "text": "You help with code. " * 40, "cache_control": kept},
        ],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": question}]},
            {"role": "system", "content": "Agents: none."},
        ],
        "tools": [
            {"name": "Read", "description": "Read a file.", "input_schema": {"type": "object"},
             "eager_input_streaming": True, "input_examples": [{}]},
            {"name": "Later", "input_schema": {"type": "object"}, "defer_loading": True},
            {"type": "web_search_20250305", "name": "web_search", "max_uses": 5},
        ],
        "thinking": {"type": "adaptive"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "xhigh"},
        "speed": "standard",
    }  # fmt: skip


def test_claude_code_connects_and_learns_which_tool_is_left_out(http: httpx.Client):
    answer = http.post("/v1/messages?beta=true", json=claude_code())
    assert answer.status_code == 200, answer.text
    assert answer.headers[IGNORED] == "tools[2]"
    assert answer.headers[SET_ASIDE] == "system[0]"
    counted = http.post("/v1/messages/count_tokens?beta=true", json=claude_code())
    usage = answer.json()["usage"]
    inputs = ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")
    assert counted.json() == {"input_tokens": sum(usage[name] for name in inputs)}


def test_conversations_of_claude_code_share_what_follows_its_checksum(http: httpx.Client):
    """The checksum differs in each conversation, in the first line of the prompt."""
    http.post("/v1/messages", json=claude_code("8fa"))
    usage = http.post("/v1/messages", json=claude_code("1c0", "And bye?")).json()["usage"]
    assert usage["cache_read_input_tokens"] > 0.9 * usage["input_tokens"]
    assert usage["cache_read_input_tokens"] > 200, "all of the system text"


CODEX: dict[str, Any] = {
    "model": "scribe",
    "instructions": "You write code.",
    "input": [
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hello."}]},
        {"type": "reasoning", "summary": [], "encrypted_content": "abc"},
        {"type": "custom_tool_call", "call_id": "call_1", "name": "apply_patch", "input": "x"},
        {"type": "custom_tool_call_output", "call_id": "call_1", "output": "done"},
        {"type": "function_call", "call_id": "call_2", "name": "find", "namespace": "files",
         "arguments": "{}"},
        {"type": "function_call_output", "call_id": "call_2", "output": "nothing"},
        {"type": "web_search_call", "action": {"type": "search", "query": "q"}},
    ],
    "tools": [
        {"type": "function", "name": "shell", "parameters": {"type": "object"}, "strict": False},
        {"type": "custom", "name": "apply_patch", "description": "Change files.",
         "format": {"type": "grammar", "syntax": "lark", "definition": 'start: "x"'}},
        {"type": "namespace", "name": "files", "description": "Files.", "tools": [
            {"type": "function", "name": "find", "parameters": {"type": "object"},
             "defer_loading": True}]},
        {"type": "web_search", "external_web_access": False},
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": {"effort": "xhigh", "summary": "auto"},
    "text": {"verbosity": "low"},
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "a-session",
    "client_metadata": {"x-codex": "1"},
    "service_tier": "priority",
    "store": False,
    "max_output_tokens": 4,
}  # fmt: skip


def test_codex_connects_and_learns_what_is_left_out(http: httpx.Client):
    answer = http.post("/v1/responses", json=CODEX)
    assert answer.status_code == 200, answer.text
    assert answer.headers[IGNORED] == "tools[3], input[6]"


def test_a_call_in_a_namespace_names_both(tool_client: openai.OpenAI):
    """The prompt shows ``files__find``; the client gets its own words back."""
    find = {"type": "function", "name": "find", "parameters": {"type": "object"}}
    tools: Any = [{"type": "namespace", "name": "files", "tools": [find]}]
    call = '<tool_call>\n{"name": "files__find", "arguments": {}}\n</tool_call>'
    response = tool_client.responses.create(
        model="scribe", input="Where?", tools=tools, extra_body=says(call)
    )
    [item] = response.output
    assert (item.type, item.name, item.namespace) == ("function_call", "find", "files")


@pytest.mark.parametrize("stream", [False, True])
def test_a_custom_tool_gets_its_text(tool_client: openai.OpenAI, stream: bool):
    tools: Any = [{"type": "custom", "name": "apply_patch"}]
    arguments = json.dumps({"input": 'a "line"\n'})
    call = f'<tool_call>\n{{"name": "apply_patch", "arguments": {arguments}}}\n</tool_call>'
    asked = {"model": "scribe", "input": "Patch.", "tools": tools, "extra_body": says(call)}
    if stream:
        events = list(tool_client.responses.create(stream=True, **asked))
        inputs = [e for e in events if e.type.startswith("response.custom_tool_call_input")]
        assert [getattr(e, "delta", None) or e.input for e in inputs] == ['a "line"\n'] * 2
        response = events[-1].response
    else:
        response = tool_client.responses.create(**asked)
    [item] = response.output
    assert (item.type, item.name, item.input) == ("custom_tool_call", "apply_patch", 'a "line"\n')
    more = {**asked, "previous_response_id": response.id, "input": "Again.", "stream": False}
    assert tool_client.responses.create(**more).status == "completed"


def test_a_regular_expression_binds_the_text_of_a_custom_tool(tool_client: openai.OpenAI):
    grammar = {"type": "grammar", "syntax": "regex", "definition": "[0-9]{3}"}
    tools: Any = [{"type": "custom", "name": "code", "format": grammar}]
    choice: Any = {"type": "custom", "name": "code"}
    response = tool_client.responses.create(
        model="scribe", input="Code?", tools=tools, tool_choice=choice, max_output_tokens=200
    )
    assert len(response.output[0].input) == 3 and response.output[0].input.isdigit()


NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "now"}}])
def test_a_call_is_forced_where_marks_are_single_tokens(tool_client: openai.OpenAI, choice: Any):
    """The tokenizer has one token for ``<tool_call>`` that is not special, as Qwen's has."""
    tools: Any = [{"type": "function", "function": {"name": "now", "parameters": NOTHING}}]
    answer = tool_client.chat.completions.create(
        model="scribe", messages=[{"role": "user", "content": "Now."}], tools=tools,
        tool_choice=choice, parallel_tool_calls=False, max_tokens=60,
    )  # fmt: skip
    [call] = answer.choices[0].message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("now", {})


def test_a_strict_tool_leaves_the_mark_to_the_model(tool_client: openai.OpenAI):
    """With ``strict`` a bias towards the mark still writes it, and a call that fits follows."""
    tool = {"name": "now", "parameters": NOTHING, "strict": True}
    tools: Any = [{"type": "function", "function": tool}]
    mark = _token(tool_client, "<tool_call>")
    answer = tool_client.chat.completions.create(
        model="scribe", messages=[{"role": "user", "content": "Now."}], tools=tools,
        parallel_tool_calls=False, max_tokens=60, logit_bias={str(mark): 100},
    )  # fmt: skip
    assert [call.function.name for call in answer.choices[0].message.tool_calls] == ["now"]


def _token(client: openai.OpenAI, text: str) -> int:
    url = str(client.base_url).replace("/v1/", "/tokenize")
    body = {"model": "scribe", "prompt": text, "add_special_tokens": False}
    [token] = httpx.post(url, json=body).json()["tokens"]
    return int(token)


def test_a_field_that_nobody_knows_is_named_and_counted(http: httpx.Client):
    def counted() -> float:
        lines = http.get("/metrics").text.splitlines()
        name = 'ostinato_ignored_fields_total{path="/v1/chat/completions"}'
        return sum(float(line.split()[1]) for line in lines if line.startswith(name))

    before = counted()
    part = {"type": "text", "text": "Hi.", "mood": "good"}
    body = {"model": "scribe", "messages": [{"role": "user", "content": [part]}], "max_tokens": 1}
    answer = http.post("/v1/chat/completions", json={**body, "a\r\nb": 1})
    assert answer.headers[IGNORED] == "a??b, messages[0].content[0].mood"
    assert counted() - before == 2


@pytest.mark.parametrize("api", DIALECTS, ids=lambda api: api.path)
def test_what_would_change_the_answer_is_refused_by_place(http: httpx.Client, api):
    bodies: dict[str, Any] = {
        "/v1/messages": {"max_tokens": 1, "messages": [{"role": "user", "content": "x"}]},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}]},
        "/v1/completions": {"prompt": "x"},
        "/v1/responses": {"input": "x"},
    }
    for name in api.refused:
        answer = http.post(api.path, json={"model": "scribe", **bodies[api.path], name: "x"})
        assert answer.status_code == 400 and name in answer.json()["error"]["message"], name


def test_an_error_of_messages_names_the_place(http: httpx.Client):
    body = claude_code()
    body["tools"][1]["strict"] = "yes"
    error = http.post(MESSAGES.path, json=body).json()["error"]
    assert error["message"].startswith("tools[1].strict: ")


def test_a_lease_lasts_as_long_as_the_cache_options_say(http: httpx.Client):
    body = {"model": "scribe", "input": "Keep this text. " * 10, "max_output_tokens": 1}
    kept = http.post("/v1/responses", json={**body, "prompt_cache_options": {"ttl": "30m"}})
    assert kept.json()["usage"]["input_tokens_details"]["retained_tokens"] > 0
    for ttl in ("0m", "25h", "soon"):
        wrong = http.post("/v1/responses", json={**body, "prompt_cache_options": {"ttl": ttl}})
        assert wrong.json()["error"]["param"] == "prompt_cache_options.ttl"


@pytest.mark.parametrize("method", ["GET", "POST"])
def test_a_path_of_the_api_is_no_response_id(http: httpx.Client, method: str):
    answer = http.request(method, "/v1/responses/compact", json={})
    assert answer.status_code == 404 and "is not served" in answer.json()["error"]["message"]
    counted = http.post("/v1/responses/input_tokens", json=CODEX).json()
    assert counted["object"] == "response.input_tokens" and counted["input_tokens"] > 20


def test_a_field_with_an_empty_name_leaves_a_valid_header(http: httpx.Client):
    """An empty name would end the header with a space, which is no valid header."""
    body = {"model": "scribe", "input": "Hello.", "x": 1, "": 1}
    answer = http.post("/v1/responses/input_tokens", json=body)
    assert answer.status_code == 200, answer.text
    assert answer.headers[IGNORED] == "x, ?"
