"""Turns the body of a request into a prompt, for OpenAI's three APIs and Anthropic's messages.

A field is read, written into the prompt as a setting, or known not to affect it. Any other field,
part or role is refused by name, since ignoring it could make two different prompts look equal.

Sources: the API references of OpenAI (chat completions, completions, responses) and Anthropic
(messages), and the extra parameters of vLLM and SGLang.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ostinato.errors import BrokenTrace
from ostinato.lab.log.logged_prompt import Block, LoggedPrompt, LoggedTool, Message
from ostinato.lab.log.request_fields import IN_BLOCK, NOT_IN_PROMPT, OPAQUE_ITEMS, SETTINGS, Fields
from ostinato.lab.log.request_parts import (
    digest_of,
    marked,
    opaque,
    read_blocks,
    read_message,
    to_json,
)


def is_request(value: Mapping[str, Any]) -> bool:
    """Whether an object is the body of a request."""
    is_input = isinstance(value.get("input"), (str, list)) and bool(value["input"])
    return isinstance(value.get("messages"), list) or "prompt" in value or is_input


def read_prompts(body: Mapping[str, Any], ignored: Collection[str] = ()) -> list[LoggedPrompt]:
    """Read what a request puts in front of the model; one prompt, but for lists of prompts.

    Args:
        body: As it was sent.
        ignored: Names of fields that the caller knows not to change the prompt.

    Raises:
        BrokenTrace: A field is not understood; it is named.
    """
    body = _without(body, ignored) if ignored else body
    fields = Fields(body, "")
    fields.pop("model")
    tools = _tools(fields)
    choice = fields.pop("tool_choice")
    rest = {"model", "previous_response_id", *NOT_IN_PROMPT}
    if "messages" in body:
        messages, is_anthropic = _conversation(fields, body)
        prompts = [LoggedPrompt(messages, tools, api="messages" if is_anthropic else "chat")]
    elif "input" in body:
        prompts = [LoggedPrompt(_response_input(fields), tools, api="responses")]
    else:
        prompts = [LoggedPrompt((m,), tools, api="completions") for m in _raw(fields.pop("prompt"))]
    settings = {name: fields.pop(name) for name in sorted(SETTINGS & body.keys())}
    if prompts[0].api == "messages" and _is_forced(choice):
        settings["tool_choice"] = choice
    settings = {k: v for k, v in settings.items() if v not in (None, {}, [], "", ["text"])}
    fields.finish(rest)
    text = to_json(settings) if settings else ""
    return [LoggedPrompt(p.messages, p.tools, text, p.api) for p in prompts]


def read_reply(response: Any) -> tuple[Block, ...]:
    """Read the answer beside a request: a text, or the response's body.

    Raises:
        BrokenTrace: It is none that is understood.
    """
    if isinstance(response, str):
        return (Block("response", response),) if response else ()
    body = Fields(response, "response").rest()
    if body.get("choices") == []:
        return ()
    if isinstance(body.get("choices"), list):
        choice = Fields(body["choices"][0], "response.choices[0]")
        text = choice.pop("text")
        message = choice.pop("message")
        if isinstance(text, str):
            return (Block("response", text),)
        if isinstance(message, Mapping):
            kept = {k: v for k, v in message.items() if not k.startswith("reasoning")}
            return read_message(Fields(kept, "response.message"))[-1].blocks
    if isinstance(body.get("output"), list):
        items = _items(body["output"], "response.output")
        return tuple(block for item in items for block in item.blocks)
    if "content" in body:
        role = {"role": "assistant", "content": body["content"]}
        return read_message(Fields(role, "response"))[-1].blocks
    raise BrokenTrace(f"response is not understood: it has {', '.join(body) or 'no fields'}")


def _conversation(fields: Fields, body: Mapping[str, Any]) -> tuple[tuple[Message, ...], bool]:
    """Read ``messages``, with Anthropic's ``system``, and tell whether it is Anthropic's API."""
    system, automatic = fields.pop("system"), fields.pop("cache_control")
    messages = (
        [] if system is None else [Message("system", read_blocks(system, "system"), "system")]
    )
    for place, message in enumerate(fields.take("messages", list, [])):
        messages += read_message(Fields(message, f"messages[{place}]"))
    if not messages:
        raise BrokenTrace("messages is empty")
    if automatic and messages[-1].blocks:
        last = messages[-1]
        messages[-1] = replace(last, blocks=(*last.blocks[:-1], marked(last.blocks[-1])))
    return tuple(messages), _is_anthropic(body, messages)


def _is_anthropic(body: Mapping[str, Any], messages: Sequence[Message]) -> bool:
    """Whether messages are Anthropic's, who caches up to ``cache_control`` only."""
    names = ("system", "anthropic_version", "thinking", "stop_sequences", "cache_control")
    tools, metadata = body.get("tools") or (), body.get("metadata")
    return (
        any(name in body for name in names)
        or (isinstance(metadata, Mapping) and "user_id" in metadata)
        or any("input_schema" in tool for tool in tools if isinstance(tool, Mapping))
        or any(b.is_marked or (b.kind == "call" and ".content[" in b.field)
               for message in messages for b in message.blocks)
    )  # fmt: skip


