"""Requests in the shapes that coding agents send: accepted, obeyed or set aside, and said so."""

import json
import re
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from ostinato.protocol.dialects import DIALECTS, MESSAGES
from ostinato.server.state import ServerState
from tests.server.formats.conftest import prompt_and_answer, says
from tests.support.servers.prefix_probe import ENDPOINTS

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
    assert answer.headers[SET_ASIDE] == "claude-code-checksum"
    counted = http.post("/v1/messages/count_tokens?beta=true", json=claude_code())
    assert counted.json() == {"input_tokens": ENDPOINTS["/v1/messages"].total(answer.json())}


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
    response = tool_client.responses.create(stream=stream, **asked)
    if stream:
        events = list(response)
        inputs = [e for e in events if e.type.startswith("response.custom_tool_call_input")]
        assert [getattr(e, "delta", None) or e.input for e in inputs] == ['a "line"\n'] * 2
        response = events[-1].response
    [item] = response.output
    assert (item.type, item.name, item.input) == ("custom_tool_call", "apply_patch", 'a "line"\n')
    more = {**asked, "previous_response_id": response.id, "input": "Again.", "stream": False}
    assert tool_client.responses.create(**more).status == "completed"


LARK = """start: "say \\"" WORD "\\"" LF path
path: "a\\\\b"
WORD: /[xyz]{3}/
%import common.LF
"""


@pytest.mark.parametrize(
    ("syntax", "definition", "expected"),
    [("regex", "[0-9]{3}", "[0-9]{3}"), ("lark", LARK, r'say "[xyz]{3}"\na\\b')],
)
def test_a_grammar_binds_the_text_of_a_custom_tool(
    tool_client: openai.OpenAI, syntax: str, definition: str, expected: str
):
    """Quotes, line ends and backslashes of the text are written as JSON, and fit all the same."""
    tool: Any = {"type": "custom", "name": "code"}
    grammar = {"type": "grammar", "syntax": syntax, "definition": definition}
    response = tool_client.responses.create(
        model="scribe", input="Code?", tools=[{**tool, "format": grammar}], tool_choice=tool,
        max_output_tokens=200,
    )  # fmt: skip
    text = response.output[0].input
    assert re.fullmatch(expected, text), text


def test_a_grammar_that_is_not_enforced_is_named(http: httpx.Client):
    lark = 'start: "(" start ")" | "x"'
    tool = {"type": "custom", "name": "nest", "format": {
        "type": "grammar", "syntax": "lark", "definition": lark}}  # fmt: skip
    body = {"model": "scribe", "input": "Hi.", "tools": [tool], "max_output_tokens": 1}
    answer = http.post("/v1/responses", json=body)
    assert answer.status_code == 200 and answer.headers[IGNORED] == "tools[0].format"


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


def test_with_tool_choice_none_the_mark_of_a_call_is_not_sampled(tool_client: openai.OpenAI):
    """Not even where a bias asks for it; the prompt shows the tools, so a model might begin one."""
    tools: Any = [{"type": "function", "function": {"name": "now", "parameters": NOTHING}}]
    bias = {str(_token(tool_client, "<tool_call>")): 100}
    asked: Any = {"messages": [{"role": "user", "content": "Now."}], "tools": tools}
    for choice in ("auto", "none"):
        answer = tool_client.chat.completions.create(
            model="scribe", max_tokens=4, logit_bias=bias, tool_choice=choice, **asked
        )
        text = answer.choices[0].message.content or ""
        assert text.count("<tool_call>") == (4 if choice == "auto" else 0)


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


def test_a_value_that_nobody_knows_is_accepted_where_nothing_depends_on_it(http: httpx.Client):
    """Claude Code 2.1.332 sends ``display: updates`` first, and falls back after a 400."""
    body = claude_code()
    body["thinking"] |= {"display": "updates"}
    assert http.post(MESSAGES.path, json=body).status_code == 200
    item = {**CODEX["input"][0], "phase": "draft", "status": "queued"}
    body = {**CODEX, "input": [item], "include": ["reasoning.summary_of_tomorrow"]}
    answer = http.post("/v1/responses", json=body)
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("api", DIALECTS, ids=lambda api: api.path)
def test_what_would_change_the_answer_is_refused_by_place(http: httpx.Client, api):
    body = {**ENDPOINTS[api.path].body("x"), "max_tokens": 1, "model": "scribe"}
    for name in api.refused:
        answer = http.post(api.path, json={**body, name: "x"})
        assert answer.status_code == 400 and name in answer.json()["error"]["message"], name


