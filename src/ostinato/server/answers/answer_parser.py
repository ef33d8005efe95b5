"""Splits an answer into reasoning, text and tool calls.

Works on a stream: each part is emitted as it arrives, in the format of any family
(``answer_formats``)::

    <think>The weather, then.</think>                               ReasoningPiece ...
    Let me look.                                                    TextPiece ...
    <tool_call>
    {"name": "weather", "arguments": {"city": "Paris"}}             CallStart, ArgumentsPiece ...
    </tool_call>

What may become a mark is held back: ``regex`` tells whether the end of a text may begin a match.
So is white space until the next part is known. A malformed call is text.
"""

import json
import uuid
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import regex

from ostinato.server.answers.answer_formats import Group, ReasoningFormat, ToolFormat

_BRACKETS = regex.compile(r'["\\{}\[\]]')
_MAX_HELD_SPACE = 64


@dataclass(frozen=True, slots=True)
class TextPiece:
    """More of the answer's text."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningPiece:
    """More of the reasoning before the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A call begins.

    Attributes:
        index: Which of the answer's calls.
        call_id: Id that its result refers to.
        name: Name of the tool.
    """

    index: int
    call_id: str
    name: str


@dataclass(frozen=True, slots=True)
class ArgumentsPiece:
    """More of a call's arguments, which together are JSON as the model wrote it."""

    index: int
    text: str


Piece = TextPiece | ReasoningPiece | CallStart | ArgumentsPiece


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A whole call.

    Attributes:
        call_id: Id that its result refers to.
        name: Name of the tool.
        arguments: JSON as the model wrote it; truncated if the model was.
    """

    call_id: str
    name: str
    arguments: str


@dataclass(slots=True)
class ParsedAnswer:
    """A complete answer, assembled from its pieces in linear time."""

    _reasoning: list[str] = field(default_factory=list)
    _text: list[str] = field(default_factory=list)
    _calls: list[tuple[CallStart, list[str]]] = field(default_factory=list)

    def add(self, piece: Piece) -> None:
        """Add the next piece."""
        match piece:
            case TextPiece():
                self._text.append(piece.text)
            case ReasoningPiece():
                self._reasoning.append(piece.text)
            case CallStart():
                self._calls.append((piece, []))
            case ArgumentsPiece():
                self._calls[-1][1].append(piece.text)

    @property
    def reasoning(self) -> str:
        """The reasoning."""
        return "".join(self._reasoning)

    @property
    def text(self) -> str:
        """The text around the calls."""
        return "".join(self._text)

    @property
    def calls(self) -> list[ToolCall]:
        """The calls, in order."""
        return [ToolCall(c.call_id, c.name, "".join(parts)) for c, parts in self._calls]

    @property
    def meaning(self) -> tuple[Any, ...]:
        """Reasoning, text, and names and arguments of the calls: all but their ids."""
        return self.reasoning, self.text, [(call.name, call.arguments) for call in self.calls]

    def message(self) -> dict[str, Any]:
        """Return it as a message of the assistant, in OpenAI's format."""
        calls = []
        for begun, parts in self._calls:
            function = {"name": begun.name, "arguments": "".join(parts)}
            calls.append({"id": begun.call_id, "function": function})
        return {
            "role": "assistant",
            "content": self.text,
            "tool_calls": calls,
            "reasoning": self.reasoning,
        }

    @property
    def has_calls(self) -> bool:
        """Whether there is any call."""
        return bool(self._calls)


def parse_answer(text: str, parser: "AnswerParser") -> ParsedAnswer:
    """Parse a complete answer."""
    answer = ParsedAnswer()
    for piece in parser.feed(text, is_last=True):
        answer.add(piece)
    return answer


