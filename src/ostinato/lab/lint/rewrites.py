"""Rewrites of requests that a sender could make.

A fix rewrites the requests of a group: varying text moves to the end of the last message, shuffled
items are sorted. No content is dropped, so a replay of the rewritten requests shows the savings.
"""

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from itertools import pairwise
from typing import TypeVar

from ostinato.lab.lint.rules import VolatileRule
from ostinato.lab.log.logged_prompt import Block, BlockKind, LoggedPrompt, Message
from ostinato.lab.log.request_log import LoggedRequest

Rewrite = Callable[[Sequence[LoggedRequest]], list[LoggedRequest]]
"""From the requests of a group to the same requests, rewritten."""

NameT = TypeVar("NameT", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Remedy:
    """A fix that the sender of a group's requests could apply.

    Attributes:
        kind: What it fixes.
        advice: What to do, in words.
        rewrite: Does it; None where the replay tokenizes earlier text by itself.
        where: The field, or the words before the place, if it is one.
        examples: Some of the values there.
        rules: Rules with which the server does it, for what a constant may take the place of.
    """

    kind: str
    advice: str
    rewrite: Rewrite | None
    where: str = ""
    examples: tuple[str, ...] = ()
    rules: tuple[VolatileRule, ...] = ()


def with_messages(request: LoggedRequest, messages: Iterable[Message]) -> LoggedRequest:
    """Return a request with other messages."""
    return with_prompt(request, request.prompt.with_messages(tuple(messages)))


def with_prompt(request: LoggedRequest, prompt: LoggedPrompt) -> LoggedRequest:
    """Return a request with another prompt; itself if the prompt is the same."""
    return request if prompt == request.prompt else replace(request, prompt=prompt)


def with_tail(request: LoggedRequest, values: Sequence[str]) -> LoggedRequest:
    """Put texts at the end of a request's last message that is not the assistant's."""
    messages = list(request.prompt.messages)
    places = [place for place, m in enumerate(messages) if m.role != "assistant"]
    last = messages[places[-1] if places else -1]
    tail = Block(last.field, "\n" + " ".join(values))
    messages[places[-1] if places else -1] = replace(last, blocks=(*last.blocks, tail))
    return with_messages(request, messages)


def map_texts(
    requests: Sequence[LoggedRequest],
    change: Callable[[str], str],
    kinds: Sequence[BlockKind] = ("text",),
) -> list[LoggedRequest]:
    """Change the texts of all messages but the last; a raw prompt is changed as a whole.

    A message that is sent again and again is changed once.
    """
    mapped: dict[Message, Message] = {}
    changed = []
    for request in requests:
        messages = list(request.prompt.messages)
        for place in range(len(messages) - (messages[-1].role != "")):
            message = messages[place]
            if message not in mapped:
                mapped[message] = _mapped(message, change, kinds)
            messages[place] = mapped[message]
        changed.append(with_messages(request, messages))
    return changed


def _mapped(message: Message, change: Callable[[str], str], kinds: Sequence[BlockKind]) -> Message:
    blocks = (replace(b, text=change(b.text)) if b.kind in kinds else b for b in message.blocks)
    return replace(message, blocks=tuple(blocks))


def without_spans(
    request: LoggedRequest, spans: Sequence[tuple[int, int]]
) -> tuple[LoggedRequest, list[str]]:
    """Cut spans of ``prompt.head``, in order, out of the texts that it is made of.

    Returns:
        The request without them, and the pieces.
    """
    prompt, at = request.prompt, 0
    values = [prompt.head[start:stop].strip() for start, stop in spans]
    messages = list(prompt.messages)
    for place, message in enumerate(messages[: prompt.num_leading]):
        blocks = []
        for block in message.blocks:
            text = block.text
            for start, stop in reversed(spans) if block.kind == "text" else ():
                cut = slice(max(0, start - at), max(0, min(stop - at, len(block.text))))
                text = text[: cut.start] + text[max(cut.start, cut.stop) :]
            at += len(block.written) + 1  # and the line break between two blocks
            blocks.append(replace(block, text=text))
        messages[place] = replace(message, blocks=tuple(blocks))
    return with_messages(request, messages), [value for value in values if value]


def common_order(lists: Sequence[Sequence[NameT]]) -> list[NameT]:
    """Return all names in an order that no list contradicts, or few do if they disagree.

    Of those that may be next, the one that came first goes next; where lists contradict each
    other, the one that came first of all.
    """
    after: dict[NameT, set[NameT]] = {}
    for names in lists:
        unique = list(dict.fromkeys(names))
        for name in unique:
            after.setdefault(name, set())
        for name, following in pairwise(unique):
            after[name].add(following)
    seen = {name: place for place, name in enumerate(after)}
    waiting = dict.fromkeys(seen, 0)
    for followers in after.values():
        for name in followers:
            waiting[name] += 1
    ready = [(seen[name], name) for name, count in waiting.items() if not count]
    return _sorted_by_waiting(after, seen, waiting, ready)


def _sorted_by_waiting(
    after: Mapping[NameT, set[NameT]],
    seen: Mapping[NameT, int],
    waiting: dict[NameT, int],
    ready: list[tuple[int, NameT]],
) -> list[NameT]:
    """Sort topologically (Kahn 1962); in a circle, the first that was seen goes next."""
    order: dict[NameT, None] = {}
    by_age = iter(seen)
    ready.sort(key=lambda pair: pair[0])
    while len(order) < len(seen):
        name = heappop(ready)[1] if ready else next(n for n in by_age if n not in order)
        if name in order:
            continue
        order[name] = None
        for follower in after[name]:
            waiting[follower] -= 1
            if not waiting[follower] and follower not in order:
                heappush(ready, (seen[follower], follower))
    return list(order)