PLACES: dict[str, tuple[str, dict[str, Any]]] = {
    "tools[0].strict": ("/v1/responses", {"tools": [
        {"type": "function", "name": "f", "strict": "yes"}]}),
    "tools[1].tools[0].name": ("/v1/responses", {"tools": [
        {"type": "web_search"},
        {"type": "namespace", "name": "n", "tools": [{"type": "function", "name": "a b"}]}]}),
    "tools[0].format.definition": ("/v1/responses", {"tools": [
        {"type": "custom", "name": "f", "format": {"type": "grammar", "syntax": "lark"}}]}),
    "input[1].call_id": ("/v1/responses", {"input": [
        {"type": "message", "role": "user", "content": "x"},
        {"type": "function_call", "name": "f", "arguments": "{}"}]}),
    "input[0].content[1].text": ("/v1/responses", {"input": [
        {"role": "user", "content": [{"type": "input_text", "text": "x"},
                                     {"type": "input_text", "text": 1}]}]}),
    "input[0].output": ("/v1/responses", {"input": [
        {"type": "function_call_output", "call_id": "c", "output": 3}]}),
    "text.format.schema": ("/v1/responses", {"text": {"format": {
        "type": "json_schema", "name": "s", "schema": 1}}}),
    "messages[0].content[1].text": ("/v1/chat/completions", {"messages": [
        {"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "text"}]}]}),
    "tools[0].function.name": ("/v1/chat/completions", {"tools": [
        {"type": "function", "function": {"name": "a b"}}]}),
    "response_format.json_schema.schema": ("/v1/chat/completions", {"response_format": {
        "type": "json_schema", "json_schema": {"name": "s", "schema": []}}}),
    "tools[1].strict": ("/v1/messages", {"tools": [
        {"type": "web_search_20250305"}, {"name": "f", "input_schema": {}, "strict": "yes"}]}),
    "messages[0].content[0].input": ("/v1/messages", {"messages": [
        {"role": "assistant", "content": [
            {"type": "tool_use", "id": "c", "name": "f", "input": "x"}]},
        {"role": "user", "content": "x"}]}),
    "messages[0].content[0].content[0].text": ("/v1/messages", {"messages": [
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c",
                                      "content": [{"type": "text", "text": 1}]}]}]}),
}  # fmt: skip


@pytest.mark.parametrize("place", PLACES)
def test_an_error_names_the_place_as_the_client_wrote_it(http: httpx.Client, place: str):
    """No names of alternatives that the server tried, such as ``tools[0].function.strict``."""
    path, wrong = PLACES[place]
    plain = {**ENDPOINTS[path].body("x"), ENDPOINTS[path].limit: 1, "model": "scribe"}
    error = http.post(path, json={**plain, **wrong}).json()["error"]
    assert error["message"].startswith((f"{place}: ", f"{place}=")), error
    assert error.get("param", place) == place


USED: dict[str, Any] = {"type": "tool_use", "id": "c", "name": "f", "input": {}}
TEXT = {"type": "text", "text": "x"}
CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"


def result_of(*content: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a call and its result in Anthropic's blocks."""
    result = {"type": "tool_result", "tool_use_id": "c", "content": [*content]}
    return [{"role": "assistant", "content": [USED]}, {"role": "user", "content": [result]}]


TAKEN: dict[str, tuple[str, list[dict[str, Any]], str, str]] = {
    # name: path, messages, words of the prompt, places of what is left out
    "a search that a service ran": (MESSAGES.path, [{"role": "assistant", "content": [
        {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"query": "q"}},
        {"type": "web_search_tool_result", "tool_use_id": "s", "content": []},
        {**TEXT, "citations": [{"type": "web_search_result_location", "url": "u"}]}]}],
        "[assistant] x", "messages[1].content[0], messages[1].content[1]"),
    "a document of text": (MESSAGES.path, [{"role": "user", "content": [
        {"type": "document", "title": "Rain", "citations": {"enabled": False},
         "source": {"type": "text", "media_type": "text/plain", "data": "It rains."}}, TEXT]}],
        "Rain\nIt rains.\nx", "messages[1].content[0].source.media_type"),
    "a document of pieces, as a result": (MESSAGES.path, result_of(
        {"type": "document", "source": {"type": "content", "content": [TEXT, TEXT]}}), "xx\n", ""),
    "what a search of the client's returned": (MESSAGES.path, result_of(
        {"type": "search_result", "source": "a/b", "title": "Snow", "content": [TEXT]}),
        "Snow\na/b\nx\n", ""),
    "a tool that a search of the client's returned": (MESSAGES.path, result_of(
        {"type": "tool_reference", "tool_name": "find_snow"}), "find_snow\n", ""),
    "an answer of reasoning alone": (CHAT, [
        {"role": "assistant", "content": None, "reasoning": "Hm."}], "[assistant]", ""),
    "a result without content": (CHAT, [
        {"role": "assistant", "content": None, "tool_calls": [
            {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}]},
        {"role": "tool", "tool_call_id": "c", "content": None}], "[tool]", ""),
    "a refusal, and where a text is from": (CHAT, [
        {"role": "assistant", "content": None, "refusal": "No.", "annotations": [{"type": "u"}]}],
        "[assistant] No.", ""),
    "a part that refuses": (RESPONSES, [{"type": "message", "role": "assistant", "content": [
        {"type": "refusal", "refusal": "No."},
        {"type": "output_text", "text": "x", "annotations": [{"type": "u"}], "logprobs": [{}]}]}],
        "[assistant] No.x", ""),
    "a shell that is left out": (RESPONSES, [
        {"type": "local_shell_call", "call_id": "c", "action": {"type": "exec"}},
        {"type": "local_shell_call_output", "id": "c", "output": "done"}],
        "Hello.", "input[1], input[2]"),
    "a call of a custom tool in a namespace": (RESPONSES, [
        {"type": "custom_tool_call", "call_id": "c", "name": "f", "namespace": "n", "input": "x"},
        {"type": "custom_tool_call_output", "call_id": "c", "output": "y"}], "CALL n__f", ""),
}  # fmt: skip


@pytest.mark.parametrize("name", TAKEN)
def test_what_other_vendors_left_in_a_conversation_is_taken(
    tool_scribe: tuple[str, ServerState], name: str
):
    """A conversation that began with another vendor's model continues here, and says the same."""
    path, later, words, left_out = TAKEN[name]
    hello = {"role": "user", "content": "Hello."}
    turns = [hello, *later, *([hello] if later[-1].get("role") == "assistant" else [])]
    field = "input" if path == RESPONSES else "messages"
    body = {"model": "scribe", field: turns, "keep_tokens": False}
    limit = "max_output_tokens" if path == RESPONSES else "max_tokens"
    prompt, answer = prompt_and_answer(tool_scribe, path, {**body, limit: 1})
    assert answer.status_code == 200, answer.text
    assert answer.headers.get(IGNORED, "") == left_out
    assert words in prompt


def test_tools_that_a_service_runs_are_left_out_of_a_chat(http: httpx.Client):
    """As in the other APIs; a tool that the client runs and cannot be shown is refused."""
    body: dict[str, Any] = {"model": "scribe", "messages": [{"role": "user", "content": "Hi."}]}
    answer = http.post(CHAT, json={**body, "max_tokens": 1, "tools": [{"type": "web_search"}]})
    assert answer.status_code == 200 and answer.headers[IGNORED] == "tools[0]"
    custom = {"type": "custom", "custom": {"name": "patch"}}
    error = http.post(CHAT, json={**body, "tools": [custom]}).json()["error"]
    assert error["param"] == "tools[0].type"


def test_a_custom_tool_in_a_namespace_is_called_by_both_names(tool_client: openai.OpenAI):
    form = {"type": "grammar", "syntax": "lark", "definition": 'start: "(" start ")"'}
    patch = {"type": "custom", "name": "patch", "format": form}
    tools: Any = [{"type": "namespace", "name": "files", "tools": [patch]}]
    call = '<tool_call>\n{"name": "files__patch", "arguments": {"input": "x"}}\n</tool_call>'
    answer = tool_client.responses.with_raw_response.create(
        model="scribe", input="Patch.", tools=tools, extra_body=says(call), truncation="auto"
    )
    assert answer.headers[IGNORED] == "tools[0].tools[0].format"
    [item] = answer.parse().output
    assert (item.type, item.namespace, item.name, item.input) == (
        "custom_tool_call", "files", "patch", "x")  # fmt: skip


def test_the_older_name_of_a_format_binds_an_answer_of_messages(http: httpx.Client):
    schema = {"type": "object", "properties": {"a": {"const": 7}}, "required": ["a"]}
    form = {"type": "json_schema", "schema": schema}
    body = {"model": "scribe", "max_tokens": 60, "messages": [{"role": "user", "content": "x"}]}
    answer = http.post(MESSAGES.path, json={**body, "output_format": form}).json()
    assert json.loads(answer["content"][0]["text"]) == {"a": 7}


def test_a_lease_lasts_as_long_as_the_cache_options_say(http: httpx.Client):
    body = {"model": "scribe", "input": "Keep this text. " * 10, "max_output_tokens": 1}
    kept = http.post("/v1/responses", json={**body, "prompt_cache_options": {"ttl": "30m"}})
    assert kept.json()["usage"]["input_tokens_details"]["retained_tokens"] > 0
    for ttl in ("0m", "25h", "soon"):
        wrong = http.post("/v1/responses", json={**body, "prompt_cache_options": {"ttl": ttl}})
        assert wrong.json()["error"]["param"] == "prompt_cache_options.ttl"


SHARED = "Keep the rules of this long text in mind, whatever is said later. " * 6


@pytest.mark.parametrize(
    ("mark", "ttl_s"),
    [
        ({"prompt_cache_breakpoint": {"mode": "explicit"}}, 2700),
        ({"prompt_cache_breakpoint": {"mode": "explicit", "ttl": "12h"}}, 12 * 3600),
        ({"cache_control": {"type": "ephemeral"}}, 300),
    ],
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses"])
def test_a_mark_of_a_part_leases_the_prompt_up_to_it(
    http: httpx.Client, path: str, mark: Any, ttl_s: int
):
    """What follows the mark is not leased; the mode ``explicit`` leases nothing else."""
    salt = f"{path} {mark}"
    kind = "text" if "chat" in path else "input_text"
    parts = [{"type": kind, "text": SHARED, **mark}, {"type": kind, "text": "And now? " * 20}]
    turns = [{"role": "user", "content": parts}]
    body: dict[str, Any] = {
        "model": "scribe", "cache_salt": salt,
        "prompt_cache_options": {"mode": "explicit", "ttl": "45m"},
        **({"messages": turns, "max_tokens": 1} if "chat" in path
           else {"input": turns, "max_output_tokens": 1}),
    }  # fmt: skip
    answer = http.post(path, json=body).json()
    num_prompt, usage = ENDPOINTS[path].total(answer), answer["usage"]
    details = usage.get("prompt_tokens_details") or usage["input_tokens_details"]
    assert 0.5 * num_prompt < details["retained_tokens"] < 0.9 * num_prompt
    assert details["cache_write_tokens"] == num_prompt
    [lease] = [
        lease
        for lease in http.get("/admin/leases").json()["leases"]
        if ttl_s - 60 < lease["expires_in_s"] <= ttl_s
        and lease["num_tokens"] == details["retained_tokens"]
    ]
    http.delete(f"/admin/leases/{lease['lease_id']}")


def test_of_many_marks_the_last_four_are_leased_and_none_is_an_error(http: httpx.Client):
    parts = [
        {"type": "text", "text": f"Part {n}. ", "prompt_cache_breakpoint": {}} for n in range(60)
    ]
    body = {"model": "scribe", "messages": [{"role": "user", "content": parts}], "max_tokens": 1}
    answer = http.post("/v1/chat/completions", json={**body, "cache_salt": "many"})
    assert answer.status_code == 200, answer.text
    assert IGNORED not in answer.headers


def test_what_is_not_published_counts_as_not_written(http: httpx.Client):
    body = {"model": "scribe", "messages": [{"role": "user", "content": "Once."}], "max_tokens": 1}
    for write in (False, True):
        answer = http.post("/v1/chat/completions", json={**body, "cache": {"write": write}})
        usage = answer.json()["usage"]
        written = usage["prompt_tokens"] - usage["prompt_tokens_details"]["cached_tokens"]
        expected = written if write else 0
        assert usage["prompt_tokens_details"]["cache_write_tokens"] == expected


@pytest.mark.parametrize("method", ["GET", "POST"])
def test_a_path_of_the_api_is_no_response_id(http: httpx.Client, method: str):
    answer = http.request(method, "/v1/responses/compact", json={})
    assert answer.status_code == 404 and "is not served" in answer.json()["error"]["message"]
    wrong = http.get("/v1/responses/input_tokens")
    assert (wrong.status_code, wrong.headers["allow"]) == (405, "POST")
    counted = http.post("/v1/responses/input_tokens", json=CODEX).json()
    assert counted["object"] == "response.input_tokens" and counted["input_tokens"] > 20


def test_a_field_with_an_empty_name_leaves_a_valid_header(http: httpx.Client):
    """An empty name would end the header with a space, which is no valid header."""
    body = {"model": "scribe", "input": "Hello.", "x": 1, "": 1}
    answer = http.post("/v1/responses/input_tokens", json=body)
    assert answer.status_code == 200, answer.text
    assert answer.headers[IGNORED] == "x, ?"
