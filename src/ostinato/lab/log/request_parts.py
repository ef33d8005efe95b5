"""The parts of a message: texts, tool calls and results, reasoning, files.

Parts of OpenAI's chat completions and responses and of Anthropic's messages have different types,
so one reader knows them all. An image or a file is written as a placeholder with the digest of
its content; a type that is not known is refused by its name.
"""

import base64
import binascii
import hashlib
import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ostinato.errors import BrokenTrace
from ostinato.lab.log.logged_prompt import Block, Message
from ostinato.lab.log.request_fields import IN_BLOCK, IN_MESSAGE, OPAQUE_PARTS, Fields, shown

_TEXTS = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
    "summary_text": "text",
    "reasoning_text": "text",
}
_CALLS = ("tool_use", "server_tool_use", "mcp_tool_use")
_ROLES = {"developer": "system", "function": "tool"}
_LONG_LETTERS = 128
"""A string of media that is longer is written as the digest of its content."""


def read_message(fields: Fields) -> list[Message]:
    """Read a message; Anthropic's results of tools become messages of their own."""
    role = fields.take("role", str, "")
    role = _ROLES.get(role, role)
    if role not in ("system", "user", "assistant", "tool"):
        reason = f"={role!r} is not understood" if role else " is missing"
        raise BrokenTrace(f"{fields.at('role')}{reason}")
    call_id, name = fields.take("tool_call_id", str, ""), fields.take("name", str, "")
    thoughts = [fields.pop(n) for n in ("reasoning_content", "reasoning", "reasoning_details")]
    is_marked = fields.pop("cache_control") is not None
    results, blocks = list[Message](), list[Block]()
    if thought := next(filter(None, thoughts), None):
        text = thought if isinstance(thought, str) else to_json(thought)
        blocks.append(Block(fields.at("reasoning_content"), text, "reasoning"))
    content = fields.pop("content")
    if isinstance(content, str):
        blocks += [Block(fields.path, content)] if content else []
    elif content is not None:
        for part in _parts(content, fields.at("content")):
            if part.peek("type") == "tool_result":
                results.append(_result(part))
            else:
                blocks += _part(part)
    if refusal := fields.take("refusal", str, ""):
        blocks.append(Block(fields.at("refusal"), refusal))
    if (audio := fields.pop("audio")) is not None:
        blocks.append(opaque(audio, fields.at("audio"), "audio"))
    for place, call in enumerate(fields.take("tool_calls", list, [])):
        blocks.append(_tool_call(Fields(call, fields.at(f"tool_calls[{place}]"))))
    if call := fields.take("function_call", dict, {}):  # older name of a single tool call
        blocks.append(Block(fields.at("function_call"), to_json(call), "call"))
    if content is None and not blocks and role in ("system", "user"):
        raise BrokenTrace(f"{fields.at('content')} is missing")
    fields.finish(IN_MESSAGE)
    if is_marked and blocks:
        blocks[-1] = marked(blocks[-1])
    if results and not blocks:
        return results
    return [*results, Message(role, tuple(blocks), fields.path, call_id, name)]


def _parts(content: Any, path: str) -> list[Fields]:
    if not isinstance(content, list):
        raise BrokenTrace(f"{path} must be a string or a list, not {shown(content)}")
    return [
        Fields({"type": "text", "text": part} if isinstance(part, str) else part, f"{path}[{i}]")
        for i, part in enumerate(content)
    ]


def read_blocks(content: Any, path: str) -> tuple[Block, ...]:
    """Read a text or a list of parts."""
    if isinstance(content, str):
        return (Block(path, content),) if content else ()
    return tuple(block for part in _parts(content, path) for block in _part(part))


