"""Synthetic dialogues that show what a chat template keeps.

Each text occurs once, so that a text that is missing from a prompt was dropped by the template.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Message = Mapping[str, Any]
"""As in OpenAI's API: at least ``role`` and ``content``."""

TOOLS: Sequence[Mapping[str, Any]] = (
    {
        "type": "function",
        "function": {
            "name": "read_file",
            "description": "Read a file of the project.",
            "parameters": {
                "type": "object",
                "properties": {"path": {"type": "string", "description": "Where it is."}},
                "required": ["path"],
            },
        },
    },
)


@dataclass(frozen=True, slots=True)
class Dialogue:
    """A conversation, from its first message to a last one of the user or a tool.

    Attributes:
        name: What it shows.
        messages: In order.
        tools: Functions that the model may call.
        has_images: Whether messages have images; only some models take them.
        variables: Of the template, in every prompt; a template that has none of them is not tried.
    """

    name: str
    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]] = ()
    has_images: bool = False
    variables: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Switch:
    """A variable of templates that changes between two turns.

    Attributes:
        name: Of the variable.
        before: Its value in the first prompt.
        after: Its value in the second.
    """

    name: str
    before: object
    after: object


def _user(text: str) -> Message:
    return {"role": "user", "content": text}


def _answer(text: str, reasoning: str = "") -> Message:
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if reasoning:  # under each name that templates use
        message |= dict.fromkeys(("reasoning_content", "reasoning", "thinking"), reasoning)
    return message


def _call(number: int, reasoning: str = "") -> Message:
    function = {"name": "read_file", "arguments": {"path": f"part{number}.txt"}}
    call = {"id": f"call0000{number}", "type": "function", "function": function}
    return {**_answer("", reasoning), "tool_calls": [call]}


def _result(number: int, text: str) -> Message:
    call_id = f"call0000{number}"
    return {"role": "tool", "tool_call_id": call_id, "name": "read_file", "content": text}


_FIRST = _user("How many rivers reach the northern sea?")
_SECOND = _user("And which of them is the longest one?")
_THIRD = _user("Thank you, that was all for today.")
_SYSTEM = {"role": "system", "content": "You answer in one short sentence."}
_THOUGHTS = (
    "The map lists seven of them, and one more is a canal.",
    "Lengths are in the second table, so compare its last column.",
    "Nothing is left to look up, the numbers are complete.",
)

_PLAIN = (_FIRST, _answer("There are seven rivers."), _SECOND, _answer("It is the Ostra."), _THIRD)


def _loop(*thoughts: str) -> tuple[Message, ...]:
    """Two calls and an answer, then another question."""
    first, second, third = thoughts or ("", "", "")
    return (
        _FIRST,
        _call(1, first),
        _result(1, "Seven names are written in this part."),
        _call(2, second),
        _result(2, "Each length is given in miles here."),
        _answer("Seven rivers reach it.", third),
        _SECOND,
        _answer("The Ostra is, by far."),
        _THIRD,
    )


PLAIN = Dialogue("turns", _PLAIN)
WITH_SYSTEM = Dialogue("system prompt", (_SYSTEM, *_PLAIN))
LATER_SYSTEM = Dialogue("system message in the middle", (
    _FIRST, _answer("There are seven rivers."),
    {"role": "system", "content": "From now on, name your source."}, _SECOND,
))  # fmt: skip
CALLS = Dialogue("tool calls", _loop(), TOOLS)
REASONING = Dialogue("reasoning", (
    _FIRST, _answer("There are seven rivers.", _THOUGHTS[0]),
    _SECOND, _answer("It is the Ostra.", _THOUGHTS[1]), _THIRD,
))  # fmt: skip
REASONED_CALLS = Dialogue("tool calls with reasoning", _loop(*_THOUGHTS), TOOLS)
IMAGES = Dialogue("images", (
    {"role": "user", "content": [
        {"type": "image"}, {"type": "text", "text": "Which river is on this map?"},
    ]},
    _answer("The map shows the Ostra."), _SECOND,
), has_images=True)  # fmt: skip

UNTHINKING = tuple(
    Dialogue(f"turns with {name}=false", _PLAIN, variables={name: False})
    for name in ("enable_thinking", "thinking")
)

DIALOGUES = (
    PLAIN, WITH_SYSTEM, LATER_SYSTEM, CALLS, REASONING, REASONED_CALLS, *UNTHINKING, IMAGES
)  # fmt: skip
"""All of them, in the order of a report."""

SWITCHES = (
    Switch("enable_thinking", True, False),
    Switch("thinking", True, False),
    Switch("reasoning_effort", "low", "high"),
)
"""Variables that clients change between turns."""


def without_reasoning(message: Message) -> Message:
    """Return a message as a client sends it back that keeps no reasoning."""
    hidden = ("reasoning_content", "reasoning", "thinking")
    return {name: value for name, value in message.items() if name not in hidden}


def reasoning_of(message: Message) -> str:
    """Return an answer's reasoning; empty without any."""
    return str(message.get("reasoning_content", ""))


def with_text_arguments(messages: Sequence[Message], write: Any) -> list[Message]:
    """Return messages whose calls have their arguments as text, for templates that join strings."""
    return [
        {
            **message,
            "tool_calls": [
                {
                    **call,
                    "function": {
                        **call["function"],
                        "arguments": write(call["function"]["arguments"]),
                    },
                }
                for call in message["tool_calls"]
            ],
        }
        if "tool_calls" in message
        else message
        for message in messages
    ]
