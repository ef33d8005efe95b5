"""What a chat template writes around the turns of the assistant.

A conversation is rendered twice: once as it is, and once with a mark in the place of each turn,
without its calls and its reasoning::

    as it is      <|user|>Hi<|end|><|assistant|> {"name": ...} <|end|><|tool|>ok<|end|><|assistant|>
    with marks    <|user|>Hi<|end|><|assistant|>      MARK     <|end|><|tool|>ok<|end|><|assistant|>
                  └──────────── frame ─────────┘    turn     └────────────── frame ────────────────┘

The texts between marks are the frames. They are used only if the conversation as it is consists of
the same frames, in one way only: found from its beginning and from its end at the same places. So a
template that writes something else around a turn with calls, and a turn that quotes a frame, are
left as they are rendered.
"""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass

MAX_OPENING_CHARS = 256
"""Letters between the assistant's header and an answer: a mark of reasoning is shorter."""


@dataclass(frozen=True, slots=True)
class Frames:
    """A rendered conversation, cut at its turns.

    Attributes:
        texts: What is around the turns: one more than there are turns.
        turns: What the template wrote for each turn.
        opening: What follows the last frame: the beginning of the answer, such as ``<think>``.
    """

    texts: tuple[str, ...]
    turns: tuple[str, ...]
    opening: str = ""


def make_marks(count: int) -> list[str]:
    """Return texts that no message has, one per turn: they are drawn anew for each prompt."""
    return [f"turn{number}x{secrets.token_hex(12)}" for number in range(count)]


def frames_between(marked: str, marks: Sequence[str]) -> tuple[str, ...] | None:
    """Return the texts between marks; None if each mark is not there once, in order."""
    texts, start = [], 0
    for mark in marks:
        place = marked.find(mark, start)
        if place < 0 or marked.count(mark) != 1:
            return None
        texts.append(marked[start:place])
        start = place + len(mark)
    return (*texts, marked[start:])


def cut(rendered: str, texts: Sequence[str]) -> Frames | None:
    """Cut a rendered conversation into frames and turns.

    Args:
        rendered: The conversation, up to the beginning of the answer.
        texts: Its frames, the last of which the answer follows.

    Returns:
        None if it does not consist of these frames, or in more than one way.
    """
    if not all(texts) or not rendered.startswith(texts[0]):
        return None
    places, turns, end = [0], list[str](), len(texts[0])
    for text in texts[1:]:
        place = rendered.find(text, end)
        if place < 0:
            return None
        places.append(place)
        turns.append(rendered[end:place])
        end = place + len(text)
    if len(rendered) - end > MAX_OPENING_CHARS or not _are_last(rendered, texts, places):
        return None
    return Frames(tuple(texts), tuple(turns), rendered[end:])


def _are_last(rendered: str, texts: Sequence[str], places: Sequence[int]) -> bool:
    """Whether the frames are at the same places if they are looked for from the end."""
    stop = len(rendered)
    for text, place in zip(reversed(texts[1:]), reversed(places[1:]), strict=True):
        stop = rendered.rfind(text, 0, stop)
        if stop != place:
            return False
    return True
