"""Where in a text are calls of tools?

Models of the Hermes and Qwen families write them so, and every other model is asked to::

    Let me look.                                                    TextPiece
    <tool_call>
    {"name": "weather", "arguments": {"city": "Paris"}}             CallStart, ArgumentsPiece ...
    </tool_call>

The text comes piece by piece. What may become a tag is held back, and so is white space until it
is known what follows; the arguments go out as they come, letter by letter. What stands between the
tags and is no call is text, tags and all.

Source of the format: Hermes 2 Pro (Nous Research, 2024), kept by Qwen 2.5 and 3.
"""

import json
import re
import uuid
from dataclasses import dataclass

OPEN, CLOSE = "<tool_call>", "</tool_call>"

_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"arguments"\s*:\s*(?=\{)')
"""A call as it is commonly written: first the name, then an object."""

_TOKEN = re.compile(r'"(?:[^"\\]++|\\.)*+"?|[{}\[\]]', re.DOTALL)
"""A string, though its end be still to come, or a bracket."""


@dataclass(frozen=True, slots=True)
class TextPiece:
    """More of the text around calls."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A call begins.

    Attributes:
        index: Which of the answer's calls.
        call_id: To answer it by.
        name: Of the tool.
    """

    index: int
    call_id: str
    name: str


@dataclass(frozen=True, slots=True)
class ArgumentsPiece:
    """More of a call's arguments, which together are JSON as the model wrote it."""

    index: int
    text: str


Piece = TextPiece | CallStart | ArgumentsPiece


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A whole call.

    Attributes:
        call_id: To answer it by.
        name: Of the tool.
        arguments: JSON as the model wrote it; cut off where the model was.
    """

    call_id: str
    name: str
    arguments: str


def read_answer(text: str, has_tools: bool) -> tuple[str, list[ToolCall]]:
    """Return the text of a whole answer, and the calls in it."""
    parser = ToolCallParser(has_tools)
    said: list[str] = []
    starts: list[CallStart] = []
    arguments: list[str] = []
    for piece in [*parser.feed(text), *parser.finish()]:
        match piece:
            case TextPiece():
                said.append(piece.text)
            case CallStart():
                starts.append(piece)
                arguments.append("")
            case ArgumentsPiece():
                arguments[piece.index] += piece.text
    pairs = zip(starts, arguments, strict=True)
    return "".join(said), [ToolCall(start.call_id, start.name, given) for start, given in pairs]


class ToolCallParser:
    """Takes one answer's text as it grows, and gives it out as pieces."""

    def __init__(self, is_active: bool = True) -> None:
        """Start before the text; without tools nothing is looked for, and all of it is text."""
        self.num_calls = 0
        self._is_active = is_active
        self._text = ""  # not given out yet; within a call, all since the tag
        self._in_call = False
        self._arguments_from: int | None = None
        self._num_given = 0  # characters of the arguments that are out
        self._has_text = False

    def feed(self, text: str) -> list[Piece]:
        """Take what is new of the text."""
        if not self._is_active:
            return [TextPiece(text)] if text else []
        self._text += text
        pieces: list[Piece] = []
        while self._take(pieces):
            pass
        return pieces

    def finish(self) -> list[Piece]:
        """Take the end: a call whose tag is not closed is one if it is whole, or well begun."""
        pieces: list[Piece] = []
        if self._in_call and self._arguments_from is None:
            self._end_call(self._text, pieces, is_closed=False)
        elif not self._in_call and (self._text.strip() or (self._text and not self.num_calls)):
            pieces.append(TextPiece(self._text))
        self._text = ""
        return pieces

    def _take(self, pieces: list[Piece]) -> bool:
        """Take one step; False when more text is needed."""
        return self._take_call(pieces) if self._in_call else self._take_text(pieces)

    def _take_text(self, pieces: list[Piece]) -> bool:
        before, tag, after = self._text.partition(OPEN)
        if tag:
            self._give_text(before.rstrip(), pieces)
            self._text, self._in_call, self._arguments_from = after, True, None
            return True
        ready = len(self._text) - _num_held(self._text)
        self._give_text(self._text[:ready], pieces)
        self._text = self._text[ready:]
        return False

    def _give_text(self, text: str, pieces: list[Piece]) -> None:
        if text and self.num_calls and not self._has_text:
            text = text.lstrip()  # between and behind calls there is nothing but line breaks
        if text:
            self._has_text = True
            pieces.append(TextPiece(text))

    def _take_call(self, pieces: list[Piece]) -> bool:
        if self._arguments_from is None:
            head = _HEAD.match(self._text)
            if head is None:
                return self._take_whole_call(pieces)
            self._begin(json.loads(head[1]), pieces)
            self._arguments_from, self._num_given = head.end(), 0
        arguments = self._text[self._arguments_from :]
        end = _end_of_value(arguments)
        if end is None:
            self._give_arguments(arguments, pieces)
            return False
        self._give_arguments(arguments[:end], pieces)
        rest = arguments[end:]
        _, tag, after = rest.partition(CLOSE)
        if not tag:
            return False
        self._leave_call(after)
        return True

    def _take_whole_call(self, pieces: list[Piece]) -> bool:
        """Take a call that is written in another order, when all of it is there."""
        body, tag, after = self._text.partition(CLOSE)
        if not tag:
            return False
        self._end_call(body, pieces, is_closed=True)
        self._leave_call(after)
        return True

    def _end_call(self, body: str, pieces: list[Piece], is_closed: bool) -> None:
        call = _read_call(body)
        if call is None:
            self._give_text(OPEN + body + (CLOSE if is_closed else ""), pieces)
            return
        name, arguments = call
        self._begin(name, pieces)
        pieces.append(ArgumentsPiece(self.num_calls - 1, arguments))

    def _begin(self, name: str, pieces: list[Piece]) -> None:
        pieces.append(CallStart(self.num_calls, f"call_{uuid.uuid4().hex[:24]}", name))
        self.num_calls += 1
        self._has_text = False

    def _give_arguments(self, arguments: str, pieces: list[Piece]) -> None:
        new = arguments[self._num_given :]
        if new:
            pieces.append(ArgumentsPiece(self.num_calls - 1, new))
            self._num_given += len(new)

    def _leave_call(self, after: str) -> None:
        self._text, self._in_call, self._arguments_from = after, False, None


def _num_held(text: str) -> int:
    """Return how many characters at the end may belong to a tag, or to white space before one."""
    tail = next((n for n in range(len(OPEN) - 1, 0, -1) if text.endswith(OPEN[:n])), 0)
    head = text[: len(text) - tail]
    return tail + len(head) - len(head.rstrip())


def _end_of_value(text: str) -> int | None:
    """Return where the object that a text begins with ends; None if it goes on."""
    depth = 0
    for found in _TOKEN.finditer(text):
        if found[0] in "{[":
            depth += 1
        elif found[0] in "}]":
            depth -= 1
            if not depth:
                return found.end()
    return None


def _read_call(body: str) -> tuple[str, str] | None:
    """Return the name and the arguments of a call; None if it is none."""
    try:
        call = json.loads(body)
    except (ValueError, RecursionError):
        return None
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return None
    arguments = call.get("arguments", call.get("parameters", {}))
    if isinstance(arguments, str):
        return call["name"], arguments
    return call["name"], json.dumps(arguments, ensure_ascii=False)
