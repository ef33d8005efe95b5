"""Finds earlier turns that are resent changed, as other tokens than generated, or dropped.

Whether tokens differ (``compare_drift``) needs logs with token ids: responses with
``prompt_token_ids`` and, for their choice, ``token_ids``, as vLLM and Ostinato return them for
``return_token_ids``::

    turn 1   prompt_token_ids 5 6 7 8    token_ids 11 12 13 14      "text of the answer"
    turn 2   prompt_token_ids 5 6 7 8              11 31 32 14      the same text, other tokens
                                                      └ everything from here on misses
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from ostinato.core.tokens import TOKEN_BYTES, num_common_tokens
from ostinato.lab.lint.replay import Comparison, replay_ids
from ostinato.lab.lint.rewrites import Remedy, with_messages
from ostinato.lab.lint.slots import shortened
from ostinato.lab.log.logged_prompt import Block, Message
from ostinato.lab.log.request_log import LoggedRequest

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

    No request loses history, and none gets more than ``GROWTH`` beyond it.
    """
    seen: dict[tuple[int, int], tuple[_Conversation, int]] = {}
    fixed = []
    for request in requests:
        leading = request.prompt.num_leading
        turns = list(request.prompt.messages[leading:])
        conversation, pinned, place = _continued(turns, seen)
        conversation.messages[place:] = turns[pinned:]
        keys = [_key(message) for message in conversation.messages]
        for at in range(place, len(keys) - 1):
            seen[keys[at], keys[at + 1]] = conversation, at
        dropped = conversation.messages[max(conversation.start, pinned) : place]
        if _letters(dropped) > GROWTH * _letters(turns):
            conversation.start, dropped = place, []
        messages = [*request.prompt.messages[:leading], *turns[:pinned], *dropped, *turns[pinned:]]
        fixed.append(with_messages(request, messages))
    return fixed


def _continued(
    messages: Sequence[Message], seen: dict[tuple[int, int], tuple[_Conversation, int]]
) -> tuple[_Conversation, int, int]:
    """Find the conversation that messages continue.

    Returns:
        It, how many messages are pinned to its beginning, and where the rest of them begins in it.
    """
    keys = [_key(message) for message in messages]
    for pinned in range(min(MAX_PINNED, len(keys) - 2) + 1):
        position = seen.get((keys[pinned], keys[pinned + 1])) if len(keys) > 1 else None
        if position is None:
            continue
        conversation, place = position
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


_DRIFT_ADVICE = (
    "Answers were sent back as text, which has other tokens than those generated. Let the engine "
    "keep them (Ostinato's keep_tokens, on by default), or send earlier answers as token ids."
)

_Turn = tuple[str, str, tuple[tuple[str, str], ...]]
"""Tenant, model, and the messages so far: role and text."""


def compare_drift(requests: Sequence[LoggedRequest], block_size: int) -> Comparison:
    """Compare each prompt's tokens with those of the turn that it continues.

    The comparison is of the requests with token ids, as sent and without the loss by answers that
    were resent as other tokens; its count is that of these answers.

    Cost: a look-up for each answer in each prompt.
    """
    turns: dict[_Turn, LoggedRequest] = {}
    answers, lost_tokens = list[str](), 0
    with_ids = [request for request in requests if request.prompt_ids]
    for request in with_ids:
        earlier = _earlier_turn(turns, request)
        if earlier is not None and (lost := _num_lost(earlier, request)):
            answers.append(earlier.answer)
            lost_tokens += lost
        turns[_turn(request, len(request.prompt.messages))] = request
    before = replay_ids(with_ids, block_size)
    after = replace(before, computed_tokens=before.computed_tokens - lost_tokens)
    examples = tuple(map(shortened, answers[:3]))
    where = "messages of the assistant"
    remedy = Remedy("drift", _DRIFT_ADVICE, None, where, examples)
    return Comparison(remedy, len(answers), before, after)


def _turn(request: LoggedRequest, num_messages: int) -> _Turn:
    messages = request.prompt.messages[:num_messages]
    said = tuple((message.role, message.text) for message in messages)
    return request.tenant, request.model, said


def _earlier_turn(
    turns: dict[_Turn, LoggedRequest], request: LoggedRequest
) -> LoggedRequest | None:
    """Find the latest turn whose messages and answer a prompt begins with."""
    messages = request.prompt.messages
    for place in range(len(messages) - 1, 0, -1):
        if messages[place].role == "assistant":
            earlier = turns.get(_turn(request, place))
            if earlier is not None and earlier.answer == messages[place].text:
                return earlier
    return None


def _num_lost(earlier: LoggedRequest, request: LoggedRequest) -> int:
    """Count the computed tokens of a turn that another does not begin with, if any of its answer.

    The last token of an answer is sampled and not computed (law 4).
    """
    computed = (earlier.prompt_ids + earlier.reply_ids)[:-TOKEN_BYTES]
    common = num_common_tokens(computed, request.prompt_ids) * TOKEN_BYTES
    is_drift = len(earlier.prompt_ids) <= common < len(computed)
    return (len(computed) - common) // TOKEN_BYTES if is_drift else 0
