"""What could be done so that requests begin alike?

A remedy rewrites the requests of a group as their sender could have: what changes goes to the
tail, what may stand in any order stands in one. Nothing is dropped, so that a replay of the
rewritten requests shows what the sender would save. A remedy that changes nothing is none.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ostinato.lab.lint_templates import Group, SlotKind, TemplateText, head_of, sort_json
from ostinato.lab.request_log import LoggedRequest, text_of

_THINKING = re.compile(r"<think>.*?</think>\s*", re.DOTALL)
_BLANKS, _LINE_ENDS, _GAPS = (
    re.compile(r"[ \t]+"),
    re.compile(r"[ \t]*\r?\n"),
    re.compile(r"\n{2,}"),
)

Rewrite = Callable[[Sequence[LoggedRequest]], list[LoggedRequest]]
"""From the requests of a group to the same requests, mended."""


@dataclass(frozen=True, slots=True)
class Remedy:
    """One thing that the sender of a group's requests could do.

    Attributes:
        kind: What it mends.
        advice: What to do, in words.
        rewrite: Does it; None where only the seams between tokens are mended, by the replay.
        where: Words before the place, if it is one.
        examples: Some of what changes there.
    """

    kind: str
    advice: str
    rewrite: Rewrite | None
    where: str = ""
    examples: tuple[str, ...] = field(default=())


_ADVICE: dict[SlotKind, str] = {
    "timestamp": "move the time to the end of the last message, or leave it out",
    "date": "move the date to the end of the last message; it breaks every prefix once a day",
    "id": "move the id out of the prompt, or to the end of the last message",
    "counter": "move the counter to the end of the last message",
    "nonce": "leave the random value out, or move it to the end of the last message",
    "user": "put what is the user's own behind what all users share",
    "wording": "settle on one wording, or move what changes to the end of the last message",
}


def remedies_for(group: Group) -> list[Remedy]:
    """List what could be done for a group, in the order in which it would be applied."""
    return [
        Remedy("reasoning", "send earlier turns back as they were answered, reasoning included: "
               "what is stripped makes all that follows another prompt", keep_reasoning),
        Remedy("white_space", "write line ends and blanks in one way", even_white_space),
        Remedy("json_keys", "write JSON with its keys in one order (sort_keys=True)", sort_keys),
        Remedy("tools_order", "list the tools in one order", sort_tools),
        Remedy("tools_list", "send one list of tools always, and say which may be called "
               "(tool_choice)", unite_tools),
        Remedy("tools_text", "write each tool in the same words always; what changes goes to the "
               "end of the last message", settle_tools),
        Remedy("few_shot_order", "keep the examples in one order", sort_examples),
        *_slot_remedies(group),
        Remedy("seam", "tokenize earlier text as it was: tokens merge where new text is put "
               "behind it", None),
    ]  # fmt: skip


def even_white_space(requests: Sequence[LoggedRequest]) -> list[LoggedRequest]:
    """Write white space in one way in all but the last message."""

    def even(text: str) -> str:
        lines = _LINE_ENDS.sub("\n", text)
        return _BLANKS.sub(" ", _GAPS.sub("\n\n", lines)).strip()

    return [_map_earlier(request, even) for request in requests]


def sort_keys(requests: Sequence[LoggedRequest]) -> list[LoggedRequest]:
    """Write JSON with sorted keys, in texts and in tools."""
    mended = [_map_earlier(request, sort_json) for request in requests]
    return [_with_tools(r, [_sorted_keys(tool) for tool in _tools(r)]) for r in mended]


def sort_tools(requests: Sequence[LoggedRequest]) -> list[LoggedRequest]:
    """List tools in one order; lists that never contradict each other stay."""
    places = {name: place for place, name in enumerate(_tool_order(requests))}
    return [
        _with_tools(r, sorted(_tools(r), key=lambda tool: places[_tool_name(tool)]))
        for r in requests
    ]


def unite_tools(requests: Sequence[LoggedRequest]) -> list[LoggedRequest]:
    """Send every tool that any request of the group has, in one order if they came in one."""
    known: dict[str, Any] = {}
    for request in requests:
        for tool in _tools(request):
            known.setdefault(_tool_name(tool), tool)
    every = {name: known[name] for name in _tool_order(requests)}

    def united(request: LoggedRequest) -> list[Any]:
        mine = {_tool_name(tool): tool for tool in _tools(request)}
        if list(mine) == [name for name in every if name in mine]:
            return [mine.get(name, tool) for name, tool in every.items()]
        rest = [tool for name, tool in every.items() if name not in mine]
        return [*mine.values(), *rest]  # their order is another remedy's

    return [_with_tools(r, united(r)) if _tools(r) else r for r in requests]


def settle_tools(requests: Sequence[LoggedRequest]) -> list[LoggedRequest]:
    """Send each tool as it came first; what it says now goes behind the last message."""
    first: dict[str, Any] = {}
    mended = []
    for request in requests:
        settled, changed = [], []
        for tool in _tools(request):
            known = first.setdefault(_tool_name(tool), tool)
            settled.append(known)
            if known != tool:
                changed.append(json.dumps(tool, ensure_ascii=False))
        mended.append(with_tail(_with_tools(request, settled), changed) if changed else request)
    return mended


def _tool_order(requests: Sequence[LoggedRequest]) -> list[str]:
    """Return all tools in an order that no list of them contradicts, or else few do.

    Of those that nothing has to stand before, the one that came first goes next; where lists
    contradict each other, the one that came first of all.
    """
    before: dict[str, set[str]] = {}
    for request in requests:
        names = list(dict.fromkeys(map(_tool_name, _tools(request))))
        for place, name in enumerate(names):
            before.setdefault(name, set()).update(names[:place][-1:])
    order: list[str] = []
    while before:
        ready = next((name for name, others in before.items() if not others), next(iter(before)))
        del before[ready]
        for others in before.values():
            others.discard(ready)
        order.append(ready)
    return order


def sort_examples(requests: Sequence[LoggedRequest]) -> list[LoggedRequest]:
    """Put examples that come in several orders into the order in which they came first."""
    orders: dict[tuple[str, ...], tuple[str, ...]] = {}
    mended = []
    for request in requests:
        messages, texts = messages_of(request), head_of(request.body).split("\n\n")
        request = _reordered(request, texts, orders)
        pairs = _examples(messages)
        if pairs is not None:
            request = _with_examples(request, pairs, orders)
        mended.append(request)
    return mended


def keep_reasoning(requests: Sequence[LoggedRequest]) -> list[LoggedRequest]:
    """Send each earlier answer as it was first seen, reasoning included."""
    answers: dict[tuple[str, ...], str] = {}
    mended = []
    for request in requests:
        messages = list(messages_of(request))
        key: tuple[str, ...] = ()
        for place, message in enumerate(messages):
            text = text_of(message)
            if message["role"] == "assistant":
                known = answers.get(key, "")
                if known and _THINKING.sub("", known).strip() == text.strip():
                    messages[place] = {**message, "content": known}
                elif _THINKING.search(text):
                    answers[key] = text
            key = (*key, _THINKING.sub("", text).strip())
        if _THINKING.search(request.answer):
            answers[key] = request.answer
        mended.append(with_messages(request, messages))
    return mended


def _slot_remedies(group: Group) -> list[Remedy]:
    """Make one remedy per kind of thing that changes in a template."""
    slots, by_kind = group.slots(), dict[SlotKind, list[int]]()
    for number, slot in enumerate(slots):
        by_kind.setdefault(slot.kind, []).append(number)
    pattern = group.pattern
    remedies = []
    for kind, numbers in by_kind.items():
        first = slots[numbers[0]]
        examples = tuple(dict.fromkeys(v for v in first.values.values() if v))[:3]

        def rewrite(
            requests: Sequence[LoggedRequest], numbers: Sequence[int] = tuple(numbers)
        ) -> list[LoggedRequest]:
            return [_move_to_tail(request, pattern, numbers) for request in requests]

        remedies.append(Remedy(kind, _ADVICE[kind], rewrite, first.before, examples))
    return remedies


def _move_to_tail(
    request: LoggedRequest, pattern: re.Pattern[str], slots: Sequence[int]
) -> LoggedRequest:
    """Take slots' values out of a request's head, and put them behind its last message."""
    text, values = TemplateText(head_of(request.body), pattern).without(slots)
    if not values:
        return request
    if isinstance(request.body.get("prompt"), str):
        return with_tail(replace(request, body={**request.body, "prompt": text}), values)
    messages = messages_of(request)
    num_leading = next(
        (i for i, m in enumerate(messages) if m["role"] not in ("system", "developer")),
        len(messages),
    )
    head = {**messages[0], "content": text}
    return with_tail(with_messages(request, [head, *messages[num_leading:]]), values)


def with_tail(request: LoggedRequest, values: Sequence[str]) -> LoggedRequest:
    """Put texts behind a request's prompt, or behind its last message."""
    tail = "\n" + " ".join(values)
    if isinstance(request.body.get("prompt"), str):
        return replace(request, body={**request.body, "prompt": request.body["prompt"] + tail})
    messages = list(messages_of(request))
    messages[-1:] = [{**last, "content": text_of(last) + tail} for last in messages[-1:]]
    return with_messages(request, messages)


