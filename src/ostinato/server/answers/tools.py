"""The tools of a request, and how the prompt describes them.

A chat template that shows tools, and calls in a format of ``answer_formats``, is handed them. For
every other template they are described in the system message in Hermes' format, calls of earlier
turns are written into the assistant's text, and results are shown to the user's side in
``<tool_response>`` tags.

====================  =====================================================================
``tool_choice``       what the model may write
====================  =====================================================================
none                  text: the mark that begins a call is not sampled, where a format has one; the
                      prompt shows the tools, so that it begins as in other turns
auto                  anything; calls are read out of it. If a tool is ``strict``, a call that is
                      begun fits the schema (not in harmony's format)
required              one call or several, of any tool, that fit their schemas
a tool                one call of it that fits its schema
====================  =====================================================================
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from ostinato.protocol.conversation import Message, ToolUse

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"

_INSTRUCTION = """You may call these functions, each described by a line of JSON:
<tools>
{tools}
</tools>
To call one, answer with its name and its arguments as JSON between tags:
<tool_call>
{{"name": <name>, "arguments": <object that fits "parameters">}}
</tool_call>"""


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
