"""The list of fixes that a sender could apply.

In the order in which they are applied, with those that concern the text of prompts. A fix that
changes nothing is skipped; one that saves nothing is not reported.

After a time above a document, or a result with a new stamp each time, everything is computed again.
Messages of users and tools have no template, so varying text in them is recognized by its form
alone. If it is constant from turn to turn, moving it saves nothing in the replay, and there is no
finding.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace

from ostinato.lab.lint.history import keep_reasoning, keep_window
from ostinato.lab.lint.keys import Order, reorder_json
from ostinato.lab.lint.order import (
    keep_call_ids,
    settle_tools,
    sort_documents,
    sort_examples,
    sort_tools,
    unite_tools,
)
from ostinato.lab.lint.rewrites import (
    Remedy,
    Rewrite,
    map_texts,
    with_messages,
    with_prompt,
    with_tail,
    without_spans,
)
from ostinato.lab.lint.rules import rules_for
from ostinato.lab.lint.slots import EPOCH, MONTHS, UUID, SlotKind, shortened
from ostinato.lab.lint.templates import Group, slot_spans
from ostinato.lab.log.logged_prompt import Block, Message
from ostinato.lab.log.request_log import LoggedRequest

_BLANKS, _LINE_ENDS, _GAPS = (
    re.compile(r"[ \t]+"),
    re.compile(r"[ \t]*\r?\n"),
    re.compile(r"\n{2,}"),
)
_AROUND_VALUES = " \t\n.,;:!?"

_SLOT_ADVICE: dict[SlotKind, str] = {
    "timestamp": "Move the time to the end of the last message, or leave it out.",
    "date": "Move the date to the end of the last message: it changes every prefix once a day.",
    "id": "Leave the id out of the prompt, or move it to the end of the last message.",
    "counter": "Move the counter to the end of the last message.",
    "nonce": "Leave the random value out, or move it to the end of the last message.",
    "user": "Put what is specific to a user after what all users share.",
    "wording": "Use one wording, or move what changes to the end of the last message.",
}


def remedies_for(group: Group) -> list[Remedy]:
    """List the fixes for a group, in the order of application."""
    fixed = [Remedy(kind, advice, rewrite, where) for kind, where, advice, rewrite in _REMEDIES]
    keys = Remedy("json_keys", _KEYS_ADVICE, lambda requests: keep_keys(requests, group.orders))
    place = [remedy.kind for remedy in fixed].index("white_space") + 1
    fixed.insert(place, keys)
    seam = Remedy("seam", _SEAM_ADVICE, None)
    of_template = [*_parameter_remedies(group), *_slot_remedies(group)]
    return [*fixed, *of_template, seam, *_message_remedies(group)]


def normalise_white_space(requests: Sequence[LoggedRequest]) -> list[LoggedRequest]:
    """Write white space in one way in all but the last message."""

    def normalised(text: str) -> str:
        lines = _LINE_ENDS.sub("\n", text)
        return _BLANKS.sub(" ", _GAPS.sub("\n\n", lines)).strip()

    return map_texts(requests, normalised)


def keep_keys(requests: Sequence[LoggedRequest], order: Order) -> list[LoggedRequest]:
    """Write JSON with its keys in one order, in texts, in calls of tools and in tools."""
    fixed = []
    for request in map_texts(requests, lambda text: reorder_json(text, order), ("text", "call")):
        prompt = request.prompt
        tools = tuple(replace(tool, text=reorder_json(tool.text, order)) for tool in prompt.tools)
        prompt = replace(prompt, tools=tools, settings=reorder_json(prompt.settings, order))
        fixed.append(with_prompt(request, prompt))
    return fixed


def _parameter_remedies(group: Group) -> list[Remedy]:
    """Make remedies for parameters that split the cache, where they change."""
    remedies = []
    settings = list(dict.fromkeys(request.prompt.settings for request in group.requests))
    if len(settings) > 1:
        advice = "Send the same value in all requests; what changes goes into the last message."
        examples = tuple(shortened(value) for value in settings[:3] if value)
        remedies.append(Remedy("settings", advice, _keep_settings, "parameters", examples))
    models = tuple(dict.fromkeys(request.model for request in group.requests))
    if len(models) > 1 and not _keep_to_their_model(group.requests):
        advice = (
            "Models share no cache. Keep each user or conversation on one model (an A/B test by "
            "user, not by request), and use one name for it."
        )
        remedies.append(Remedy("model", advice, _keep_model, "model", models[:3]))
    return remedies


def _keep_settings(requests: Sequence[LoggedRequest]) -> list[LoggedRequest]:
    first, fixed = requests[0].prompt.settings, []
    for request in requests:
        settings = request.prompt.settings
        if settings != first:
            request = with_prompt(request, replace(request.prompt, settings=first))
            request = with_tail(request, [settings] if settings else [])
        fixed.append(request)
    return fixed


def _keep_to_their_model(requests: Sequence[LoggedRequest]) -> bool:
    """Whether each user, or each conversation if users are not named, has one model."""
    models: dict[str, list[str]] = {}
    for request in requests:
        said = request.prompt.messages[request.prompt.num_leading :]
        models.setdefault(request.user or "".join(m.text for m in said[:1]), []).append(
            request.model
        )
    recurring = [names for names in models.values() if len(names) > 1]
    return 2 * len(recurring) >= len(models) and all(len(set(names)) == 1 for names in recurring)


def _keep_model(requests: Sequence[LoggedRequest]) -> list[LoggedRequest]:
    return [replace(request, model=requests[0].model) for request in requests]


def _slot_remedies(group: Group) -> list[Remedy]:
    """Make one remedy per kind of thing that changes in a template."""
    slots, by_kind = group.slots(), dict[SlotKind, list[int]]()
    for number, slot in enumerate(slots):
        by_kind.setdefault(slot.kind, []).append(number)
    remedies = []
    for kind, numbers in by_kind.items():
        first = slots[numbers[0]]
        values = dict.fromkeys(v.strip(_AROUND_VALUES) for v in first.values.values() if v)
        examples = tuple(shortened(value) for value in values)[:3]
        rewrite = _move_slots(group.words, numbers)
        rules = rules_for(kind, [slots[number] for number in numbers], group.requests)
        advice = _SLOT_ADVICE[kind]
        remedies.append(Remedy(kind, advice, rewrite, first.before, examples, rules))
    return remedies


def _move_slots(template: Sequence[str], numbers: Sequence[int]) -> Rewrite:
    """Make a rewriting that moves slots' values from the head to the end of the last message."""

    def moved(request: LoggedRequest) -> LoggedRequest:
        spans = slot_spans(template, request.prompt.head)
        chosen = [spans[number] for number in numbers if number < len(spans)]
        shorter, values = without_spans(request, chosen)
        return with_tail(shorter, values) if values else request

    return lambda requests: [moved(request) for request in requests]


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

