"""Finds request, time, tenant and response in a log record.

Gateways wrap the body of a request into objects of their own, sometimes as a string. The body is
the innermost object with ``messages``, ``input`` or ``prompt``.
"""

import json
from collections.abc import Collection, Mapping, Sequence
from datetime import UTC, datetime
from math import isfinite
from typing import Any

from ostinato.errors import BrokenTrace
from ostinato.lab.log.request_formats import is_request

_BODIES = (
    "body", "request_body", "requestBody", "raw_request_body", "proxy_server_request", "request",
    "params", "input", "inputBodyJson", "data", "kwargs", "payload", "json",
)  # fmt: skip
_RESPONSES = ("answer", "response_body", "responseBody", "response", "output", "completion")
TIMES = (
    "timestamp", "time", "ts", "created_at", "createdAt", "request_created_at", "startTime",
    "start_time", "created",
)  # fmt: skip
TENANTS = ("tenant", "api_key_id", "organization", "cache_salt")
USERS = ("user", "safety_identifier", "end_user", "request_user_id")

_WORDS_AROUND = """
    answer api_key_id cache_hit call_type completion completionStartTime completion_tokens
    created createdAt created_at custom_id duration duration_ms endTime end_time end_user
    finish_reason id key latency latency_ms line method model_group model_id object organization
    organization_id output output_tokens path prompt_tokens provider request_created_at
    request_id request_tags request_user_id requester_ip_address response responseBody
    response_body response_cost session_id span_id spend startTime start_time status status_code
    team_id tenant time timestamp total_tokens trace_id ts url usage
"""
_AROUND = frozenset(_WORDS_AROUND.split())
"""Fields that logs add to the body of a request."""

_MAX_NESTING = 4
_SHOWN_FIELDS = 8


def load_json(data: bytes | str) -> Any:
    """Read JSON; halves of letters, which a string cut in JavaScript ends with, are replaced.

    Raises:
        ValueError: It is no JSON, or not UTF-8.
    """
    text = data.decode() if isinstance(data, bytes) else data
    value = json.loads(text)
    return _without_halves(value) if "\\ud" in text.lower() else value


def _without_halves(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, dict):
        return {_without_halves(k): _without_halves(v) for k, v in value.items()}
    return [_without_halves(item) for item in value] if isinstance(value, list) else value


def find_body(whole: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a record, the objects inside it, and last the body of the request.

    Raises:
        BrokenTrace: There is none.
    """
    path = _search(whole, 0)
    if path is None:
        names = ", ".join(list(whole)[:_SHOWN_FIELDS]) or "no fields"
        raise BrokenTrace(
            "there is no request in it: neither 'messages' nor 'input' nor 'prompt', nor an "
            f"object with one of them, such as 'body' or 'request_body'; it has {names}"
        )
    return path


def _search(value: dict[str, Any], depth: int) -> list[dict[str, Any]] | None:
    for name in _BODIES if depth < _MAX_NESTING else ():
        inner = value.get(name)
        if name != "input":  # which may be a text of the responses API
            inner = _parsed(inner, name)
        if isinstance(inner, dict) and (path := _search(inner, depth + 1)) is not None:
            return [value, *path]
    if not is_request(value):
        return None
    parameters = value.get("model_parameters")
    if isinstance(parameters, dict):  # litellm logs them beside the messages
        named = {name: value[name] for name in ("model", "messages") if name in value}
        return [value, {**parameters, **named}]
    return [value] if depth else [value, {k: v for k, v in value.items() if k not in _AROUND}]


def _parsed(value: Any, name: str) -> Any:
    """Return a value; an object that was logged as a string is read."""
    if not isinstance(value, str) or not value.lstrip().startswith("{"):
        return value
    try:
        return load_json(value)
    except ValueError as error:
        raise BrokenTrace(f"{name} is no JSON: {error}") from error


def find_response(whole: Mapping[str, Any], ignored: Collection[str]) -> Any:
    """Return the answer that was logged with a request: a text, a response's body, or None."""
    name = next((n for n in _RESPONSES if n not in ignored and whole.get(n)), None)
    if name is None:
        return None
    value = _parsed(whole[name], name)
    while isinstance(value, dict):
        inner = next((n for n in ("body", "response_body", "outputBodyJson") if value.get(n)), None)
        if inner is None:
            return None if value.get("error") else value
        value = _parsed(value[inner], inner)
    if name in ("answer", "completion") and isinstance(value, str):
        return value
    raise BrokenTrace(f"{name} is no response of an API; leave it out with --ignore {name}")


def first_text(objects: Sequence[Mapping[str, Any]], names: Sequence[str]) -> str:
    """Return the first field of these names that is a text; empty if there is none."""
    texts = (o[name] for o in objects for name in names if isinstance(o.get(name), str))
    return next(texts, "")


def seconds_of(moment: object) -> float | None:
    """Read a time: ISO 8601, or seconds to nanoseconds since 1970."""
    if isinstance(moment, bool) or moment is None:
        return None
    try:
        number = float(str(moment))
    except ValueError:
        number = None
    if number is not None and isfinite(number):
        return number / next((unit for unit in (1e9, 1e6, 1e3) if number > 1e8 * unit), 1)
    try:
        parsed = datetime.fromisoformat(str(moment))
    except ValueError as error:
        raise BrokenTrace(f"timestamp={moment!r} is neither a number nor ISO 8601") from error
    return (parsed if parsed.tzinfo else parsed.replace(tzinfo=UTC)).timestamp()
