"""Reads bodies that need not be valid: the lenient mode of this room, for routers.

A valid body gives the messages, tools and template variables that its model gives, so that a
router compares the prompt that a server computes (``tests/protocol``). Anything else gives what can
be read of it, and an unreadable body an empty prompt: the server returns the error.

Models would take ten times as long for a body of many small parts, in one call that lets no other
thread run (decision 0060), so this reads plain values. Media are their digests, as text.
"""

import hashlib
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
from pydantic import ValidationError

from ostinato.protocol.conversation import Message, Tool, Turns, add_reasoning, turns_of_blocks
from ostinato.protocol.messages import thinking_variables
from ostinato.protocol.response_tools import CustomTool, function_name, write_input
from ostinato.protocol.sampling import template_effort
from ostinato.protocol.tools import MAX_TOOLS
from ostinato.protocol.volatile import CHECKSUM_RULES, Stabiliser

SCORING_PATHS = (
    *("/v1/embeddings", "/v1/score", "/v1/rerank", "/v2/rerank", "/v1/choose"),
    *("/score", "/rerank", "/classify"),
)
"""Paths of embeddings, scores and classes."""

ROUTED_PATHS = (
    *("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"),
    *SCORING_PATHS,
)
"""Paths whose worker is chosen by the prompt; that of scores is the query."""

DEFAULT_ANSWER_TOKENS = 256
MAX_ANSWER_TOKENS = 1_000_000

Values = dict[str, Any]

_encode = msgspec.json.encode
_checksums = Stabiliser(CHECKSUM_RULES)


@dataclass(frozen=True, slots=True)
class LenientBody:
    """What can be read of a request's body.

    Attributes:
        model: As the client named it; empty without one.
        text: Text of a completion; None for a conversation or token ids.
        token_ids: Token ids of a completion sent as ids.
        messages: Messages of a conversation, for chat templates.
        tools: For chat templates.
        template: Variables of the chat template.
        salt: The client's ``cache_salt``.
        session: The conversation, if the client names it.
        max_tokens: Maximum tokens of all answers together.
        priority: As the client asks for; lower is scheduled first.
        previous: The stored response that it continues; empty without one.
        is_one_of_several: Whether the request has more prompts.
    """

    model: str = ""
    text: str | None = None
    token_ids: "array[int] | None" = None
    messages: list[Message] | None = None
    tools: list[Values] = field(default_factory=list)
    template: Values = field(default_factory=dict)
    salt: str = ""
    session: str = ""
    max_tokens: int = DEFAULT_ANSWER_TOKENS
    priority: int = 0
    previous: str = ""
    is_one_of_several: bool = False


def read_leniently(path: str, body: bytes) -> LenientBody:
    """Read a body of any API.

    Args:
        path: The path that it was sent to; one of no API is read by its fields.
        body: JSON.
    """
    try:
        fields = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return LenientBody()
    if not isinstance(fields, dict):
        return LenientBody()
    read = _READERS.get(path, _any)(fields)
    if "messages" in read:
        read["messages"] = _checksums.settle(read["messages"]).messages
    return LenientBody(**{**_common(fields), **read})


def _common(fields: Values) -> Values:
    limits: Iterator[Any] = (
        fields.get(n) for n in ("max_completion_tokens", "max_output_tokens", "max_tokens")
    )
    answer: int = next((n for n in limits if _is_count(n)), DEFAULT_ANSWER_TOKENS)
    samples = fields["n"] if _is_count(fields.get("n")) else 1
    return {
        "model": _string(fields.get("model")),
        "salt": _string(fields.get("cache_salt")),
        "session": _string(fields.get("prompt_cache_key")) or _string(fields.get("session_id")),
        "max_tokens": min(answer * samples, MAX_ANSWER_TOKENS),
        "priority": _integer(fields.get("priority")),
    }


