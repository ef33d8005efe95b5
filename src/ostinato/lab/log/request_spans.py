"""Requests in what tracing tools export: each becomes a record as gateways write it.

* LangSmith's runs: ``inputs`` are a request's body, or LangChain's messages
* OpenTelemetry's spans with the GenAI conventions: ``gen_ai.input.messages`` and its neighbours,
  as one span, or many in an OTLP export
* Langfuse's observations: ``input`` is a body, messages or a text

Runs, spans and observations that call no model are left out.

Sources: the schemas of LangSmith's ``Run`` and Langfuse's ``Observation``; the OpenTelemetry
semantic conventions for generative AI, v1.37 and later.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from ostinato.errors import BrokenTrace
from ostinato.lab.log.request_fields import SETTINGS, shown

Record = dict[str, Any]

_IN_BODY = frozenset({"tools", "functions", "tool_choice", *SETTINGS})
_LANGFUSE_TYPES = frozenset(
    [
        "GENERATION", "SPAN", "EVENT", "AGENT", "TOOL", "CHAIN", "RETRIEVER", "EVALUATOR",
        "EMBEDDING", "GUARDRAIL",
    ]
)  # fmt: skip
_MODEL_CALLS = ("chat", "text_completion", "generate_content")
_TIMES = ("start_time", "startTime", "startTimeUnixNano", "start_time_unix_nano")
_ROLES = {"human": "user", "ai": "assistant", "model": "assistant"}


def records_of(whole: Record) -> list[Record]:
    """Return the requests of a record, as gateways write them; itself if it is no span.

    Raises:
        BrokenTrace: It called a model, and what was sent is missing or not understood.
    """
    try:
        return _records(whole)
    except (AttributeError, KeyError, TypeError, ValueError, IndexError) as error:
        raise BrokenTrace(f"a run, span or observation is not understood: {error}") from error


def _records(whole: Record) -> list[Record]:
    if "run_type" in whole and "inputs" in whole:
        return _of_run(whole) if whole["run_type"] == "llm" else []
    if "resourceSpans" in whole:
        spans = [span for scope in _scopes(whole) for span in scope.get("spans") or ()]
        return [record for span in spans for record in _of_span(span, _attributes(span))]
    if "attributes" in whole and {"span_id", "spanId", "context"} & whole.keys():
        return _of_span(whole, _attributes(whole))
    if {"traceId", "trace_id"} & whole.keys() and whole.get("type") in _LANGFUSE_TYPES:
        return _of_observation(whole) if whole["type"] == "GENERATION" else []
    return [whole]


def _of_run(run: Record) -> list[Record]:
    """Read a run of LangSmith."""
    inputs, extra = _json(run["inputs"]), run.get("extra") or {}
    if not isinstance(inputs, Mapping):
        raise BrokenTrace(f"inputs must be an object, not {shown(inputs)}")
    parameters = extra.get("invocation_params") or {}
    metadata = extra.get("metadata") or {}
    model = parameters.get("model") or parameters.get("model_name") or metadata.get("ls_model_name")
    body = {**_of_parameters(parameters), **({"model": model} if model else {}), **inputs}
    if isinstance(prompts := body.pop("prompts", None), list):
        body["prompt"] = prompts
    messages = body.get("messages")
    if isinstance(messages, list):
        if messages and isinstance(messages[0], list):  # LangChain's batch of one
            messages = messages[0]
        body["messages"] = [_of_langchain(message) for message in messages]
    return [_record(run, body, _generated(_json(run.get("outputs"))), metadata.get("user_id"))]


def _generated(outputs: Any) -> Any:
    """Return the response of a run, with the first of LangChain's generations as its message."""
    generations = outputs.get("generations") if isinstance(outputs, Mapping) else None
    if not isinstance(generations, list) or not generations:
        return outputs
    first = generations[0]
    first = first[0] if isinstance(first, list) and first else first
    if not isinstance(first, Mapping):
        return None
    return _of_langchain(first["message"]) if first.get("message") else first.get("text")


def _of_langchain(message: Any) -> Any:
    """Return a message of LangChain in OpenAI's form; one that has a role stays."""
    if not isinstance(message, Mapping) or "role" in message:
        return message
    inner = message.get("kwargs") or message.get("data") or message
    name = str(inner.get("type") or message.get("type") or "")
    if name in ("", "constructor"):
        name = str((message.get("id") or [""])[-1])
    name = name.removesuffix("Chunk").removesuffix("Message").lower()
    content = inner.get("content")
    kinds = {part.get("type") for part in content if isinstance(part, Mapping)} if isinstance(
        content, list) else set()  # fmt: skip
    written = {"role": _ROLES.get(name, name), "content": content}
    calls = [_call(each) for each in inner.get("tool_calls") or ()]
    if calls and "tool_use" not in kinds:
        written["tool_calls"] = calls
    return written | {n: inner[n] for n in ("tool_call_id", "name") if inner.get(n)}


def _call(call: Mapping[str, Any]) -> Record:
    given = call.get("arguments") if "arguments" in call else call.get("args")
    text = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
    function = {"name": call.get("name"), "arguments": text}
    return {"type": "function", "id": str(call.get("id") or ""), "function": function}


