"""Options of settings: a setting of a dataclass is an option of the same name.

::

    @app.command()  # of a GroupedTyper
    def run(*, server: Annotated[dict[str, Any], SettingOptions(ServerConfig)]) -> None:
        config = ServerConfig(**server)         # has the settings that were given

What an option accepts is checked by the dataclass, so that Python and the shell refuse alike.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import Field, dataclass, field
from inspect import Parameter
from types import NoneType
from typing import Annotated, Any, get_args, get_origin

import typer
from rich.console import Console

from ostinato.cli.options.setting_texts import (
    about,
    help_line,
    is_bytes,
    option_names,
    write_exactly,
)
from ostinato.core.errors import ConfigError
from ostinato.core.setting import setting_fields, value_types
from ostinato.former_names import renamed
from ostinato.lab.size.quantities import read_bytes

_OFF, _FORMER = "no_", "former_"
"""How names of hidden parameters begin."""


@dataclass(frozen=True)
class SettingOptions:
    """The settings of a dataclass as options.

    Attributes:
        kind: The dataclass.
        groups: Groups whose settings are options, in the order of the help; all by default.
    """

    kind: type
    groups: tuple[str, ...] = ()

    def fields(self) -> "list[Field[Any]]":
        """The settings that are options."""
        known = [each for each in setting_fields(self.kind).values() if about(each).group]
        groups = self.groups or dict.fromkeys(about(each).group for each in known)
        return [each for group in groups for each in known if about(each).group == group]

    def parameters(self) -> list[Parameter]:
        """Return the parameters of a command, hidden ones for former spellings among them."""
        return [each for known in self.fields() for each in _parameters(self.kind, known)]

    def values(self, given: dict[str, Any]) -> dict[str, Any]:
        """Take the options out of a command's arguments; return the settings that were given.

        Raises:
            ConfigError: A text cannot be read, or an option is given under two names.
        """
        settings: dict[str, Any] = {}
        for known in self.fields():
            value = _given(known, given)
            if value is not None:
                settings[known.name] = _read(known, value)
        return settings


def setting_option(kind: type, name: str) -> Any:
    """Return the default of one parameter of a command: the option of a setting."""
    known = setting_fields(kind)[name]
    return field(default=known.default, metadata={"option": _option(kind, known)})


def _parameters(kind: type, known: "Field[Any]") -> list[Parameter]:
    """Return a setting's option, then hidden ones: how to turn it off, and former spellings."""
    hint = _hint(known)
    shown: Any = Annotated[hint, _option(kind, known)]
    default = None if _has_off(known) or hint == list[str] | None else _default(known)
    parameters = [Parameter(known.name, Parameter.KEYWORD_ONLY, default=default, annotation=shown)]
    hidden = {f"{_FORMER}{known.name}": former_options(known)} if former_options(known) else {}
    if _has_off(known):
        hidden[f"{_OFF}{known.name}"] = (_no(known),)
    for name, flags in hidden.items():
        value = hint if name.startswith(_FORMER) else bool | None
        annotation: Any = Annotated[value, typer.Option(*flags, hidden=True)]
        parameters.append(
            Parameter(name, Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
        )
    return parameters


def former_options(known: "Field[Any]") -> tuple[str, ...]:
    """Return the former spellings of a setting's option."""
    names = (f"--{name.replace('_', '-')}" for name in about(known).old_names)
    return (*about(known).old_options, *names)


def _option(kind: type, known: "Field[Any]") -> Any:
    """Return what Typer shows of a setting, and how it is spelled."""
    flags = list(option_names(known))
    text = help_line(kind, known.name)
    if _has_off(known):
        text += f" {_no(known)} turns it off."
    if _hint(known) == list[str] | None:
        text = f"{text.rstrip('.')}; may be repeated."
    group, env = about(known).group or None, about(known).env
    metavar = "<bytes>" if is_bytes(known) else None
    return typer.Option(*flags, help=text, rich_help_panel=group, envvar=env, metavar=metavar)


def _no(known: "Field[Any]") -> str:
    return option_names(known)[0].replace("--", "--no-", 1)


def _has_off(known: "Field[Any]") -> bool:
    """Return whether a setting is a switch that may be turned off."""
    return bool in value_types(known.type) and known.default is not False


def _hint(known: "Field[Any]") -> Any:
    """Return the type of a setting's option: what Typer can read."""
    types = value_types(known.type)
    if is_bytes(known):
        return str if isinstance(known.default, int) else str | None
    plain = next((one for one in (bool, int, float) if one in types), str)
    if any(_is_list(one) for one in types):
        return list[str] | None
    return plain | None if NoneType in types or _has_off(known) else plain


def _is_list(kind: Any) -> bool:
    origin = get_origin(kind)
    return (
        isinstance(origin, type) and issubclass(origin, (tuple, Sequence)) and bool(get_args(kind))
    )


def _default(known: "Field[Any]") -> Any:
    """Return a setting's default as the command line writes it."""
    if is_bytes(known) and isinstance(known.default, int):
        return write_exactly(known.default)
    if callable(known.default_factory):
        return json.dumps(known.default_factory())
    return known.default


def _given(known: "Field[Any]", given: dict[str, Any]) -> Any:
    """Take a setting's option out of a command's arguments; None if it has its default."""
    value, off = given.pop(known.name), given.pop(f"{_OFF}{known.name}", None)
    former = given.pop(f"{_FORMER}{known.name}", None)
    given_value = None if value == _default(known) else value
    if off:
        given_value = False
    if former is None or former == []:
        return None if given_value == [] else given_value
    now = option_names(known)[0]
    spellings = former_options(known)[0], f"{now}/{_no(known)}" if _has_off(known) else now
    if given_value is not None:
        raise ConfigError(f"{spellings[0]} is the former name of {spellings[1]}: give one of them")
    Console(stderr=True, soft_wrap=True).print(renamed(*spellings), style="yellow", markup=False)
    return former


def _read(known: "Field[Any]", value: Any) -> Any:
    """Return the value of a setting, from what the command line has."""
    if is_bytes(known):
        is_off = about(known).minimum == 0
        return int(value) if value.isdecimal() else read_bytes(known.name, value, 1 - is_off)
    if isinstance(value, list):
        parse: Callable[[str], Any] = about(known).parse or str
        return tuple(map(parse, value))
    if callable(known.default_factory):
        return _read_json(known.name, value)
    return value


def _read_json(name: str, text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{name}={text!r}: must be JSON ({error})") from error
