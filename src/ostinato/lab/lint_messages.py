"""What changes inside messages, before what requests share?

A time above a document, a result that is stamped anew whenever it is sent: all behind it is
computed again. Messages of users and tools are no template, so what changes in them is known by
its looks alone. It may be part of what somebody said, and it may stay what it was: the replay
tells, for what saves nothing when it is moved to the tail is no finding.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from ostinato.lab.lint_remedies import Remedy, is_plain, messages_of, with_messages, with_tail
from ostinato.lab.lint_templates import EPOCH, MONTHS, UUID, Group
from ostinato.lab.request_log import LoggedRequest

_CLOCK = r"\d{1,2}:\d{2}(?::\d{2}(?:\.\d+)?)?(?: ?[ap]m\b)?(?:Z\b|[+-]\d{2}:?\d{2}\b)?"
_DAY = (
    rf"\d{{4}}-\d\d-\d\d|\d\d?[./]\d\d?[./]\d{{4}}|\d\d?\.? (?:{MONTHS})[a-z]*\.? \d{{4}}|"
    rf"(?:{MONTHS})[a-z]*\.? \d\d?,? \d{{4}}"
)
_CHANGING: dict[str, re.Pattern[str]] = {
    "timestamp": re.compile(rf"(?:\b(?:{_DAY})[T ,]+)?\b{_CLOCK}|{EPOCH.pattern}", re.IGNORECASE),
    "date": re.compile(rf"\b(?:{_DAY})(?![T ,]+\d\d?:)", re.IGNORECASE),
    "id": re.compile(
        rf"\b(?:{UUID.pattern})\b|\b(?=[0-9a-f]*\d)[0-9a-f]{{16,64}}\b|"
        r"\b(?:req|request|sess|session|trace|run|call|msg)[-_](?=\w*\d)\w{6,}\b",
        re.IGNORECASE,
    ),
    "counter": re.compile(
        r"#\d+\b|\b(?:request|turn|message|step|attempt|ticket|visit|call|number)"
        r"(?: no\.?)?[ :=]+#?\d+\b",
        re.IGNORECASE,
    ),
}
"""What changes from request to request, by kind."""

_ADVICE: dict[str, str] = {
    "timestamp": "put the time behind what requests share: at the end of the last message, not "
    "before a text or in results that are sent again",
    "date": "put the date behind what requests share: at the end of the last message",
    "id": "leave ids out of what is sent to the model, or put them at the end of the last message",
    "counter": "put the counter behind what requests share: at the end of the last message",
}


def message_remedies(group: Group) -> list[Remedy]:
    """Make one remedy per kind of thing that changes inside messages of users and of tools."""
    remedies = []
    for kind, pattern in _CHANGING.items():
        found = [
            (f"messages[{place}] ({message['role']})", match.group())
            for request in group.requests
            for place, message in _said_to_the_model(request)
            for match in pattern.finditer(message["content"])
        ]
        if not found:
            continue

        def rewrite(
            requests: Sequence[LoggedRequest], pattern: re.Pattern[str] = pattern
        ) -> list[LoggedRequest]:
            return [_messages_to_tail(request, pattern) for request in requests]

        examples = tuple(dict.fromkeys(value for where, value in found if where == found[0][0]))
        remedies.append(
            Remedy(f"message_{kind}", _ADVICE[kind], rewrite, found[0][0], examples[:3])
        )
    return remedies


def _said_to_the_model(request: LoggedRequest) -> list[tuple[int, Mapping[str, Any]]]:
    """List the messages in plain text of users and tools, with their places."""
    said = enumerate(messages_of(request))
    return [(i, m) for i, m in said if m["role"] in ("user", "tool", "function") and is_plain(m)]


def _messages_to_tail(request: LoggedRequest, pattern: re.Pattern[str]) -> LoggedRequest:
    """Take what matches out of users' and tools' messages, and put it behind the last message."""
    messages, values = list(messages_of(request)), list[str]()
    for place, message in _said_to_the_model(request):
        found = [match.group() for match in pattern.finditer(message["content"])]
        if found:
            values += found
            messages[place] = {**message, "content": pattern.sub("", message["content"])}
    return with_tail(with_messages(request, messages), values) if values else request