def _of_observation(observation: Record) -> list[Record]:
    """Read a generation of Langfuse."""
    sent = _json(observation.get("input"))
    if not sent:
        raise BrokenTrace("input is empty: record what is sent to the model")
    body = dict(sent) if isinstance(sent, Mapping) else {}
    if isinstance(sent, str):
        body["prompt"] = sent
    elif isinstance(sent, list):
        body["messages"] = sent
    elif "role" in body:
        body = {"messages": [sent]}
    if isinstance(body.get("messages"), list):
        body["messages"] = [_of_langchain(message) for message in body["messages"]]
    names = ("modelParameters", "model_parameters")
    parameters: Any = next((_json(observation[n]) for n in names if observation.get(n)), {})
    model = observation.get("model") or observation.get("provided_model_name")
    body = {**_of_parameters(parameters), **({"model": model} if model else {}), **body}
    user = observation.get("userId") or observation.get("user_id")
    return [_record(observation, body, _json(observation.get("output")), user)]


def _of_span(span: Record, attributes: Record) -> list[Record]:
    """Read a span of OpenTelemetry, if it calls a model."""
    if attributes.get("gen_ai.operation.name") not in _MODEL_CALLS:
        return []
    messages = _json(attributes.get("gen_ai.input.messages"))
    system = _json(attributes.get("gen_ai.system_instructions")) or []
    if not isinstance(messages, list):
        raise BrokenTrace(
            "attributes has no gen_ai.input.messages: let the instrumentation record content"
        )
    written = [each for message in messages for each in _of_parts(message)]
    if system:
        written = [*_of_parts({"role": "system", "parts": system}), *written]
    body: Record = {"messages": written, "model": attributes.get("gen_ai.request.model")}
    if tools := _json(attributes.get("gen_ai.tool.definitions")):
        body["tools"] = tools
    outputs = _json(attributes.get("gen_ai.output.messages"))
    answers = _of_parts(outputs[0]) if isinstance(outputs, list) and outputs else [None]
    return [
        _record(span, body, answers[0], attributes.get("user.id") or attributes.get("enduser.id"))
    ]


def _of_parts(message: Any) -> list[Record]:
    """Return a message of the GenAI conventions in OpenAI's form; results have their own."""
    if not isinstance(message, Mapping) or not isinstance(message.get("parts"), list):
        raise BrokenTrace(f"gen_ai messages have a role and parts, not {shown(message)}")
    role = _ROLES.get(str(message.get("role")), message.get("role"))
    written: Record = {"role": role, "content": []}
    results = []
    for part in message["parts"]:
        kind = part.get("type")
        if kind == "text":
            written["content"].append({"type": "text", "text": part.get("content") or ""})
        elif kind == "tool_call":
            written.setdefault("tool_calls", []).append(_call(part))
        elif kind == "tool_call_response":
            result = part.get("response", part.get("result"))
            text = result if isinstance(result, str) else json.dumps(result, ensure_ascii=False)
            results.append({"role": "tool", "tool_call_id": part.get("id"), "content": text})
        elif kind == "reasoning":
            written["reasoning_content"] = part.get("content")
        else:  # a blob, a file or a URI
            written["content"].append({**part, "type": "file"})
    has_more = written["content"] or len(written) > 2
    return [*results, *([written] if has_more or not results else [])]


def _scopes(whole: Record) -> Iterator[Record]:
    for resource in whole["resourceSpans"] or ():
        yield from resource.get("scopeSpans") or ()


def _attributes(span: Record) -> Record:
    """Return the attributes of a span and of its events, plain or as OTLP writes them."""
    record_fields: Record = {}
    for holder in (*(span.get("events") or ()), span):
        given = holder.get("attributes") or {}
        if isinstance(given, Mapping):
            record_fields |= given
        else:
            record_fields |= {each["key"]: _otlp_value(each.get("value") or {}) for each in given}
    return record_fields


def _otlp_value(value: Mapping[str, Any]) -> Any:
    """Return a value of OTLP's JSON."""
    pairs: list[tuple[str, Any]] = [*value.items(), ("", None)]
    kind, inner = pairs[0]
    if kind == "arrayValue":
        return [_otlp_value(each) for each in inner.get("values") or ()]
    if kind == "kvlistValue":
        return {each["key"]: _otlp_value(each["value"]) for each in inner.get("values") or ()}
    return inner


def _of_parameters(parameters: Any) -> Record:
    """Return what reaches the prompt of the parameters that a tool recorded."""
    given = parameters if isinstance(parameters, Mapping) else {}
    return {name: value for name, value in given.items() if name in _IN_BODY}


def _record(span: Record, body: Record, answer: Any, user: Any) -> Record:
    """Return a record as gateways write it."""
    at = next((span[name] for name in _TIMES if span.get(name)), None)
    record: Record = {"body": body, "timestamp": at}
    if isinstance(answer, Mapping) and "role" in answer:
        answer = {"choices": [{"message": answer}]}
    if isinstance(answer, str):
        record["answer"] = answer
    elif isinstance(answer, Mapping) and {"choices", "output", "content"} & answer.keys():
        record["response"] = answer
    return record | ({"user": user} if isinstance(user, str) else {})


def _json(value: Any) -> Any:
    """Return a value that may be logged as JSON text."""
    if not isinstance(value, str) or value[:1] not in ("{", "["):
        return value
    try:
        return json.loads(value)
    except ValueError:
        return value
