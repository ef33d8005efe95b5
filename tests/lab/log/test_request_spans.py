"""Requests are read out of what tracing tools export, without a field to ignore."""

import json
from pathlib import Path
from typing import Any

import pytest

from ostinato.errors import BrokenTrace
from ostinato.lab.log.request_log import LogOptions, iter_requests, parse_requests
from tests.cli.terminal import Terminal

SYSTEM, QUESTION, ANSWER = "You are a herald.", "Who is the king?", "Let me look."
ARGUMENTS = {"land": "Denmark"}
CALL = {"id": "c1", "type": "function"}
CALL["function"] = {"name": "look_up", "arguments": json.dumps(ARGUMENTS)}  # type: ignore[assignment]
TOOL = {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object"}}}
MESSAGES = [
    {"role": "system", "content": SYSTEM},
    {"role": "user", "content": QUESTION},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c1", "content": "Claudius"},
]
BODY = {"model": "bard", "messages": MESSAGES, "tools": [TOOL]}
REPLY = {"role": "assistant", "content": ANSWER}
START = "2026-05-04T10:00:00+00:00"


def langchain(kind: str, **fields: Any) -> dict[str, Any]:
    """A message as LangChain serialises it."""
    return {"lc": 1, "type": "constructor", "id": ["langchain", "schema", kind], "kwargs": fields}


LANGCHAIN = [
    langchain("SystemMessage", content=SYSTEM, type="system"),
    langchain("HumanMessage", content=QUESTION, type="human", additional_kwargs={}),
    langchain(
        "AIMessage",
        content="",
        tool_calls=[{"name": "look_up", "args": ARGUMENTS, "id": "c1", "type": "tool_call"}],
        response_metadata={"finish_reason": "tool_calls"},
    ),
    langchain("ToolMessage", content="Claudius", tool_call_id="c1", status="success"),
]
RUN = {"id": "r", "run_type": "llm", "name": "ChatBard", "start_time": START, "session_id": "s",
       "trace_id": "t", "dotted_order": "x", "status": "success", "tags": []}  # fmt: skip


def part(kind: str, **fields: Any) -> dict[str, Any]:
    return {"type": kind, **fields}


SPAN_MESSAGES = [
    {"role": "user", "parts": [part("text", content=QUESTION)]},
    {"role": "assistant", "parts": [part("tool_call", id="c1", name="look_up",
                                         arguments=ARGUMENTS)]},
    {"role": "tool", "parts": [part("tool_call_response", id="c1", response="Claudius")]},
]  # fmt: skip
ATTRIBUTES = {
    "gen_ai.operation.name": "chat",
    "gen_ai.provider.name": "bard_and_sons",
    "gen_ai.request.model": "bard",
    "gen_ai.request.temperature": 0.5,
    "gen_ai.system_instructions": [part("text", content=SYSTEM)],
    "gen_ai.input.messages": SPAN_MESSAGES,
    "gen_ai.tool.definitions": [TOOL],
    "gen_ai.output.messages": [
        {"role": "assistant", "parts": [part("text", content=ANSWER)], "finish_reason": "stop"}
    ],
    "gen_ai.usage.input_tokens": 40,
}
OTLP = [
    {"key": key, "value": {"stringValue": one if isinstance(one, str) else json.dumps(one)}}
    for key, one in ATTRIBUTES.items()
]
SPAN = {"name": "chat bard", "start_time": START, "end_time": START, "kind": "SpanKind.CLIENT",
        "context": {"trace_id": "0x1", "span_id": "0x2"}, "resource": {}}  # fmt: skip
OBSERVATION = {"id": "o", "traceId": "t", "type": "GENERATION", "name": "ask", "startTime": START,
               "model": "bard", "modelParameters": {"temperature": 0.5}, "level": "DEFAULT",
               "usage": {"input": 40}, "metadata": {"a": 1}, "environment": "default"}  # fmt: skip

RECORDS: dict[str, dict[str, Any]] = {
    "LangSmith, a body": RUN | {"inputs": BODY, "outputs": {"choices": [{"message": REPLY}]}},
    "LangSmith, LangChain's messages": RUN
    | {
        "inputs": {"messages": [LANGCHAIN]},
        "outputs": {"generations": [[{"text": ANSWER, "message": langchain(
            "AIMessage", content=ANSWER, type="ai")}]], "llm_output": None},
        "extra": {"invocation_params": {"model": "bard", "tools": [TOOL], "_type": "chat"}},
    },
    "OpenTelemetry, a span": SPAN | {"attributes": ATTRIBUTES},
    "OpenTelemetry, content in an event": SPAN
    | {
        "attributes": {"gen_ai.operation.name": "chat"},
        "events": [{"name": "gen_ai.client.inference.operation.details", "attributes": ATTRIBUTES}],
    },
    "OpenTelemetry, an export": {
        "resourceSpans": [{"resource": {}, "scopeSpans": [{"scope": {}, "spans": [
            {"spanId": "1", "startTimeUnixNano": "1777888800000000000", "attributes": OTLP},
            {"spanId": "2", "name": "GET", "attributes": []},
        ]}]}]
    },
    "Langfuse, a body": OBSERVATION | {"input": {k: v for k, v in BODY.items() if k != "model"},
                                       "output": REPLY},
    "Langfuse, JSON in a text": OBSERVATION
    | {"input": json.dumps({"messages": MESSAGES, "tools": [TOOL]}), "output": json.dumps(REPLY)},
    "Langfuse, messages": OBSERVATION | {"input": MESSAGES, "output": ANSWER,
                                         "modelParameters": {"tools": [TOOL]}},
}  # fmt: skip
OTHERS = [
    RUN | {"run_type": "chain", "inputs": {"question": QUESTION}},
    SPAN | {"attributes": {"gen_ai.operation.name": "execute_tool"}},
    OBSERVATION | {"type": "SPAN", "input": {"question": QUESTION}},
]


@pytest.mark.parametrize("name", RECORDS)
def test_a_request_is_the_same_whichever_tool_has_recorded_it(name: str):
    [plain] = parse_requests(json.dumps({"timestamp": START, "body": BODY}), 1)
    [found] = parse_requests(json.dumps(RECORDS[name]), 1)

    assert found.prompt.written() == plain.prompt.written()
    assert (found.model, found.at_s, found.answer) == ("bard", plain.at_s, ANSWER)


def test_what_calls_no_model_is_left_out(tmp_path: Path):
    log = tmp_path / "spans.jsonl"
    log.write_text("\n".join(map(json.dumps, [*OTHERS, *RECORDS.values()])))
    assert len([*iter_requests(log, LogOptions())]) == len(RECORDS)
    printed = Terminal().show("lint", str(log))
    assert printed.startswith(f"{len(RECORDS)} requests, 1 template")


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        (
            SPAN | {"attributes": {"gen_ai.operation.name": "chat"}},
            "let the instrumentation record",
        ),
        (OBSERVATION | {"input": None}, "input is empty"),
        (RUN | {"inputs": [QUESTION]}, "inputs must be an object"),
        (RUN | {"inputs": {"messages": [[langchain("Strange", content="a")]]}}, "role='strange'"),
        (SPAN | {"attributes": {**ATTRIBUTES, "gen_ai.input.messages": [5]}}, "a role and parts"),
        ({"resourceSpans": [5]}, "is not understood"),
    ],
)
def test_a_call_that_lacks_what_was_sent_is_refused(record: dict[str, Any], reason: str):
    with pytest.raises(BrokenTrace, match=reason):
        parse_requests(json.dumps(record), 1)
