"""Finds varying text before shared text inside messages.

After a time above a document, or a result with a new stamp each time, everything is computed again.
Messages of users and tools have no template, so varying text is recognized by its form alone. If it
is constant from turn to turn, moving it saves nothing in the replay, and there is no finding.
"""

import re
from collections.abc import Iterator
from dataclasses import replace

from ostinato.lab.lint.rewrites import Remedy, Rewrite, with_messages, with_tail
from ostinato.lab.lint.slots import EPOCH, MONTHS, UUID
from ostinato.lab.lint.templates import Group
from ostinato.lab.log.logged_prompt import Block, Message
from ostinato.lab.log.request_log import LoggedRequest

_CLOCK = r"\d{1,2}:\d{2}(?::\d{2}(?:\.\d+)?)?(?: ?[ap]m\b)?(?:Z\b|[+-]\d{2}:?\d{2}\b)?"
_DAY = (
    rf"\d{{4}}-\d\d-\d\d|\d\d?[./]\d\d?[./]\d{{4}}|\d\d?\.? (?:{MONTHS})[a-z]*\.? \d{{4}}|"
    rf"(?:{MONTHS})[a-z]*\.? \d\d?,? \d{{4}}"
)
_CHANGING: dict[str, re.Pattern[str]] = {
    "timestamp": re.compile(
        rf"(?:\b(?:{_DAY})(?:T|[ ,]+)|\b){_CLOCK}|{EPOCH.pattern}", re.IGNORECASE
    ),
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
    "user": re.compile(
        r"\b(?:user|customer|client|account|name|locale|language)(?:[ _-](?:name|id))?"
        r"(?: is|[:=]) *[^\n.,;<>]{1,40}",
        re.IGNORECASE,
    ),
}
"""Patterns of varying text, by kind."""

_ADVICE = {
    "timestamp": "Put the time at the end of the last message, not before a text that is sent "
    "again or into results of tools.",
    "date": "Put the date at the end of the last message.",
    "id": "Leave ids out of what is sent to the model, or put them at the end of the last message.",
    "counter": "Put the counter at the end of the last message.",
    "user": "Put what is specific to a user at the end of the last message.",
}


def message_remedies(group: Group) -> list[Remedy]:
    """Make one remedy per kind of thing that changes inside messages of users and of tools."""
    remedies = []
    for kind, pattern in _CHANGING.items():
        matches = [
            (f"{block.field} ({message.role})", match.group())
            for request in group.requests
            for message in request.prompt.messages
            for block in _texts(message)
            for match in pattern.finditer(block.text)
        ]
        if matches:
            where = matches[0][0]
            examples = tuple(dict.fromkeys(value for place, value in matches if place == where))
            rewrite = _to_tail(pattern)
            remedies.append(Remedy(f"message_{kind}", _ADVICE[kind], rewrite, where, examples[:3]))
    return remedies


def _texts(message: Message) -> Iterator[Block]:
    """Yield the texts that a user or a tool wrote."""
    if message.role in ("user", "tool"):
        yield from (block for block in message.blocks if block.kind == "text")


def _to_tail(pattern: re.Pattern[str]) -> Rewrite:
    """Make a rewriting that moves what matches in messages to the end of the last one."""

    def moved(request: LoggedRequest) -> LoggedRequest:
        messages, values = [], list[str]()
        for message in request.prompt.messages:
            changed = {}
            for block in _texts(message):
                if matches := [match.group() for match in pattern.finditer(block.text)]:
                    values += matches
                    changed[block] = replace(block, text=pattern.sub("", block.text))
            blocks = tuple(changed.get(block, block) for block in message.blocks)
            messages.append(replace(message, blocks=blocks))
        return with_tail(with_messages(request, messages), values) if values else request

    return lambda requests: [moved(request) for request in requests]