def _response_input(fields: Fields) -> tuple[Message, ...]:
    """Read ``input`` and ``instructions`` of the responses API."""
    for name in ("conversation", "prompt"):
        if fields.pop(name) is not None:
            raise BrokenTrace(f"{name} refers to what the provider stores: the log lacks it")
    messages = []
    if instructions := fields.take("instructions", str, ""):
        messages.append(Message("system", (Block("instructions", instructions),), "instructions"))
    sent = fields.pop("input")
    if isinstance(sent, str):
        return (*messages, Message("user", (Block("input", sent),), "input"))
    return (*messages, *_items(sent, "input"))


def _items(items: Sequence[Any], path: str) -> list[Message]:
    """Read the items of a response; what the assistant said in a row is one message."""
    messages: list[Message] = []
    for place, item in enumerate(items):
        for message in _item(Fields(item, f"{path}[{place}]")):
            last = messages[-1] if messages else None
            if last is not None and last.role == message.role == "assistant":
                blocks = (*last.blocks, *message.blocks)
                message = Message("assistant", blocks, last.field)
                messages.pop()
            messages.append(message)
    return messages


def _item(fields: Fields) -> list[Message]:
    kind = str(fields.peek("type") or "message")
    if kind == "message":
        return read_message(fields)
    fields.pop("type")
    if kind in ("function_call", "custom_tool_call"):
        call_id = fields.take("call_id", str, "")
        given = fields.pop("arguments" if kind == "function_call" else "input")
        call = {"name": fields.take("name", str, ""), "arguments": given}
        fields.finish([*IN_BLOCK, "namespace"])
        blocks = (Block(fields.path, to_json(call), "call", call_id),)
        return [Message("assistant", blocks, fields.path)]
    if kind in ("function_call_output", "custom_tool_call_output"):
        call_id, output = fields.take("call_id", str, ""), fields.pop("output")
        fields.finish(IN_BLOCK)
        return [Message("tool", read_blocks(output, fields.at("output")), fields.path, call_id)]
    if kind == "reasoning":
        parts = [*(fields.pop("summary") or []), *(fields.pop("content") or [])]
        secret = fields.take("encrypted_content", str, "")
        fields.finish(IN_BLOCK)
        texts = [block.text for block in read_blocks(parts, fields.path)]
        text = "\n".join([*texts, *([digest_of(secret)] if secret else [])])
        return [Message("assistant", (Block(fields.path, text, "reasoning"),), fields.path)]
    if kind not in OPAQUE_ITEMS:
        raise BrokenTrace(f"{fields.path}: type={kind!r} is not understood")
    rest = {k: v for k, v in fields.rest().items() if k not in ("id", "status")}
    return [Message("assistant", (opaque(rest, fields.path, kind),), fields.path)]


def _raw(prompt: Any) -> list[Message]:
    """Read ``prompt``: a text, or several.

    Raises:
        BrokenTrace: It holds token ids, which have no text here, or something else.
    """
    texts = prompt if isinstance(prompt, list) else [prompt]
    if not texts or not all(isinstance(text, str) for text in texts):
        is_ids = bool(texts) and all(isinstance(t, (int, list)) for t in texts)
        what = "holds token ids; log its text instead" if is_ids else "must be a string or a list"
        raise BrokenTrace(f"prompt {what}")
    paths = ["prompt"] if len(texts) == 1 else [f"prompt[{i}]" for i in range(len(texts))]
    return [Message("", (Block(p, t),), "prompt") for p, t in zip(paths, texts, strict=True)]


def _tools(fields: Fields) -> tuple[LoggedTool, ...]:
    tools = []
    for name in ("tools", "functions"):
        for place, tool in enumerate(fields.take(name, list, [])):
            definition = Fields(tool, f"{name}[{place}]").rest()
            is_marked = definition.pop("cache_control", None) is not None
            tools.append(LoggedTool(to_json(definition), is_marked))
    return tuple(tools)


def _without(value: Any, names: Collection[str]) -> Any:
    """Return a value without some fields, at any depth."""
    if isinstance(value, Mapping):
        return {k: _without(v, names) for k, v in value.items() if k not in names}
    return [_without(item, names) for item in value] if isinstance(value, list) else value


def _is_forced(choice: Any) -> bool:
    """Whether the request forces a tool, which Anthropic's cache of messages depends on."""
    return isinstance(choice, Mapping) and choice.get("type") not in (None, "auto")
