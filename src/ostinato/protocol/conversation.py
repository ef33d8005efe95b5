"""Conversations and tools independent of the API they came through.

A message is a mapping as chat templates read it: ``role``, ``content``, ``tool_calls``.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from ostinato.core.errors import RequestError

Message = dict[str, Any]

ASIDE = "ostinato"
"""The key of a message for what chat templates do not see: ``seals``, the sealed names of turns
that the client sent with it, and ``is_beside_result``, whether a user's message is part of one with
results of calls."""


@dataclass(frozen=True, slots=True)
class Tool:
    """One function that the client offers.

    Attributes:
        name: Its name.
        description: Description for the model.
        parameters: JSON schema of its arguments.
        is_strict: Whether optional calls must match the schema.
        binding: The schema that a call must match; None: the one that is shown.
    """

    name: str
    description: str = ""
    parameters: Mapping[str, Any] = field(default_factory=lambda: {"type": "object"})
    is_strict: bool = False
    binding: Mapping[str, Any] | None = None

    def describe(self) -> dict[str, Any]:
        """Return it for chat templates."""
        function = {"name": self.name, "description": self.description}
        return {"type": "function", "function": {**function, "parameters": dict(self.parameters)}}


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools of a request.

    Attributes:
        tools: The tools that the prompt shows; may be empty.
        choice: Whether calls are allowed, required, or neither.
        only: The one tool that must be called, with the choice ``required``.
        is_parallel: Whether several calls at once are allowed.
    """

    tools: tuple[Tool, ...] = ()
    choice: Literal["auto", "required", "none"] = "auto"
    only: str | None = None
    is_parallel: bool = True

    @property
    def may_call(self) -> bool:
        """Whether an answer may have calls."""
        return bool(self.tools) and self.choice != "none"


def use_tools(
    tools: Sequence[Tool], choice: str, only: str | None = None, is_parallel: bool = True
) -> ToolUse:
    """Settle which tools a request may call, and how.

    Args:
        tools: The tools offered.
        choice: ``none``, ``auto`` or ``required``.
        only: The one tool that must be called.
        is_parallel: Whether several may be called at once.

    Raises:
        RequestError: Two tools share a name, the named one is not offered, or none is offered where
            one must be called.
    """
    names = dict.fromkeys(tool.name for tool in tools)
    if len(names) < len(tools):
        [(name, _)] = Counter(tool.name for tool in tools).most_common(1)
        raise RequestError(f"tools={name!r:.80} is offered twice: rename one of them")
    if only is not None and only not in names:
        offered = ", ".join(names) or "none"
        raise RequestError(f"tool_choice={only!r:.80} is not offered: tools has {offered}")
    if choice == "required" and not tools:
        raise RequestError("tool_choice='required': it requires a call, and tools offers nothing")
    is_single = only is not None or not is_parallel
    settled: Literal["required", "none", "auto"]
    settled = "required" if choice == "required" else "none" if choice == "none" else "auto"
    return ToolUse(tuple(tools), settled, only, not is_single)


class Turns:
    """Messages from the items of the responses API.

    Attributes:
        messages: The messages so far; what the assistant says and its calls behind it are one.
    """

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self._thought = ""
        self._seals: list[str] = []

    def think(self, text: str, seal: str | None = None) -> None:
        """Keep reasoning, and its encrypted content, for the message or call that follows it."""
        self._thought, self._seals = text, [seal] if seal else []

    def say(self, role: str, content: Any) -> None:
        """Add a message; ``developer`` becomes ``system``."""
        role = "system" if role == "developer" else role
        self._add({"role": role, "content": content})

    def call(self, call_id: str, name: str, arguments: str) -> None:
        """Add a call of the assistant."""
        add_call(self.messages, call_id, name, arguments)
        self._settle()

    def answer(self, call_id: str, content: Any) -> None:
        """Add the result of a call."""
        self._add({"role": "tool", "tool_call_id": call_id, "content": content})

    def _add(self, message: Message) -> None:
        self.messages.append(message)
        self._settle()

    def _settle(self) -> None:
        if self.messages[-1]["role"] == "assistant":
            add_reasoning(self.messages[-1], self._thought)
            add_seals(self.messages[-1], self._seals)
        self._thought, self._seals = "", []


def turns_of_blocks(
    role: str,
    content: Any,
    thoughts: Sequence[str] = (),
    calls: Sequence[Mapping[str, Any]] = (),
    results: Sequence[Message] = (),
    seals: Sequence[str] = (),
) -> list[Message]:
    """Return the messages of one message in Anthropic's blocks: results are their own.

    Args:
        role: Of the message.
        content: Its texts and images; None if it has neither.
        thoughts: Its reasoning.
        calls: Its calls.
        results: Messages of its results of calls.
        seals: Signatures of its reasoning, and encrypted reasoning.
    """
    if content is None and not calls:
        return [*results]
    message: Message = {"role": role, "content": "" if content is None else content}
    add_reasoning(message, "".join(thoughts))
    add_seals(message, seals)
    if results:
        message[ASIDE] = {**message.get(ASIDE, {}), "is_beside_result": True}
    if calls:
        message["tool_calls"] = [*calls]
    return [*results, message]


def parts_of(content: str | list[Any]) -> str | list[dict[str, Any]]:
    """Return a content for chat templates: one text, or parts if it has images.

    Args:
        content: A text, or bodies with a method ``part`` that returns OpenAI's part.
    """
    if isinstance(content, str):
        return content
    parts = [body.part() for body in content]
    if all(part["type"] == "text" for part in parts):
        return "".join(part["text"] for part in parts)
    return parts


def add_call(messages: list[Message], call_id: str, name: str, arguments: str) -> None:
    """Append a call to the assistant's message."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    function = {"name": name, "arguments": arguments}
    call = {"id": call_id, "type": "function", "function": function}
    last = messages[-1]
    messages[-1] = {**last, "tool_calls": [*last.get("tool_calls", ()), call]}


def add_reasoning(message: Message, reasoning: str | None) -> None:
    """Add reasoning to the assistant's message, under each name that templates use."""
    if reasoning:
        message |= dict.fromkeys(("reasoning_content", "reasoning", "thinking"), reasoning)


def add_seals(message: Message, seals: Sequence[str]) -> None:
    """Add sealed names of turns to the assistant's message, aside from what templates see."""
    if seals:
        message[ASIDE] = {**message.get(ASIDE, {}), "seals": [*seals]}