_MESSAGE_ADVICE = {
    "timestamp": "Put the time at the end of the last message, not before a text that is sent "
    "again or into results of tools.",
    "date": "Put the date at the end of the last message.",
    "id": "Leave ids out of what is sent to the model, or put them at the end of the last message.",
    "counter": "Put the counter at the end of the last message.",
    "user": "Put what is specific to a user at the end of the last message.",
}


def _message_remedies(group: Group) -> list[Remedy]:
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
            rewrite = _move_matches(pattern)
            remedies.append(
                Remedy(f"message_{kind}", _MESSAGE_ADVICE[kind], rewrite, where, examples[:3])
            )
    return remedies


def _texts(message: Message) -> Iterator[Block]:
    """Yield the texts that a user or a tool wrote."""
    if message.role in ("user", "tool"):
        yield from (block for block in message.blocks if block.kind == "text")


def _move_matches(pattern: re.Pattern[str]) -> Rewrite:
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


_REMEDIES: tuple[tuple[str, str, str, Rewrite], ...] = (
    (
        "reasoning",
        "messages of the assistant",
        "Send earlier turns back as they were answered, reasoning included: without it, all that "
        "follows is another prompt.",
        keep_reasoning,
    ),
    (
        "history_window",
        "messages",
        "Do not drop the oldest messages every turn, since that changes the prefix every time. "
        "Let the history grow by half, then drop its oldest third at once.",
        keep_window,
    ),
    (
        "call_ids",
        "messages",
        "Send the ids of earlier tool calls back as they were answered.",
        keep_call_ids,
    ),
    ("white_space", "", "Write line ends and blanks in one way.", normalise_white_space),
    ("tools_order", "tools", "List the tools in one order.", sort_tools),
    (
        "tools_list",
        "tools",
        "Always send the full list of tools, and restrict with tool_choice which may be called "
        "(OpenAI: type allowed_tools).",
        unite_tools,
    ),
    (
        "tools_text",
        "tools",
        "Describe each tool in the same words every time; move what changes to the end of the "
        "last message.",
        settle_tools,
    ),
    ("few_shot_order", "messages", "Keep the examples in one order.", sort_examples),
    (
        "document_order",
        "messages",
        "Put the documents into one order, such as by id, and not by rank of relevance.",
        sort_documents,
    ),
)
"""Kind, place, advice and rewriting, in the order in which they are applied."""

_KEYS_ADVICE = "Write JSON with its keys in one order (sort_keys=True)."

_SEAM_ADVICE = (
    "End prompts before a blank, not after it: it merges with the next word, so that tokens change "
    "when text is appended."
)
