"""Reads the fields of a request's body that routing needs.

Only the length is limited: an invalid body has an empty prompt, and its worker returns the error.
"""

import hashlib
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from ostinato.core.errors import PromptTooLong
from ostinato.router.policy import RouteRequest

_DEFAULT_ANSWER_TOKENS = 256
_MAX_ANSWER_TOKENS = 1_000_000
MAX_PROMPT_CHARACTERS = 4_000_000
"""Longer than any model's context."""

_TURN_CHARACTERS = 16
"""What a template adds to each turn, roughly."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """The fields of a request that routing needs.

    Attributes:
        model: As the client named it; empty without one.
        text: Text of a completion; None for a conversation or token ids.
        token_ids: Token ids of a completion sent as ids.
        messages: Messages of a conversation, in OpenAI's shape.
        tools: In OpenAI's shape.
        template: Variables of the chat template.
        salt: The client's ``cache_salt``.
        session: The conversation, if the client names it.
        max_tokens: Maximum tokens of all answers together.
        priority: As the client asks for; lower is scheduled first.
        previous: The stored response that it continues; empty without one.
        is_one_of_several: Whether the request has more prompts.
        num_characters: Characters or token ids of everything that the prompt is made of.
    """

    model: str = ""
    text: str | None = None
    token_ids: "array[int] | None" = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] = field(default_factory=list)
    template: dict[str, Any] = field(default_factory=dict)
    salt: str = ""
    session: str = ""
    max_tokens: int = _DEFAULT_ANSWER_TOKENS
    priority: int = 0
    previous: str = ""
    is_one_of_several: bool = False
    num_characters: int = 0

    @property
    def is_whole(self) -> bool:
        """Whether the request's hits are those of this prompt alone, and all of it is here."""
        return not (self.is_one_of_several or self.previous)

    @property
    def characters(self) -> str:
        """The prompt as one text, for routing by characters."""
        if self.messages is None:
            return self.text if self.text is not None else "".join(map(chr, self._safe_ids()))
        head = msgspec.json.encode(self.tools).decode() if self.tools else ""
        turns = (f"\x1e{m['role']}\x1f{_all_of(m)}" for m in self.messages)
        return head + "".join(turns)

    def _safe_ids(self) -> list[int]:
        return [token % 0xD800 for token in self.token_ids or ()]

    def _count_characters(self) -> int:
        if self.messages is None:
            return len(self.text if self.text is not None else self.token_ids or ())
        turns = sum(_TURN_CHARACTERS + len(_all_of(turn)) for turn in self.messages)
        return turns + sum(len(msgspec.json.encode(x)) for x in (self.tools, self.template) if x)

    def route_request(
        self, tokens: "array[int] | None", salt: str, tenant: str, session: str, adapter: str = ""
    ) -> RouteRequest:
        """Return the router's view of it.

        Args:
            tokens: Its token ids; None compares it by characters.
            salt: Cache salt at the workers.
            tenant: The caller's tenant.
            session: The conversation; empty if unknown.
            adapter: As the workers' events name it; empty without one.
        """
        characters = tokens is None
        if tokens is None:
            tokens = array("I", self.characters.encode("utf-32-le", "replace"))
        return RouteRequest(
            tokens or array("I", [0]),
            characters=characters,
            adapter=adapter,
            salt=salt,
            session=session,
            tenant=tenant,
            max_tokens=self.max_tokens,
        )


def check_length(num_characters: int, max_characters: int) -> None:
    """Raise PromptTooLong if a prompt has too many characters or token ids."""
    if num_characters > max_characters:
        raise PromptTooLong(
            f"the prompt has {num_characters} characters or ids, and at most {max_characters} are "
            "routed: shorten it, or raise --max-prompt-characters"
        )


def read_prompt(path: str, body: bytes) -> Prompt:
    """Read the prompt of a body; an empty one if there is none."""
    try:
        fields = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return Prompt()
    if not isinstance(fields, dict):
        return Prompt()
    read = _READERS.get(path, _read_any)
    prompt = Prompt(**_common(fields), **read(fields))
    return replace(prompt, num_characters=prompt._count_characters())


def _common(fields: dict[str, Any]) -> dict[str, Any]:
    limits: Iterator[Any] = (
        fields.get(n) for n in ("max_completion_tokens", "max_output_tokens", "max_tokens")
    )
    answer: int = next((n for n in limits if _is_count(n)), _DEFAULT_ANSWER_TOKENS)
    samples = fields["n"] if _is_count(fields.get("n")) else 1
    template = fields.get("chat_template_kwargs")
    return {
        "model": _string(fields.get("model")),
        "salt": _string(fields.get("cache_salt")),
        "session": _string(fields.get("prompt_cache_key")) or _string(fields.get("session_id")),
        "max_tokens": min(answer * samples, _MAX_ANSWER_TOKENS),
        "priority": _integer(fields.get("priority")),
        "template": template if isinstance(template, dict) else {},
    }


def _read_any(fields: dict[str, Any]) -> dict[str, Any]:
    """Read a body of any of the shapes, such as that of ``/route``."""
    if "messages" in fields:
        return _read_messages(fields) if "system" in fields else _read_chat(fields)
    return _read_responses(fields) if "input" in fields else _read_completion(fields)


