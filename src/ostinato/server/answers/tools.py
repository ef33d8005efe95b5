"""The tools of a request, and how the prompt describes them.

A chat template that shows tools, and calls in a format of ``answer_formats``, is handed them. For
every other template they are described in the system message in Hermes' format, calls of earlier
turns are written into the assistant's text, and results are shown to the user's side in
``<tool_response>`` tags.

====================  =====================================================================
``tool_choice``       what the model may write
====================  =====================================================================
none                  text; the prompt does not mention tools
auto                  anything; calls are read out of it. If a tool is ``strict``, a call that is
                      begun fits the schema (not in harmony's format)
required              one call or several, of any tool, that fit their schemas
a tool                one call of it that fits its schema
====================  =====================================================================
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from ostinato.server.answers.answer_formats import AnswerFormats
from ostinato.server.errors import ApiError

Message = dict[str, Any]

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"

_INSTRUCTION = """You may call these functions, each described by a line of JSON:
<tools>
{tools}
</tools>
To call one, answer with its name and its arguments as JSON between tags:
<tool_call>
{{"name": <name>, "arguments": <object that fits "parameters">}}
</tool_call>"""


@dataclass(frozen=True, slots=True)
class Tool:
    """One function that the client offers.

    Attributes:
        name: Its name.
        description: Description for the model.
        parameters: JSON schema of its arguments.
        is_strict: Whether optional calls must match the schema.
    """

    name: str
    description: str = ""
    parameters: Mapping[str, Any] = field(default_factory=lambda: {"type": "object"})
    is_strict: bool = False

    def describe(self) -> dict[str, Any]:
        """Return it for chat templates."""
        function = {"name": self.name, "description": self.description}
        return {"type": "function", "function": {**function, "parameters": dict(self.parameters)}}


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools of a request.

    Attributes:
        tools: The tools offered; may be empty.
        choice: Which calls are allowed or required.
        only: The one tool that must be called, with the choice ``required``.
        is_parallel: Whether several calls at once are allowed.
    """

    tools: tuple[Tool, ...] = ()
    choice: Literal["auto", "required"] = "auto"
    only: str | None = None
    is_parallel: bool = True

    def stops(self, formats: AnswerFormats) -> tuple[str, ...]:
        """Return strings that end the text because no second call may follow."""
        is_single = self.tools and not self.is_parallel and self.choice == "auto"
        return (formats.tools.closes,) if is_single and formats.tools.closes else ()


NO_TOOLS = ToolUse()


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
        ApiError: Two tools share a name, the named one is not offered, or none is offered where
            one must be called.
    """
    names = [tool.name for tool in tools]
    for name in names:
        if names.count(name) > 1:
            raise _refusal(f"tools offers {name!r:.80} twice: rename one of them", "tools")
    if only is not None and only not in names:
        offered = ", ".join(names) or "none"
        raise _refusal(f"tool_choice names {only!r:.80}: offered are {offered}", "tool_choice")
    if choice == "required" and not tools:
        raise _refusal("tool_choice requires a call, and tools offers nothing", "tool_choice")
    if choice == "none" or not tools:
        return NO_TOOLS
    is_single = only is not None or not is_parallel
    return ToolUse(
        tuple(tools), "required" if choice == "required" else "auto", only, not is_single
    )


def describe_tools(messages: Sequence[Message], use: ToolUse) -> list[Message]:
    """Write tools, calls and results into messages, for a template without tools."""
    plain = [_without_calls(message) for message in messages]
    if not use.tools:
        return plain
    lines = "\n".join(json.dumps(tool.describe(), ensure_ascii=False) for tool in use.tools)
    instruction = _INSTRUCTION.format(tools=lines)
    if plain and plain[0]["role"] in ("system", "developer"):
        # Tools come first, as in templates with tools: they change less often than the rest.
        first = {**plain[0], "content": f"{instruction}\n\n{text_of(plain[0]['content'])}"}
        return [first, *plain[1:]]
    return [{"role": "system", "content": instruction}, *plain]


def read_arguments(messages: Sequence[Message], as_text: bool = False) -> list[Message]:
    """Convert the arguments of earlier calls to objects or text, as the template expects."""
    given = _with_text if as_text else _with_object
    return [
        {**m, "tool_calls": [given(call) for call in m["tool_calls"]]} if m.get("tool_calls") else m
        for m in messages
    ]


def without_later_systems(messages: Sequence[Message]) -> list[Message]:
    """Make system messages behind the first the user's, for templates that refuse them there.

    A message beside another one of the user joins it, since such templates want turns to alternate.
    """
    settled: list[Message] = []
    joins = False
    for number, message in enumerate(messages):
        is_later = number > 0 and message["role"] == "system"
        if is_later:
            message = {"role": "user", "content": message["content"]}
        if (joins or is_later) and settled and settled[-1]["role"] == message["role"] == "user":
            content = _joined(settled.pop()["content"], message["content"])
            message = {**message, "content": content}
        joins = is_later
        settled.append(message)
    return settled


def _joined(first: Any, second: Any) -> Any:
    """Join two contents: texts by an empty line, parts one after the other."""
    if isinstance(first, str) and isinstance(second, str):
        return f"{first}\n\n{second}"
    text = [
        {"type": "text", "text": part} if isinstance(part, str) else part
        for content in (first, second)
        for part in ([content] if isinstance(content, str) else content)
    ]
    return text


def text_of(content: Any) -> str:
    """Return the text of a message's content, which may be a list of parts."""
    if isinstance(content, str) or content is None:
        return content or ""
    return "".join(part.get("text") or "" for part in content)


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


def _without_calls(message: Message) -> Message:
    """Write a message's calls or result as text."""
    if message["role"] == "tool":
        return {"role": "user", "content": _enclosed(message.get("content"))}
    calls = message.get("tool_calls")
    if not calls:
        return message
    written = [
        f"{_OPEN}\n{_write_call(_with_object(call)['function'])}\n{_CLOSE}" for call in calls
    ]
    text = text_of(message.get("content"))
    return {"role": message["role"], "content": "\n".join([text, *written] if text else written)}


def _enclosed(content: Any) -> Any:
    """Write a result between tags; images keep their positions."""
    opening, closing = "<tool_response>\n", "\n</tool_response>"
    if not isinstance(content, list) or all(part.get("type") == "text" for part in content):
        return f"{opening}{text_of(content)}{closing}"
    tags = ({"type": "text", "text": tag} for tag in (opening, closing))
    return [next(tags), *content, next(tags)]


def _write_call(function: Mapping[str, Any]) -> str:
    call = {"name": function["name"], "arguments": function["arguments"]}
    return json.dumps(call, ensure_ascii=False)


def _with_object(call: Mapping[str, Any]) -> dict[str, Any]:
    """Parse a call's arguments; invalid JSON stays text."""
    function = dict(call["function"])
    arguments = function.get("arguments") or "{}"
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            arguments = function["arguments"]
    return {**call, "type": "function", "function": {**function, "arguments": arguments}}


def _with_text(call: Mapping[str, Any]) -> dict[str, Any]:
    """Return a call's arguments as text."""
    arguments = call["function"].get("arguments") or "{}"
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return {**call, "type": "function", "function": {**call["function"], "arguments": arguments}}


def _refusal(message: str, param: str) -> ApiError:
    return ApiError(400, message, param=param, code="invalid_value")
