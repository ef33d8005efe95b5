"""What does a log of requests hold?

JSON lines, each a request to an OpenAI-compatible server: the body alone, or an object around
it, as OpenAI's batch files and most gateways write it::

    {"model": "m", "messages": [...]}
    {"timestamp": 1732190400.25, "tenant": "ann", "body": {"messages": [...]}, "answer": "..."}

A prompt is rendered by whoever reads the log, since templates belong to models; without one the
fields stand in plain text one after the other, tools first.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from ostinato.core.errors import BrokenTrace
from ostinato.lab.lines import BrokenLine, OnBroken, read_lines

Render = Callable[[Mapping[str, Any]], str]
"""From a request's body to the text of its prompt."""

Encode = Callable[[str], list[int]]
"""From a text to token ids."""

_TIMES = ("timestamp", "time", "ts", "created_at", "created")
_BODIES = ("body", "request")
_TENANTS = ("tenant", "api_key_id", "organization", "cache_salt")


@dataclass(frozen=True, slots=True)
class LoggedRequest:
    """One request of a log.

    Attributes:
        line: Its line, counted from 1; blank lines do not count.
        body: As it was sent.
        at_s: When, in seconds; None if the log does not say.
        tenant: Whose it is; empty for all who are not told apart.
        answer: What was answered; empty if the log does not say.
    """

    line: int
    body: Mapping[str, Any]
    at_s: float | None = None
    tenant: str = ""
    answer: str = ""


@dataclass(frozen=True, slots=True)
class RequestLog:
    """A log of requests, in the order of its lines.

    Attributes:
        name: Of the file.
        requests: In order.
        broken: Lines that were left out.
    """

    name: str
    requests: tuple[LoggedRequest, ...]
    broken: tuple[BrokenLine, ...] = ()


def read_request_log(path: str | Path, on_broken: OnBroken = "refuse") -> RequestLog:
    """Read a log of requests.

    Raises:
        BrokenTrace: A line is no request, and is not to be skipped; it is named.
    """
    path = Path(path)
    number = 0

    def parse(line: bytes) -> LoggedRequest:
        nonlocal number
        number += 1
        return parse_request(line, number)

    lines = read_lines(path, parse, on_broken)
    return RequestLog(path.name, tuple(lines.items), lines.broken)


def parse_request(line: bytes | str, number: int) -> LoggedRequest:
    """Read one line.

    Raises:
        BrokenTrace: It is no JSON object, or there is neither a prompt nor messages in it.
    """
    try:
        whole = json.loads(line)
    except ValueError as error:
        raise BrokenTrace(f"it is no JSON: {error}") from error
    if not isinstance(whole, dict):
        raise BrokenTrace(f"a request must be an object, not {type(whole).__name__}")
    inner = next((whole[name] for name in _BODIES if isinstance(whole.get(name), dict)), None)
    body = whole if inner is None else inner
    if not isinstance(body.get("messages"), list) and not isinstance(body.get("prompt"), str):
        raise BrokenTrace("it has neither 'messages' nor a 'prompt' that is a text")
    for place, message in enumerate(body.get("messages") or ()):
        if not isinstance(message, dict) or "role" not in message:
            raise BrokenTrace(f"messages[{place}] is no object with a 'role'")
    answer = whole.get("answer")
    return LoggedRequest(
        number,
        body,
        _seconds(next((whole[name] for name in _TIMES if name in whole), None)),
        next((whole[n] for n in _TENANTS if isinstance(whole.get(n), str)), ""),
        answer if isinstance(answer, str) else "",
    )


def fields_of_body(body: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    """Name the texts of a request, in the order in which they are rendered plainly."""
    if isinstance(body.get("prompt"), str):
        return (("prompt", body["prompt"]),)
    fields = []
    if body.get("tools"):
        fields.append(("tools", json.dumps(body["tools"], ensure_ascii=False)))
    for place, message in enumerate(body["messages"]):
        name = f"messages[{place}] ({message['role']})"
        fields.append((name, text_of(message)))
    return tuple(fields)


def text_of(message: Mapping[str, Any]) -> str:
    """Return a message's text, that of its parts and its calls of tools included."""
    content = message.get("content")
    if isinstance(content, list):
        parts = [part.get("text") for part in content if isinstance(part, Mapping)]
        content = "".join(part for part in parts if isinstance(part, str))
    text = content if isinstance(content, str) else ""
    if message.get("tool_calls"):
        text += json.dumps(message["tool_calls"], ensure_ascii=False)
    return text


def render_plainly(body: Mapping[str, Any]) -> str:
    """Write a prompt without a model's template: every message behind a line with its role."""
    if isinstance(body.get("prompt"), str):
        return str(body["prompt"])
    parts = []
    if body.get("tools"):
        parts.append(f"<|tools|>\n{json.dumps(body['tools'], ensure_ascii=False)}\n")
    messages: Sequence[Mapping[str, Any]] = body["messages"]
    parts += [f"<|{message['role']}|>\n{text_of(message)}\n" for message in messages]
    return "".join([*parts, "<|assistant|>\n"])


def filled_times(times: Sequence[float | None]) -> list[float]:
    """Return a time for each line of a log.

    A line without one comes a second after the line before, those before the first that is known
    with it; where none is known, the log begins at 1.
    """
    first = next((place for place, at_s in enumerate(times) if at_s is not None), None)
    if first is None:
        return [float(number) for number in range(1, len(times) + 1)]
    now = times[first] or 0.0
    filled = [now] * first
    for at_s in times[first:]:
        now = now + 1 if at_s is None else at_s
        filled.append(now)
    return filled


def _seconds(moment: object) -> float | None:
    """Read a time: seconds or milliseconds since 1970, or ISO 8601."""
    if isinstance(moment, bool) or moment is None:
        return None
    if isinstance(moment, (int, float)):
        return moment / 1000 if moment > 1e11 else float(moment)
    try:
        return datetime.fromisoformat(str(moment)).timestamp()
    except ValueError as error:
        raise BrokenTrace(f"timestamp={moment!r} is neither a number nor ISO 8601") from error
