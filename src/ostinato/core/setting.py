"""Declares a setting once: its type, default, range, names and meaning.

A setting is a field of a dataclass, with a docstring below it::

    max_num_seqs: int = setting(256, minimum=1)
    \"\"\"Maximum number of running sequences.\"\"\"

The checks below, options of the command line, ``--help`` and ``docs/settings.md`` derive from it.
Idea: the configs of vLLM, which derive its command line from fields and their docstrings.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields, replace
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from ostinato.core.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """The range, help and aliases of a setting, beside its field's name, annotation and default.

    Attributes:
        minimum: Lowest value.
        above: Bound that values are above, in place of ``minimum``.
        maximum: Highest value.
        choices: Values, where the annotation has no ``Literal``.
        kind: What a value must be, for messages: ``a name or a directory``.
        hint: What else to do about a wrong value, for messages.
        group: Heading in ``--help`` and on the page; without one there is no option.
        options: Spellings on the command line, if not the name's.
        env: Environment variable that the command line reads.
        unit: ``bytes`` lets the command line take ``8MiB``; so does a name with ``_bytes``.
        parse: Reads one value from the command line's text.
        page: Page of the docs that explains more, from ``docs/`` on.
        old_names: Former names, accepted with a warning for one release.
        old_options: Former spellings on the command line, accepted likewise.
    """

    minimum: float | None = None
    above: float | None = None
    maximum: float | None = None
    choices: tuple[str, ...] = ()
    kind: str = ""
    hint: str = ""
    group: str = ""
    options: tuple[str, ...] = ()
    env: str | None = None
    unit: str = ""
    parse: Callable[[str], Any] | None = None
    page: str = ""
    old_names: tuple[str, ...] = ()
    old_options: tuple[str, ...] = ()

    @property
    def limits(self) -> str:
        """The range in words; empty without one."""
        if self.above is not None:
            low = f"above {self.above:g}"
            return low if self.maximum is None else f"{low} and at most {self.maximum:g}"
        if self.minimum is None:
            return ""
        low = f"{self.minimum:g}"
        return f"at least {low}" if self.maximum is None else f"from {low} to {self.maximum:g}"


def setting(default: Any = MISSING, *, factory: Any = MISSING, **about: Any) -> Any:
    """Return a dataclass field that is a setting.

    Args:
        default: Default value; without one the setting must be given.
        factory: Makes a default that is mutable.
        **about: Attributes of ``Setting``.
    """
    return field(default=default, default_factory=factory, metadata={"setting": Setting(**about)})


def same_setting(kind: type, name: str, default: Any = MISSING, /, **changes: Any) -> Any:
    """Return a field that is the setting of another dataclass, with its docstring.

    Args:
        kind: The dataclass.
        name: The setting.
        default: Another default.
        **changes: Other attributes of ``Setting``.
    """
    origin = setting_fields(kind)[name]
    if default is MISSING:
        default = origin.default
    metadata = {"setting": replace(origin.metadata["setting"], **changes), "origin": kind}
    factory: Any = origin.default_factory if default is MISSING else MISSING
    return field(default=default, default_factory=factory, metadata=metadata)


@cache
def setting_fields(kind: type[Any]) -> dict[str, "Field[Any]"]:
    """Return the fields that are settings, by name and in their order."""
    return {each.name: each for each in fields(kind) if "setting" in each.metadata}


def shared_settings(source: object, kind: type) -> dict[str, Any]:
    """Return the values of the settings that a dataclass shares with ``source``, by name."""
    return {name: getattr(source, name) for name in setting_fields(kind) if hasattr(source, name)}


def value_types(annotation: Any) -> tuple[Any, ...]:
    """Return the alternatives of an annotation, such as ``int`` and ``NoneType``."""
    return get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)


def choices_of(known: "Field[Any]") -> tuple[str, ...]:
    """Return the values that a setting may have, if they are listed."""
    choices: tuple[str, ...] = known.metadata["setting"].choices
    literals = (get_args(one) for one in value_types(known.type) if get_origin(one) is Literal)
    return choices or next(literals, ())


def check_settings(config: Any) -> None:
    """Check each setting of a dataclass by itself.

    Raises:
        ConfigError: One is of the wrong type or out of range; the message names both.
    """
    for known in setting_fields(config.__class__).values():
        _check(known, getattr(config, known.name))


def check_setting(kind: type, name: str, value: object) -> None:
    """Check one value of a setting; errors are those of ``check_settings``."""
    _check(setting_fields(kind)[name], value)


def _check(known: "Field[Any]", value: object) -> None:
    types, choices, about = _rule(known)
    if value is None and NoneType in types:
        return
    if problem := _problem(value, types, choices, about):
        or_none = ", or None" if NoneType in types else ""
        hint = f"; {about.hint}" if about.hint else ""
        raise ConfigError(
            f"{known.name}={value!r:.200}: must be {about.kind or problem}{or_none}{hint}"
        )


@cache
def _rule(known: "Field[Any]") -> tuple[tuple[Any, ...], tuple[str, ...], Setting]:
    """Return what a check needs; looking at annotations takes most of its time."""
    return value_types(known.type), choices_of(known), known.metadata["setting"]


def _problem(value: Any, types: tuple[Any, ...], choices: tuple[str, ...], about: Setting) -> str:
    """Return what a value must be; empty if it is."""
    if choices:
        return "" if value in choices else f"one of {', '.join(choices)}"
    if bool in types:
        return "" if isinstance(value, bool) else "True or False"
    if int in types or float in types:
        is_number = isinstance(value, int if int in types else (int, float))
        is_number = is_number and not isinstance(value, bool)
        return "" if is_number and _is_within(value, about) else _number(types, about.limits)
    if str in types:
        kinds = (str, Path) if Path in types else str
        return "" if isinstance(value, kinds) else "a path" if Path in types else "text"
    if any(get_origin(one) is Mapping for one in types):
        return "" if isinstance(value, Mapping) else "a mapping"
    if any(get_args(one)[:1] == (str,) for one in types):
        is_list = isinstance(value, Sequence) and not isinstance(value, str)
        return "" if is_list and all(isinstance(one, str) for one in value) else "a list of texts"
    return ""


def _number(types: tuple[Any, ...], limits: str) -> str:
    noun = "an integer, " if int in types else "a number "
    return f"{noun}{limits}".rstrip(", ")


def _is_within(value: float, about: Setting) -> bool:
    if about.above is not None and not value > about.above:
        return False
    if about.minimum is not None and not value >= about.minimum:
        return False
    return about.maximum is None or value <= about.maximum
