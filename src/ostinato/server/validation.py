"""What is wrong with a body, in one sentence?"""

from collections.abc import Sequence
from typing import Any

_CODES = {
    "missing": "missing_required_parameter",
    "extra_forbidden": "unknown_parameter",
    "json_invalid": "invalid_json",
    "unsupported_content": "unsupported_content",
}
_TYPES = ("str", "int", "float", "bool", "dict", "message")
"""Members of unions, which pydantic names where a field would stand."""

_MOST_SHOWN = 3


def describe(errors: Sequence[Any]) -> tuple[str, str | None, str]:
    """Say what is wrong, where, and which kind of mistake it is.

    Args:
        errors: Of pydantic; at least one.

    Returns:
        A message, the field that it is about (None for the whole body), and a code.
    """
    media = [error for error in errors if error["type"] == "unsupported_content"]
    errors = media or errors
    first = errors[0]
    param = _place(first["loc"])
    code = _CODES.get(first["type"])
    if code is None:
        code = "invalid_type" if first["type"].endswith("_type") else "invalid_value"
    if first["type"] == "extra_forbidden":
        name = str(first["loc"][-1])
        return f"unknown parameter {name!r:.200}: this server does not know it", param, code
    # The members of a union each complain; all of them are about one field.
    about = [error for error in errors if _top(error["loc"]) == _top(first["loc"])]
    reasons = list(dict.fromkeys(_reason(error) for error in about))[:_MOST_SHOWN]
    message = "; or: ".join(reasons)
    return (f"{param}: {message}" if param else message), param, code


def _top(loc: Sequence[str | int]) -> str | int | None:
    """Return the field of the body that a place is in."""
    return loc[1] if len(loc) > 1 else None


def _place(loc: Sequence[str | int]) -> str | None:
    """Write a place as programmers do: ``messages[1].content``."""
    place = ""
    for step in loc[1:]:
        if isinstance(step, int):
            place += f"[{step}]"
        elif step.isidentifier() and step not in _TYPES:
            place += f".{step}" if place else step
    return place or None


def _reason(error: Any) -> str:
    """Return what pydantic says, without its own words for our errors."""
    return str(error["msg"]).removeprefix("Value error, ")
