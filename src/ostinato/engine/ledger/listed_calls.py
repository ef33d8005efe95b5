"""Calls that a client sends back as a text which lists them.

smolagents' agents write an earlier call as Python prints it, in place of the call::

    I look.
    Calling tools:
    [{'id': 'call_8bfd…', 'type': 'function', 'function': {'name': 'sh', 'arguments': {'n': 1}}}]

The ids are random and this server's, so a list with the ids of a turn names that turn for certain.
What the list says is compared all the same: one that was edited is another message.
"""

import ast
import json
import re
from collections.abc import Mapping
from typing import Any

from ostinato.engine.ledger.meaning import Message, text_of

_HEADING = "Calling tools:\n"

_WORDS = {"True": "true", "False": "false", "None": "null"}

_LITERALS = re.compile(
    r"""'(?:[^'\\\n]++|\\(?:[\\'"nrt]|x[0-9a-f]{2}|u[0-9a-f]{4}|U[0-9a-f]{8}))*+'"""
    r"""|"(?:[^"\\\n]++|\\(?:[\\'"nrt]|x[0-9a-f]{2}|u[0-9a-f]{4}|U[0-9a-f]{8}))*+\""""
    r"""|\b(?:True|False|None)\b"""
)
"""Strings as ``repr`` writes them, and words that JSON spells otherwise."""


def with_listed_calls(message: Message) -> dict[str, Any] | None:
    """Return a message with the calls that its text lists, in place of the list.

    Returns:
        None if the message has calls of its own, or its text does not end with such a list.

    Cost: linear in the text.
    """
    text = text_of(message.get("content"))
    lead, heading, listed = (text or "").rpartition(_HEADING)
    if not heading or message.get("tool_calls") or (lead and not lead.endswith("\n")):
        return None
    try:
        calls = json.loads(_LITERALS.sub(_as_json, listed))
    except (ValueError, SyntaxError, RecursionError):
        return None
    if not isinstance(calls, list) or not all(map(_is_call, calls)):
        return None
    return {**message, "content": lead.removesuffix("\n"), "tool_calls": calls}


def _is_call(call: Any) -> bool:
    return isinstance(call, Mapping) and isinstance(call.get("function"), Mapping)


def _as_json(match: re.Match[str]) -> str:
    literal = match[0]
    return _WORDS.get(literal) or json.dumps(ast.literal_eval(literal))