def _any(fields: Values) -> Values:
    """Read a body of any of the shapes, such as that of ``/route``."""
    if "messages" in fields:
        return _messages(fields) if "system" in fields else _chat(fields)
    return _responses(fields) if "input" in fields else _completion(fields)


def _completion(fields: Values) -> Values:
    prompt = fields.get("prompt")
    is_one_of_several = False
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        is_one_of_several, prompt = len(prompt) > 1, prompt[0]  # the first one decides
    if isinstance(prompt, list):
        ids = array("I", [t for t in prompt if type(t) is int and 0 <= t < 2**32])
        return {"token_ids": ids, "is_one_of_several": is_one_of_several}
    return {"text": _string(prompt), "is_one_of_several": is_one_of_several}


def _scored(fields: Values) -> Values:
    """Read what all texts of a request for scores share, or the first text that is embedded."""
    names = ("query", "text_1", "queries", "data_1", "input", "prompt")
    shared = next((fields[name] for name in names if fields.get(name)), "")
    return {**_completion({"prompt": shared}), "max_tokens": 1, "is_one_of_several": True}


def _chat(fields: Values) -> Values:
    given = fields.get("chat_template_kwargs")
    template = dict(given) if isinstance(given, dict) else {}
    if fields.get("add_generation_prompt") is False:
        template["add_generation_prompt"] = False
    if effort := _string(fields.get("reasoning_effort")):
        template.setdefault("reasoning_effort", template_effort(effort))
    functions = (_object(tool["function"]) for tool in _tools(fields) if "function" in tool)
    return {
        "messages": [_chat_turn(message) for message in _objects(fields.get("messages"))],
        "tools": [_function(each, "parameters") for each in functions],
        "template": template,
    }


def _chat_turn(message: Values) -> Message:
    role = _string(message.get("role")) or "user"
    turn: Message = {
        "role": "system" if role == "developer" else role,
        "content": _text(message.get("content")),
    }
    for name in ("tool_calls", "tool_call_id", "name"):
        if value := message.get(name):
            turn[name] = value
    if "reasoning" in message or "reasoning_content" in message:
        reasoning = _string(message.get("reasoning")) or _string(message.get("reasoning_content"))
        add_reasoning(turn, reasoning)
    return turn


def _messages(fields: Values) -> Values:
    """Read Anthropic's body."""
    system = _text(fields.get("system"))
    turns: list[Message] = [{"role": "system", "content": system}] if system else []
    for message in _objects(fields.get("messages")):
        turns += _anthropic_turn(_string(message.get("role")) or "user", message.get("content"))
    template = thinking_variables(_object(fields.get("thinking")).get("type"))
    if effort := _string(_object(fields.get("output_config")).get("effort")):
        template["reasoning_effort"] = template_effort(effort)
    return {
        "messages": turns,
        "tools": [
            _function(tool, "input_schema")
            for tool in _tools(fields)
            if tool.get("type", "custom") == "custom"
        ],
        "template": template,
    }


def _anthropic_turn(role: str, content: Any) -> list[Message]:
    if isinstance(content, str):
        return turns_of_blocks(role, content)
    blocks = _objects(content)
    if not any(block.get("type") in _BLOCKS for block in blocks):
        return turns_of_blocks(role, _text(blocks) if blocks else None)
    texts, thoughts, calls, results = [], list[str](), list[Values](), list[Message]()
    for block in blocks:
        match block.get("type"):
            case "tool_result":
                call_id, content = block.get("tool_use_id"), _text(block.get("content"))
                content = f"Error: {content}" if block.get("is_error") is True else content
                results.append({"role": "tool", "tool_call_id": call_id, "content": content})
            case "tool_use":
                calls.append(_call(block.get("id"), block.get("name"), block.get("input")))
            case "thinking":
                thoughts.append(_string(block.get("thinking")))
            case "redacted_thinking":
                continue
            case _:
                texts.append(_part(block))
    return turns_of_blocks(role, "".join(texts) if texts else None, thoughts, calls, results)


