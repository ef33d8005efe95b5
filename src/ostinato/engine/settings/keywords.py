"""Accepts vLLM's keywords where their value changes nothing, and refuses the others.

``tensor_parallel_size=1`` is accepted and ignored; any other value is refused with the reason and
a replacement; an unknown keyword is refused with the nearest known name.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from functools import wraps
from typing import Any, TypeVar

from ostinato.core.errors import OstinatoError

ClassT = TypeVar("ClassT")


@dataclass(frozen=True, slots=True)
class NumberFrom:
    """Any number from a minimum one on, among the values that change nothing."""

    minimum: float

    def __contains__(self, value: object) -> bool:
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        return is_number and value >= self.minimum  # type: ignore[operator]

    def __repr__(self) -> str:
        return f"{self.minimum} or more"


@dataclass(frozen=True, slots=True)
class Unsupported:
    """A keyword that vLLM has and Ostinato does not."""

    instead: str  # the reason, and what to use instead
    harmless: tuple[object, ...] = (None,)  # values that change nothing

    def accepts(self, value: object) -> bool:
        """Whether a value changes nothing."""
        return any(
            value in one
            if isinstance(one, NumberFrom)
            else type(value) is type(one) and value == one
            for one in self.harmless
        )


UnsupportedTable = Mapping[str, Unsupported]


def known_keywords(
    given: Mapping[str, Any],
    known: Collection[str],
    unsupported: UnsupportedTable,
    error: type[OstinatoError],
) -> dict[str, Any]:
    """Return the known keywords, without harmless ones of vLLM.

    Raises:
        OstinatoError: Of the class ``error``: a keyword is not supported or is unknown.
    """
    kept = {}
    for name, value in given.items():
        if name in known:
            kept[name] = value
        elif name not in unsupported:
            near = get_close_matches(name, [*known, *unsupported], n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(known)}"
            raise error(f"there is no keyword {name!r}: {hint}")
        elif not unsupported[name].accepts(value):
            raise error(f"{name}={value!r:.80} is not supported: {unsupported[name].instead}")
    return kept


def accepts_vllm_keywords(
    unsupported: UnsupportedTable, error: type[OstinatoError]
) -> Callable[[type[ClassT]], type[ClassT]]:
    """Let a dataclass accept the keywords of its counterpart in vLLM."""

    def decorate(cls: type[ClassT]) -> type[ClassT]:
        known = [field.name for field in fields(cls)]  # type: ignore[arg-type]
        names = frozenset(known)
        plain = cls.__init__

        @wraps(plain)
        def checked(self: Any, *args: Any, **given: Any) -> None:
            if not given.keys() <= names:
                given = known_keywords(given, known, unsupported, error)
            plain(self, *args, **given)

        cls.__init__ = checked  # type: ignore[method-assign]
        return cls

    return decorate