def _map_earlier(request: LoggedRequest, change: Callable[[str], str]) -> LoggedRequest:
    """Change the texts of all messages but the last."""
    if isinstance(request.body.get("prompt"), str):
        return replace(request, body={**request.body, "prompt": change(request.body["prompt"])})
    messages = messages_of(request)
    earlier = [
        {**message, "content": change(text_of(message))} if is_plain(message) else message
        for message in messages[:-1]
    ]
    return with_messages(request, [*earlier, *messages[-1:]])


def is_plain(message: Mapping[str, Any]) -> bool:
    """Whether a message is a text and nothing else."""
    return isinstance(message.get("content"), str) and not message.get("tool_calls")


def _examples(messages: Sequence[Mapping[str, Any]]) -> list[tuple[int, int]] | None:
    """Find the pairs of question and answer between the system messages and the last one."""
    start = next((i for i, m in enumerate(messages) if m["role"] == "user"), len(messages))
    stop = start
    while stop + 2 < len(messages) and [m["role"] for m in messages[stop : stop + 2]] == [
        "user",
        "assistant",
    ]:
        stop += 2
    pairs = [(place, place + 1) for place in range(start, stop, 2)]
    return pairs if len(pairs) > 1 else None


def _with_examples(
    request: LoggedRequest,
    pairs: list[tuple[int, int]],
    orders: dict[tuple[str, ...], tuple[str, ...]],
) -> LoggedRequest:
    messages = list(messages_of(request))
    by_text = {json.dumps([text_of(messages[i]) for i in pair]): pair for pair in pairs}
    if len(by_text) < len(pairs):
        return request
    order = orders.setdefault(tuple(sorted(by_text)), tuple(by_text))
    moved = [messages[i] for text in order for i in by_text[text]]
    messages[pairs[0][0] : pairs[-1][1] + 1] = moved
    return with_messages(request, messages)


