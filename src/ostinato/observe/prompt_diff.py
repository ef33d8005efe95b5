"""Shows where two prompts differ.

Both sides are decoded and shown on one line each, with a caret under the first character that
differs. Line breaks and tabs are drawn as one character, so that the caret stays below it.
"""

import unicodedata
from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import AnyStr

import numpy as np

from ostinato.core.tokens import TOKEN_BYTES
from ostinato.observe.explanation import Difference
from ostinato.observe.history import RequestRecord

Decode = Callable[[list[int]], str]
"""From token ids to their text, special tokens included."""

TOKENS_BEFORE, TOKENS_AFTER = 32, 24
"""Tokens that are decoded around a difference."""

LETTERS_BEFORE, LETTERS_AFTER = 26, 30
"""Letters that are shown of these: a line of 80 columns with its label."""

LETTERS_OF_A_NAME = 16
"""Letters by which a field is found if its tokens do not decode to all of it."""

MIN_SIMILARITY = 0.5
"""Share of matching tokens, before and after a difference, above which two prompts without a common
block are versions of one."""

_DRAWN = {"\n": "↵", "\t": "⇥", "\r": "␍"}


def num_matching_after(left: bytes, right: bytes, start: int) -> int:
    """Count the tokens after a difference that match again, in place or aligned at the end.

    Args:
        left: Packed tokens, shape (num_mine * 4,).
        right: The same, shape (num_theirs * 4,).
        start: Position of the token that differs.

    Cost: O(num_mine) in NumPy.
    """
    rests = [np.frombuffer(side, "<u4")[start:] for side in (left, right)]
    length = min(map(len, rests))
    if not length:
        return 0
    in_place = int((rests[0][:length] == rests[1][:length]).sum())
    backwards = rests[0][::-1][:length] == rests[1][::-1][:length]
    suffix = length if backwards.all() else int(backwards.argmin())
    return max(in_place, suffix)


def similarity(left: bytes, right: bytes, start: int) -> float:
    """Return the share of the shorter prompt's tokens that both have, from 0 to 1.

    Args:
        left: Packed tokens of a prompt.
        right: The tokens of another, without its answer.
        start: Tokens in common before the first that differs.
    """
    length = min(len(left), len(right)) // TOKEN_BYTES
    return min(1.0, (start + num_matching_after(left, right, start)) / length) if length else 0.0


def is_alike(left: bytes, right: bytes, start: int, block_size: int) -> bool:
    """Whether two prompts are versions of one: they share a block, or most of their tokens."""
    return start >= block_size or similarity(left, right, start) >= MIN_SIMILARITY


def show_difference(nearest: RequestRecord, record: RequestRecord, prompt: bytes, start: int,
                    decode: Decode | None) -> tuple[Difference | None, bool]:  # fmt: skip
    """Decode both sides of a difference.

    Args:
        nearest: The other sequence.
        record: The one in question.
        prompt: Its packed tokens.
        start: Position of the first token that differs.
        decode: Turns ids into text; None shows nothing.

    Returns:
        Both sides, and whether their texts agree where the tokens differ.
    """
    if decode is None:
        return None, False
    ids, nearest_ids = _ids(prompt), _ids(nearest.tokens)
    stop = start + TOKENS_AFTER
    texts = decode(ids[start:stop]), decode(nearest_ids[start:stop])
    pieces = decode(ids[start : start + 1]), decode(nearest_ids[start : start + 1])
    common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(*texts, strict=False)))
    is_same = common >= max(1, *map(len, pieces)) or (
        0 < common == len(texts[0]) and stop >= len(ids)
    )
    first = 0 if is_same else common
    before = decode(ids[max(0, start - TOKENS_BEFORE) : start]) + texts[0][:first]
    shown_before = _cut_left(before)
    matching = 0 if is_same else num_matching_after(prompt, nearest.prompt, start)
    difference = Difference(
        token=start,
        request=nearest.name,
        mine=shown_before + _cut_right(texts[0][first:]),
        theirs=shown_before + _cut_right(texts[1][first:]),
        caret=_columns(shown_before),
        width=max(1, _columns(_draw(pieces[0][first:][:LETTERS_AFTER]))),
        place=_place(decode(ids), len(decode(ids[:start])) + first, record.prompt_sections),
        num_alike_after=matching,
    )
    return difference, is_same


def num_alike(one: AnyStr, other: AnyStr) -> int:
    """Return the length of what two texts begin with alike, by bisection at memcmp's speed."""
    alike, end = 0, min(len(one), len(other))
    while alike < end:
        middle = (alike + end + 1) // 2
        if one[alike:middle] == other[alike:middle]:
            alike = middle
        else:
            end = middle - 1
    return alike


def _ids(packed: bytes) -> list[int]:
    ids: list[int] = np.frombuffer(packed, "<u4").tolist()
    return ids


def _place(text: str, offset: int, fields: Sequence[tuple[str, str]]) -> str:
    """Return where a letter of a prompt is in its request."""
    if not fields:
        return _in_field("", text, offset)
    place, end = f"the template before {fields[0][0]}", 0
    for name, content in fields:
        start = text.find(content, end) if content else -1
        is_whole = start >= 0
        if not is_whole and content:  # a tokenizer may lose letters
            start = text.find(content[:LETTERS_OF_A_NAME], end)
        if start < 0:
            continue
        if offset < start:
            return place
        end = start + len(content) if is_whole else start + 1
        if is_whole and offset < end:
            return _in_field(name, content, offset - start)
        place = f"the template after {name}" if is_whole else name
    return place


def _in_field(name: str, content: str, offset: int) -> str:
    """Return the place of a letter in a field."""
    before = content[:offset]
    line, column = before.count("\n") + 1, offset - before.rfind("\n")
    place = f"line {line}, column {column}"
    return f"{name}, {place}" if name else place


def _draw(text: str) -> str:
    """Return a text on one line, a letter for a letter."""
    return "".join(_DRAWN.get(letter, letter if letter.isprintable() else "·") for letter in text)


def _cut_left(text: str) -> str:
    drawn = _draw(text)
    return drawn if len(drawn) <= LETTERS_BEFORE else "…" + drawn[-LETTERS_BEFORE:]


def _cut_right(text: str) -> str:
    drawn = _draw(text)
    return drawn if len(drawn) <= LETTERS_AFTER else drawn[:LETTERS_AFTER] + "…"


def _columns(text: str) -> int:
    """Return how many columns of a terminal a text takes."""
    return sum(
        0 if unicodedata.combining(letter)
        else 2 if unicodedata.east_asian_width(letter) in "WF" else 1
        for letter in text
    )  # fmt: skip