_BLOCKS = frozenset(("tool_use", "tool_result", "thinking", "redacted_thinking"))


def _responses(fields: Values) -> Values:
    """Read the body of OpenAI's responses."""
    given, turns = fields.get("input"), Turns()
    if instructions := _string(fields.get("instructions")):
        turns.say("system", instructions)
    items = [{"role": "user", "content": given}] if isinstance(given, str) else _objects(given)
    for item in items:
        match item.get("type") or "message":
            case "message":
                turns.say(_string(item.get("role")) or "user", _text(item.get("content")))
            case "function_call":
                name = function_name(_string(item.get("name")), item.get("namespace"))
                turns.call(_string(item.get("call_id")), name, _arguments(item.get("arguments")))
            case "custom_tool_call":
                name = function_name(_string(item.get("name")), item.get("namespace"))
                text = write_input(_string(item.get("input")))
                turns.call(_string(item.get("call_id")), name, text)
            case "function_call_output" | "custom_tool_call_output":
                turns.answer(_string(item.get("call_id")), _text(item.get("output")))
            case "reasoning":
                turns.think(_text(item.get("content")) or _text(item.get("summary")))
    effort = _string(_object(fields.get("reasoning")).get("effort"))
    return {
        "messages": turns.messages,
        "tools": [*_response_tools(_tools(fields))],
        "template": {"reasoning_effort": template_effort(effort)} if effort else {},
        "previous": _string(fields.get("previous_response_id")),
    }


def _response_tools(tools: Iterable[Values], namespace: str | None = None) -> Iterator[Values]:
    for tool in tools:
        name = function_name(_string(tool.get("name")), namespace)
        match tool.get("type"):
            case "function":
                yield _function({**tool, "name": name}, "parameters")
            case "namespace" if namespace is None:
                inner = _objects(tool.get("tools"))[:MAX_TOOLS]
                yield from _response_tools(inner, name)
            case "custom":
                try:
                    yield CustomTool.model_validate({**tool, "name": name}).tool().describe()
                except ValidationError:
                    continue  # the server refuses the request


_READERS: Mapping[str, Callable[[Values], Values]] = {
    "/v1/completions": _completion,
    "/v1/chat/completions": _chat,
    "/v1/responses": _responses,
    "/v1/messages": _messages,
    "/v1/messages/count_tokens": _messages,
    **dict.fromkeys(SCORING_PATHS, _scored),
}


def _tools(fields: Values) -> list[Values]:
    """Return the tools, at most as many as servers accept."""
    return _objects(fields.get("tools"))[:MAX_TOOLS]


def _function(function: Values, schema: str) -> Values:
    name, description = _string(function.get("name")), _string(function.get("description"))
    return Tool(name, description, _object(function.get(schema)) or {"type": "object"}).describe()


def _text(content: Any) -> str:
    """Join the texts of a content; other parts are represented by their digests."""
    if isinstance(content, str):
        return content
    return "".join(map(_part, _objects(content)))


def _part(part: Values) -> str:
    if isinstance(text := part.get("text"), str):
        return text
    return f"\x00{hashlib.sha256(_encode(part)).hexdigest()[:32]}\x00"


def _call(call_id: Any, name: Any, arguments: Any) -> Values:
    function = {"name": name, "arguments": _arguments(arguments)}
    return {"id": call_id, "type": "function", "function": function}


def _arguments(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else _encode(arguments).decode()


def _objects(value: Any) -> list[Values]:
    return [v for v in value if isinstance(v, dict)] if isinstance(value, list) else []


def _object(value: Any) -> Values:
    return value if isinstance(value, dict) else {}


def _string(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _integer(value: Any) -> int:
    """Read an integer as lenient servers do, which take "-1" and -1.0; 0 if it is none."""
    try:
        return int(float(value))
    except OverflowError:
        return -1
    except (TypeError, ValueError):
        return 0


def _is_count(value: Any) -> bool:
    return type(value) is int and value > 0