def _part(fields: Fields) -> list[Block]:
    """Read a part of a message.

    Raises:
        BrokenTrace: Its type is not understood.
    """
    kind = fields.take("type", str, "text")
    is_marked = fields.pop("cache_control") is not None
    if kind in _TEXTS:
        blocks = [Block(fields.path, fields.take(_TEXTS[kind], str, ""))]
    elif kind == "thinking":
        blocks = [Block(fields.path, fields.take("thinking", str, ""), "reasoning")]
    elif kind in _CALLS:
        call = {"name": fields.take("name", str, ""), "arguments": fields.pop("input")}
        blocks = [Block(fields.path, to_json(call), "call", fields.take("id", str, ""))]
        fields.pop("server_name")
    elif kind == "document" and _is_text(fields):
        blocks = _document(fields)
    elif kind == "search_result":
        head = "\n".join(fields.take(name, str, "") for name in ("source", "title"))
        content = read_blocks(fields.pop("content") or [], fields.at("content"))
        blocks = [Block(fields.path, "\n".join([head, *(block.text for block in content)]))]
    elif kind in OPAQUE_PARTS or kind.endswith("_tool_result"):
        blocks = [opaque(fields.rest(), fields.path, kind)]
    else:
        raise BrokenTrace(f"{fields.path}: type={kind!r} is not understood")
    fields.finish(IN_BLOCK)
    return [*blocks[:-1], marked(blocks[-1])] if is_marked and blocks else blocks


def _is_text(fields: Fields) -> bool:
    source = fields.peek("source")
    return isinstance(source, Mapping) and source.get("type") in ("text", "content")


def _document(fields: Fields) -> list[Block]:
    """Read a document that was sent as text, as one block."""
    source = fields.take("source", dict, {})
    content = read_blocks(source.get("data") or source.get("content"), fields.at("source.content"))
    head = [fields.take(name, str, "") for name in ("title", "context")]
    text = "\n".join([*filter(None, head), *(block.text for block in content)])
    return [Block(fields.path, text)]


def _result(fields: Fields) -> Message:
    """Read Anthropic's result of a tool call."""
    fields.pop("type")
    call_id, is_error = fields.take("tool_use_id", str, ""), fields.take("is_error", bool, False)
    is_marked = fields.pop("cache_control") is not None
    content = fields.pop("content")
    blocks = read_blocks(content, fields.path if isinstance(content, str) else fields.at("content"))
    if is_error:
        blocks = (Block(fields.path, "Error: "), *blocks)
    if is_marked:
        blocks = (*blocks[:-1], marked(blocks[-1] if blocks else Block(fields.path, "")))
    fields.finish(IN_BLOCK)
    return Message("tool", blocks, fields.path, call_id)


def _tool_call(fields: Fields) -> Block:
    """Read one of OpenAI's tool calls."""
    kind, call_id = fields.take("type", str, "function"), fields.take("id", str, "")
    inner = Fields(fields.pop(kind), fields.at(kind))
    given = inner.pop("arguments") if kind == "function" else inner.pop("input")
    call = {"name": inner.take("name", str, ""), "arguments": given}
    inner.finish()
    fields.finish([*IN_BLOCK, "provider_specific_fields", "extra_content"])
    return Block(fields.path, to_json(call), "call", call_id)


def opaque(value: Any, path: str, kind: str) -> Block:
    """Stand in for what is no text, such as an image: long strings become digests."""
    return Block(path, f"<{kind} {to_json(_shortened(value))}>", "opaque")


def _shortened(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _shortened(value[key]) for key in sorted(value)}
    if isinstance(value, list):
        return [_shortened(item) for item in value]
    return digest_of(value) if isinstance(value, str) and len(value) > _LONG_LETTERS else value


def digest_of(data: str) -> str:
    """Return a digest of the content of a data URL or of base64, however it is wrapped."""
    head, _, tail = data.partition(";base64,") if data.startswith("data:") else ("", "", data)
    try:
        content = base64.b64decode("".join(tail.split()), validate=True)
    except (binascii.Error, ValueError):
        content = data.encode("utf-8", "surrogatepass")
    return f"{head}{' ' if head else ''}sha256:{hashlib.sha256(content).hexdigest()[:16]}"


def marked(block: Block) -> Block:
    """Return a block with ``cache_control``."""
    return replace(block, is_marked=True)


def to_json(value: Any) -> str:
    """Write a value as JSON, keys in the order in which they were sent."""
    return json.dumps(value, ensure_ascii=False)