def _reordered(
    request: LoggedRequest, parts: list[str], orders: dict[tuple[str, ...], tuple[str, ...]]
) -> LoggedRequest:
    """Put the paragraphs of a head into the order in which they came first."""
    if len(parts) < 3 or len(set(parts)) < len(parts):
        return request
    order = orders.setdefault(tuple(sorted(parts)), tuple(parts))
    if isinstance(request.body.get("prompt"), str) or list(order) == parts:
        return request
    messages = messages_of(request)
    leading = [m for m in messages if m["role"] in ("system", "developer")]
    if len(leading) != 1 or messages[0] is not leading[0]:
        return request
    head = {**messages[0], "content": "\n\n".join(order)}
    return with_messages(request, [head, *messages[1:]])


def messages_of(request: LoggedRequest) -> Sequence[Mapping[str, Any]]:
    """Return a request's messages; none if it is a prompt."""
    messages: Sequence[Mapping[str, Any]] = request.body.get("messages") or ()
    return messages


def with_messages(request: LoggedRequest, messages: Sequence[Mapping[str, Any]]) -> LoggedRequest:
    """Return a request with other messages, if it has any."""
    if "messages" not in request.body:
        return request
    return replace(request, body={**request.body, "messages": list(messages)})


def _tools(request: LoggedRequest) -> list[Any]:
    tools = request.body.get("tools")
    return tools if isinstance(tools, list) else []


def _with_tools(request: LoggedRequest, tools: list[Any]) -> LoggedRequest:
    return replace(request, body={**request.body, "tools": tools}) if tools else request


def _tool_name(tool: Any) -> str:
    function = tool.get("function", tool) if isinstance(tool, dict) else {}
    return str(function.get("name", tool))


def _sorted_keys(value: Any) -> Any:
    """Return a JSON value with the keys of every object in order."""
    if isinstance(value, dict):
        return {key: _sorted_keys(value[key]) for key in sorted(value)}
    return [_sorted_keys(item) for item in value] if isinstance(value, list) else value