def _read_completion(fields: dict[str, Any]) -> dict[str, Any]:
    prompt = fields.get("prompt")
    is_one_of_several = False
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        is_one_of_several, prompt = len(prompt) > 1, prompt[0]  # the first one decides
    if isinstance(prompt, list):
        ids = array("I", [t for t in prompt if type(t) is int and 0 <= t < 2**32])
        return {"token_ids": ids, "is_one_of_several": is_one_of_several}
    return {"text": _string(prompt), "is_one_of_several": is_one_of_several}


def _read_chat(fields: dict[str, Any]) -> dict[str, Any]:
    return {"messages": _turns(fields.get("messages")), "tools": _dicts(fields.get("tools"))}


def _read_messages(fields: dict[str, Any]) -> dict[str, Any]:
    """Read Anthropic's body."""
    system = _text(fields.get("system"))
    turns = [{"role": "system", "content": system}] if system else []
    for turn in _turns(fields.get("messages"), flatten=False):
        turns += _anthropic_turn(turn)
    return {"messages": turns, "tools": [_as_openai_tool(t) for t in _dicts(fields.get("tools"))]}


def _anthropic_turn(turn: dict[str, Any]) -> list[dict[str, Any]]:
    blocks = _dicts(turn["content"]) if isinstance(turn["content"], list) else []
    results = [
        {"role": "tool", "content": _text(b.get("content")), "tool_call_id": b.get("tool_use_id")}
        for b in blocks
        if b.get("type") == "tool_result"
    ]
    calls = [
        _call(b.get("id"), b.get("name"), b.get("input"))
        for b in blocks
        if b.get("type") == "tool_use"
    ]
    rest: dict[str, Any] = {"role": turn["role"], "content": _text(turn["content"])}
    if calls:
        rest["tool_calls"] = calls
    return [*results, rest] if rest["content"] or calls or not results else results


def _read_responses(fields: dict[str, Any]) -> dict[str, Any]:
    """Read the body of OpenAI's responses."""
    given, turns = fields.get("input"), list[dict[str, Any]]()
    if instructions := _string(fields.get("instructions")):
        turns.append({"role": "system", "content": instructions})
    items = [{"role": "user", "content": given}] if isinstance(given, str) else _dicts(given)
    for item in items:
        if item.get("type") == "function_call":
            call = _call(item.get("call_id"), item.get("name"), item.get("arguments"))
            turns.append({"role": "assistant", "content": "", "tool_calls": [call]})
        elif item.get("type") == "function_call_output":
            output = {"role": "tool", "content": _text(item.get("output"))}
            turns.append({**output, "tool_call_id": item.get("call_id")})
        elif "role" in item:
            turns.append({"role": str(item["role"]), "content": _text(item.get("content"))})
    tools = [
        {"type": "function", "function": {k: v for k, v in tool.items() if k != "type"}}
        for tool in _dicts(fields.get("tools"))
    ]
    previous = _string(fields.get("previous_response_id"))
    return {"messages": turns, "tools": tools, "previous": previous}


_READERS = {
    "/v1/completions": _read_completion,
    "/v1/chat/completions": _read_chat,
    "/v1/responses": _read_responses,
    "/v1/messages": _read_messages,
    "/v1/messages/count_tokens": _read_messages,
}


def _turns(messages: Any, flatten: bool = True) -> list[dict[str, Any]]:
    """Return messages with texts as contents; ``developer`` becomes ``system``."""
    turns = []
    for message in _dicts(messages):
        role = str(message.get("role", "user"))
        content = message.get("content")
        kept = {k: message[k] for k in ("tool_calls", "tool_call_id", "name") if message.get(k)}
        text = _text(content) if flatten else content
        turns.append({"role": "system" if role == "developer" else role, "content": text, **kept})
    return turns


def _text(content: Any) -> str:
    """Join the texts of a content; other parts are represented by their digests."""
    if isinstance(content, str):
        return content
    return "".join(map(_part, _dicts(content)))


def _part(part: dict[str, Any]) -> str:
    if isinstance(part.get("text"), str):
        return str(part["text"])
    if part.get("type") in ("tool_use", "tool_result", "thinking", "redacted_thinking"):
        return ""
    return f"\x00{hashlib.sha256(msgspec.json.encode(part)).hexdigest()[:32]}\x00"


def _all_of(turn: dict[str, Any]) -> str:
    calls, text = turn.get("tool_calls"), str(turn["content"])
    return text + (msgspec.json.encode(calls).decode() if calls else "")


def _as_openai_tool(tool: dict[str, Any]) -> dict[str, Any]:
    function = {"name": tool.get("name"), "description": tool.get("description", "")}
    return {
        "type": "function",
        "function": {**function, "parameters": tool.get("input_schema", {})},
    }


def _call(number: Any, name: Any, arguments: Any) -> dict[str, Any]:
    text: str = arguments if isinstance(arguments, str) else msgspec.json.encode(arguments).decode()
    return {"id": number, "type": "function", "function": {"name": name, "arguments": text}}


def _dicts(value: Any) -> list[dict[str, Any]]:
    return [v for v in value if isinstance(v, dict)] if isinstance(value, list) else []


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
