"""Accepts settings by their former names for one release, with a warning."""

import warnings
from collections.abc import Mapping
from functools import wraps
from typing import Any, TypeVar

from ostinato.core.errors import ConfigError
from ostinato.core.setting import setting_fields

ClassT = TypeVar("ClassT")


def old_names_of(kind: type) -> dict[str, str]:
    """Return the present name of each former name of a setting."""
    known = setting_fields(kind).values()
    return {old: each.name for each in known for old in each.metadata["setting"].old_names}


def present_names(kind: type, given: Mapping[str, Any], stacklevel: int = 2) -> dict[str, Any]:
    """Return settings by their present names, with a DeprecationWarning for each former one.

    Raises:
        ConfigError: One is given under two names.
    """
    old_names, present = old_names_of(kind), dict(given)
    for old in old_names.keys() & given.keys():
        name = old_names[old]
        if name in given:
            raise ConfigError(f"{old} is the former name of {name}: give {name} alone")
        warnings.warn(renamed(old, name), DeprecationWarning, stacklevel + 1)
        present[name] = present.pop(old)
    return present


def renamed(old: str, name: str) -> str:
    """Say that a setting has another name now."""
    return f"{old} is now {name}; the former name is accepted for one release"


def accept_old_names(kind: type[ClassT]) -> type[ClassT]:
    """Let a dataclass take and show its settings by former names, with a warning."""
    plain, old_names = kind.__init__, old_names_of(kind)

    @wraps(plain)
    def init(self: Any, *args: Any, **given: Any) -> None:
        if not old_names.keys().isdisjoint(given):
            given = present_names(kind, given)
        plain(self, *args, **given)

    kind.__init__ = init  # type: ignore[method-assign]
    for old, name in old_names.items():
        setattr(kind, old, _former(old, name))
    return kind


def _former(old: str, name: str) -> property:
    """Return an attribute that warns of its new name."""

    def read(self: object) -> Any:
        warnings.warn(renamed(old, name), DeprecationWarning, stacklevel=2)
        return getattr(self, name)

    return property(read)
