"""Finds earlier turns that are resent changed, or dropped."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from ostinato.lab.lint_rewrites import with_messages
from ostinato.lab.logged_prompt import Block, Message
from ostinato.lab.request_log import LoggedRequest

_THINKING = re.compile(r"<think>.*?</think>\s*", re.DOTALL)

MAX_PINNED = 2
"""Maximum messages kept at the beginning of a history while later ones are dropped."""

GROWTH = 0.5
"""Growth of a history, relative to its size, before its oldest messages are dropped."""


def keep_reasoning(requests: Sequence[LoggedRequest]) -> list[LoggedRequest]:
    """Send each earlier answer as it was first seen, reasoning included."""
    answers: dict[int, tuple[Block, ...]] = {}
    fixed = []
    for request in requests:
        messages, chain = list(request.prompt.messages), 0
        for place, message in enumerate(messages):
            text = message.text
            if message.role == "assistant":
                known = answers.get(chain, ())
                if known and _without(_written(known)) == text.strip():
                    messages[place] = replace(message, blocks=known)
                elif _THINKING.search(text):
                    answers[chain] = message.blocks
            chain = hash((chain, _without(text)))
        if _THINKING.search(request.answer):
            answers[chain] = request.reply
        fixed.append(with_messages(request, messages))
    return fixed


def _written(blocks: Sequence[Block]) -> str:
    return "".join(block.written for block in blocks)


def _without(text: str) -> str:
    return _THINKING.sub("", text).strip()


@dataclass(slots=True)
class _Conversation:
    """A conversation, put together from windows of it.

    Attributes:
        messages: All that were seen of it, in order.
        start: Place of the first message after the pinned ones that the remedy still sends.
    """

    messages: list[Message] = field(default_factory=list)
    start: int = 0


def keep_window(requests: Sequence[LoggedRequest]) -> list[LoggedRequest]:
    """Drop the oldest messages of a history many at a time, instead of one per turn.

    No request gets less history than it had, and none more than ``GROWTH`` beyond it.
    """
    seen: dict[tuple[int, int], tuple[_Conversation, int]] = {}
    fixed = []
    for request in requests:
        leading = request.prompt.num_leading
        mine = list(request.prompt.messages[leading:])
        conversation, pinned, place = _continued(mine, seen)
        conversation.messages[place:] = mine[pinned:]
        keys = [_key(message) for message in conversation.messages]
        for at in range(place, len(keys) - 1):
            seen[keys[at], keys[at + 1]] = conversation, at
        dropped = conversation.messages[max(conversation.start, pinned) : place]
        if _letters(dropped) > GROWTH * _letters(mine):
            conversation.start, dropped = place, []
        messages = [*request.prompt.messages[:leading], *mine[:pinned], *dropped, *mine[pinned:]]
        fixed.append(with_messages(request, messages))
    return fixed


def _continued(
    mine: Sequence[Message], seen: dict[tuple[int, int], tuple[_Conversation, int]]
) -> tuple[_Conversation, int, int]:
    """Find the conversation that messages continue.

    Returns:
        It, how many messages are pinned to its beginning, and where the rest of them begins in it.
    """
    keys = [_key(message) for message in mine]
    for pinned in range(min(MAX_PINNED, len(keys) - 2) + 1):
        found = seen.get((keys[pinned], keys[pinned + 1])) if len(keys) > 1 else None
        if found is None:
            continue
        conversation, place = found
        known = [_key(message) for message in conversation.messages]
        overlap = min(len(known) - place, len(keys) - pinned)
        if place >= pinned and known[:pinned] == keys[:pinned] and (
            known[place : place + overlap] == keys[pinned : pinned + overlap]
        ):  # fmt: skip
            return conversation, pinned, place
    return _Conversation(), 0, 0


def _key(message: Message) -> int:
    return hash((message.role, message.text))


def _letters(messages: Sequence[Message]) -> int:
    return sum(len(message.text) for message in messages)
