"""A logged prompt, independent of its API: tools, then messages of blocks.

::

    OpenAI chat, responses     tools, settings, system, messages
    Anthropic messages         tools, system, settings, messages

That is the order in which providers place them in front of the model. Every piece names the
field of the request that it was read from.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal

BlockKind = Literal["text", "reasoning", "call", "opaque"]
"""Kinds of blocks; ``opaque``: images, files, results of hosted tools."""

Api = Literal["chat", "completions", "responses", "messages"]

_WRITTEN: dict[BlockKind, str] = {
    "text": "{text}",
    "opaque": "{text}",
    "reasoning": "<think>{text}</think>\n",
    "call": '<tool_call id="{id}">{text}</tool_call>',
}


@dataclass(frozen=True, slots=True)
class Block:
    """A piece of a message.

    Attributes:
        field: Its field in the request, such as ``messages[2].content[0]``.
        text: Its text; for an image a placeholder with the digest of its content.
        kind: Kind of finding.
        call_id: Id of a tool call.
        is_marked: Whether it has ``cache_control``.
    """

    field: str
    text: str
    kind: BlockKind = "text"
    call_id: str = ""
    is_marked: bool = False

    @property
    def written(self) -> str:
        """Its text as a plain prompt has it."""
        return _WRITTEN[self.kind].format(text=self.text, id=self.call_id)


@dataclass(frozen=True, slots=True)
class Message:
    """A message of a prompt.

    Attributes:
        role: ``system``, ``user``, ``assistant`` or ``tool``; empty for a raw prompt.
        blocks: Its pieces.
        field: Where it was sent, such as ``messages[2]``.
        call_id: Id of the tool call that it answers.
        name: Name of its author, if one was sent.
    """

    role: str
    blocks: tuple[Block, ...]
    field: str
    call_id: str = ""
    name: str = ""

    @property
    def text(self) -> str:
        """What the model reads of it."""
        return "".join(block.written for block in self.blocks)

    @property
    def written(self) -> str:
        """It as a plain prompt has it, with its role."""
        if not self.role:
            return self.text
        head = " ".join(part for part in (self.role, self.name, self.call_id) if part)
        return f"<|{head}|>\n{self.text}\n"

    def as_template_input(self) -> dict[str, Any]:
        """Return it as chat templates read it."""
        content = "".join(block.written for block in self.blocks if block.kind != "call")
        message: dict[str, Any] = {"role": self.role, "content": content}
        calls = [_call(block) for block in self.blocks if block.kind == "call"]
        for key, value in (("tool_calls", calls), ("name", self.name),
                           ("tool_call_id", self.call_id)):  # fmt: skip
            if value:
                message[key] = value
        return message


@dataclass(frozen=True, slots=True)
class LoggedTool:
    """A tool that was offered.

    Attributes:
        text: Its definition as JSON, keys in the order in which they were sent.
        is_marked: Whether it has ``cache_control``.
    """

    text: str
    is_marked: bool = False

    @property
    def name(self) -> str:
        """What it is called by; its type if it has no name."""
        return _tool_name(self.text)

    def as_template_input(self) -> dict[str, Any]:
        """Return it in the form of OpenAI's chat completions, as chat templates read it."""
        parsed: dict[str, Any] = json.loads(self.text)
        if "function" in parsed or "name" not in parsed:
            return parsed
        schema = parsed.get("input_schema", parsed.get("parameters", {}))
        function = {"name": parsed["name"], "description": parsed.get("description", "")}
        return {"type": "function", "function": {**function, "parameters": schema}}


@dataclass(frozen=True, slots=True)
class LoggedPrompt:
    """What a request puts in front of the model.

    Attributes:
        messages: In order; the system's first.
        tools: In order.
        settings: Parameters that reach the prompt too, such as a schema of the answer, as JSON;
            empty without any.
        api: What it was sent to.
    """

    messages: tuple[Message, ...]
    tools: tuple[LoggedTool, ...] = ()
    settings: str = ""
    api: Api = "chat"

    @property
    def num_leading(self) -> int:
        """System messages that it begins with; a raw prompt is one."""
        places = (i for i, m in enumerate(self.messages) if m.role not in ("system", ""))
        return next(places, len(self.messages))

    @property
    def head(self) -> str:
        """The text of its leading system messages, blocks on lines of their own; or the prompt."""
        leading = self.messages[: self.num_leading]
        return "\n".join(block.written for message in leading for block in message.blocks)

    def fields(self) -> tuple[tuple[str, str], ...]:
        """List its texts in order, each with the field that it was sent in."""
        texts = [
            (f"{block.field} ({message.role})" if "[" in message.field else block.field, block.text)
            for message in self.messages
            for block in message.blocks
        ]
        if self.settings:
            texts.insert(0, ("settings", self.settings))
        if self.tools:
            texts.insert(0, ("tools", "\n".join(tool.text for tool in self.tools)))
        return tuple(texts)

    def written(self) -> str:
        """Write it without a chat template: each message after a line with its role."""
        parts = [message.written for message in self.messages]
        if self.settings:
            after = self.num_leading if self.api == "messages" else 0
            parts.insert(after, f"<|settings|>\n{self.settings}\n")
        if self.tools:
            parts.insert(0, "\n".join(["<|tools|>", *(tool.text for tool in self.tools), ""]))
        if any(message.role for message in self.messages):
            parts.append("<|assistant|>\n")
        return "".join(parts)

    def as_template_input(self) -> dict[str, Any]:
        """Return ``prompt``, or ``messages`` and ``tools`` as chat templates read them."""
        if not any(message.role for message in self.messages):
            return {"prompt": "".join(message.text for message in self.messages)}
        written: dict[str, Any] = {"messages": [m.as_template_input() for m in self.messages]}
        if self.tools:
            written["tools"] = [tool.as_template_input() for tool in self.tools]
        return written

    def with_messages(self, messages: Sequence[Message]) -> "LoggedPrompt":
        """Return it with other messages."""
        return replace(self, messages=tuple(messages))


def _call(block: Block) -> dict[str, Any]:
    """Return a call with its arguments as an object, if they are one."""
    call: dict[str, Any] = json.loads(block.text)
    try:
        parsed = json.loads(call.get("arguments", ""))
    except (TypeError, ValueError, RecursionError):
        parsed = None
    if isinstance(parsed, dict):
        call["arguments"] = parsed
    return {"id": block.call_id, "type": "function", "function": call}


@lru_cache(maxsize=4096)
def _tool_name(text: str) -> str:
    parsed = json.loads(text)
    inner = parsed.get("function")
    named = inner if isinstance(inner, dict) else parsed
    return str(named.get("name") or named.get("server_label") or named.get("type"))