class AnswerParser:
    """Parses one answer's growing text into pieces.

    Attributes:
        num_calls: Calls that have begun.
        is_reasoning: Whether it is within reasoning.
    """

    def __init__(
        self,
        tools: ToolFormat | None = None,
        reasoning: ReasoningFormat | None = None,
        is_reasoning: bool = False,
        max_calls: int | None = None,
    ) -> None:
        """Start with an empty answer.

        Args:
            tools: Format of calls; None parses none.
            reasoning: Format of reasoning; None parses none.
            is_reasoning: Whether the answer begins inside reasoning.
            max_calls: Further calls are dropped; None is no limit.
        """
        self.num_calls = 0
        self.is_reasoning = is_reasoning
        self._tools, self._reasoning = tools, reasoning
        self._max_calls = max_calls
        self._held = ""  # not emitted yet
        self._strip = "\n" if is_reasoning else ""  # removed where the next text begins
        self._has_text = False  # since the start, or the last call
        self._value: _JsonValue | None = None  # the arguments being parsed
        self._in_tail = False
        self._is_skipping = False

    def feed(self, text: str, is_last: bool = False) -> list[Piece]:
        """Parse new text; the last text ends the answer."""
        if self._tools is None and self._reasoning is None:
            return [TextPiece(text)] if text else []
        self._held += text
        pieces: list[Piece] = []
        while self._held and self._take(pieces):
            pass
        return pieces + self.finish() if is_last else pieces

    def finish(self) -> list[Piece]:
        """Parse the end: an unclosed call counts if it is complete, or well formed so far."""
        pieces: list[Piece] = []
        if self._value is None and not self._in_tail:
            closes = self._tools.closes if self._tools is not None else ""
            mark = self._marks().search(self._held + closes) if closes else None
            if mark is None or mark.lastgroup != "whole" or not self._begin(mark, pieces):
                self._emit(self._held if self._held.strip() or not self.num_calls else "", pieces)
        self._held = ""
        return pieces

    def _take(self, pieces: list[Piece]) -> bool:
        """Advance one step; return False when more text is needed."""
        if self._value is not None:
            return self._take_arguments(self._value, pieces)
        if self._in_tail:
            return self._take_tail()
        return self._take_text(pieces)

    def _take_text(self, pieces: list[Piece]) -> bool:
        """Emit text up to the next mark, or to what may become one."""
        mark = self._marks().search(self._held, partial=True)
        place = len(self._held) if mark is None else mark.start()
        before = self._held[:place]
        if mark is None or mark.partial:
            ready = max(len(before.rstrip()), len(before) - _MAX_HELD_SPACE)
            self._emit(before[:ready], pieces)
            self._held = self._held[ready:]
            return False
        self._held = self._held[mark.end() :]
        kind = mark.lastgroup
        if kind in ("call", "whole"):
            spaceless = before.rstrip()
            self._emit(spaceless, pieces)
            if not self._begin(mark, pieces):
                self._emit(before[len(spaceless) :] + mark[0], pieces)
            return True
        self._emit(before.rstrip("\n") if self.is_reasoning else before, pieces)
        self.is_reasoning, self._is_skipping = kind == "reasoning", kind == "skip"
        self._strip = "\n"
        return True

    def _marks(self) -> Any:
        """Return the expression of everything that may begin here."""
        place = "later" if self._has_text else "following" if self.num_calls else "first"
        return _compile(self._tools, self._reasoning, self.is_reasoning, place)

    def _emit(self, text: str, pieces: list[Piece]) -> None:
        """Emit text, without white space that only separates marks."""
        text = text.lstrip(self._strip) if self._strip else text
        if not text or self._is_skipping:
            return
        self._strip = ""
        if self.is_reasoning:
            pieces.append(ReasoningPiece(text))
        else:
            self._has_text = True
            pieces.append(TextPiece(text))

    def _begin(self, mark: Any, pieces: list[Piece]) -> bool:
        """Begin a call if it is well formed."""
        if mark.lastgroup == "whole":
            call = _read_call(mark["body"])
            if call is None:
                return False
            self._start_call(call[0], pieces)
            self._add_arguments(call[1], pieces)
            return True
        self._start_call(mark["name"], pieces)
        self._value = _JsonValue()
        return True

    def _start_call(self, name: str, pieces: list[Piece]) -> None:
        self.num_calls += 1
        self.is_reasoning = self._is_skipping = self._has_text = False
        self._strip = " \t\r\n"
        if not self._is_too_many:
            assert self._tools is not None, "calls have a format"
            is_short, name_ = self._tools.has_short_ids, uuid.uuid4().hex
            call_id = name_[:9] if is_short else f"call_{name_[:24]}"
            pieces.append(CallStart(self.num_calls - 1, call_id, name))

    @property
    def _is_too_many(self) -> bool:
        return self._max_calls is not None and self.num_calls > self._max_calls

    def _add_arguments(self, text: str, pieces: list[Piece]) -> None:
        if text and not self._is_too_many:
            pieces.append(ArgumentsPiece(self.num_calls - 1, text))

    def _take_arguments(self, value: "_JsonValue", pieces: list[Piece]) -> bool:
        end = value.end_in(self._held)
        self._add_arguments(self._held[:end], pieces)
        if end is None:
            self._held = ""
            return False
        self._held = self._held[end:]
        self._value, self._in_tail = None, True
        return True

    def _take_tail(self) -> bool:
        """Skip what closes a call."""
        assert self._tools is not None, "calls have a format"
        tail = regex.match(self._tools.tail, self._held, partial=True)
        if tail is not None and tail.partial:
            return False
        if tail is not None:
            self._held = self._held[tail.end() :]
        self._in_tail = False
        return True


class _JsonValue:
    """Finds the end of a streamed JSON object or list, in linear time."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._is_escaped = False

    def end_in(self, text: str) -> int | None:
        """Return where it ends in the next piece; None if it continues."""
        start = int(self._is_escaped and bool(text))
        self._is_escaped = self._is_escaped and not text
        for bracket in _BRACKETS.finditer(text, start):
            if bracket.start() < start:
                continue  # after a backslash
            match bracket[0]:
                case '"':
                    self._in_string = not self._in_string
                case "\\":
                    start = bracket.end() + 1
                    self._is_escaped = start > len(text)
                case "{" | "[" if not self._in_string:
                    self._depth += 1
                case "}" | "]" if not self._in_string:
                    self._depth -= 1
                    if self._depth <= 0:
                        return int(bracket.end())
        return None


@cache
def _compile(
    tools: ToolFormat | None, reasoning: ReasoningFormat | None, is_reasoning: bool, place: str
) -> Any:
    """Return the combined expression of everything that may match."""
    groups: list[Group] = []
    is_framed = reasoning is not None and bool(reasoning.frames)
    if tools is not None and (is_framed or not is_reasoning):
        groups += tools.anywhere
        groups += [
            (kind, rf"\A{expression}")
            for kind, expression in {"first": tools.first, "following": tools.following}.get(
                place, ()
            )
        ]
    if reasoning is not None:
        groups += reasoning.frames
        if is_reasoning and reasoning.ends:
            groups.append(("text", reasoning.ends))
        if not is_reasoning and reasoning.begins and place == "first":
            groups.append(("reasoning", rf"\A\s{{0,64}}{reasoning.begins}"))
    # An expression that never matches, where there is nothing to match.
    return regex.compile("|".join(f"(?P<{kind}>{text})" for kind, text in groups) or r"(?!)")


def _read_call(body: str) -> tuple[str, str] | None:
    """Return the name and the arguments of a call; None if it is malformed."""
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
