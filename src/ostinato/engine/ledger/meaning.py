"""What a message means, as digests, and the place of a turn in its conversation.

Two messages mean the same if their canonical JSON is the same: keys sorted, no white space, numbers
by value. Nothing else is equal: no white space is trimmed, no letter case is folded. Call ids and
reasoning are left out, since clients rename the first and drop the second.

The place of a turn is a digest of everything before it, one message after the other::

    root(template) ─► system ─► user ─► place of the first turn ─► its meaning ─► tool ─► ...

So a place is the same for every client that sends the same conversation, whatever its JSON looks
like, and no message can change without changing all places behind it.
"""

import json
import secrets
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any

from ostinato.protocol.conversation import ASIDE

Message = Mapping[str, Any]
"""At least ``role`` and ``content``, as in OpenAI's API."""

REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
"""The names under which templates read the reasoning of a message."""

_LEFT_OUT = {*REASONING_KEYS, ASIDE, "tool_call_id", "tool_calls", "content"}
_MAX_EXACT = 2.0**53
_DIGEST_BYTES = 32
_SECRET = secrets.token_bytes(32)
"""Keys all digests, so that none can be computed, or made to collide, outside of the process."""


def canonical(value: Any) -> str:
    """Return the JSON text that is the same for equal values.

    Numbers are compared as JavaScript's clients read them: ``1.0`` is ``1``; ``true`` is no number.
    """
    return json.dumps(
        _by_value(value), sort_keys=True, separators=(",", ":"), allow_nan=False, default=repr
    )


def canonical_arguments(arguments: Any) -> str:
    """Return the canonical form of a call's arguments; what is not JSON stands for itself."""
    try:
        if isinstance(arguments, str):
            arguments = json.loads(arguments or "{}", parse_constant=_refuse)
        return "json " + canonical(arguments)
    except (ValueError, RecursionError):
        return "text " + str(arguments)


def digest(*parts: str | bytes) -> bytes:
    """Return a digest of a row of texts, in which no two rows are alike."""
    hasher = blake2b(digest_size=_DIGEST_BYTES, key=_SECRET)
    for part in parts:
        data = part.encode(errors="surrogatepass") if isinstance(part, str) else part
        hasher.update(len(data).to_bytes(8, "little"))
        hasher.update(data)
    return hasher.digest()


def meaning_of(message: Message) -> bytes:
    """Return the digest of a message's role, content and calls, without ids and reasoning."""
    more, calls, content = dict(message), list[str](), message.get("content")
    for key in _LEFT_OUT.intersection(more):
        del more[key]
    for call in message.get("tool_calls") or ():
        calls += _call(call)
    text = content if isinstance(content, str) else text_of(content)
    told = "json " + canonical(content) if text is None else "text " + text
    return digest(canonical(more), told, *calls)


def reasoning_of(message: Message) -> str:
    """Return a message's reasoning, under whatever name it has; empty without any."""
    for key in REASONING_KEYS:
        if message.get(key):
            return str(message[key])
    return ""


def call_ids_of(message: Message) -> tuple[str, ...]:
    """Return the ids of a message's calls, without the prefix that each API has."""
    ids = list[str]()
    for call in message.get("tool_calls") or ():
        name = str(call.get("id") or "")
        ids.append(name.removeprefix("call_").removeprefix("toolu_"))
    return tuple(ids)


def places(root: bytes, messages: Sequence[Message]) -> list[bytes]:
    """Return the place before each message of a conversation, and at last that behind all.

    Cost: linear in the conversation.
    """
    row = [root]
    for message in messages:
        row.append(digest(row[-1], meaning_of(message)))
    return row


def _call(call: Mapping[str, Any]) -> tuple[str, str]:
    function = call.get("function") or call
    return str(function.get("name")), canonical_arguments(function.get("arguments"))


def text_of(content: Any) -> str | None:
    """Return a content as one text: a list of texts is their sum; None if it has other parts."""
    if content is None or isinstance(content, str):
        return content or ""
    if all(isinstance(part, Mapping) and part.get("type") == "text" for part in content):
        return "".join(str(part.get("text") or "") for part in content)
    return None


def _by_value(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer() and abs(value) < _MAX_EXACT:
        return int(value)
    if isinstance(value, Mapping):
        equal = {}
        for key, item in value.items():  # most values are texts
            equal[str(key)] = item if isinstance(item, str) else _by_value(item)
        return equal
    if isinstance(value, (list, tuple)):
        return [_by_value(item) for item in value]
    return value


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is no JSON")
