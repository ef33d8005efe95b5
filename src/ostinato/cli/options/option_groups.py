"""Options of commands, and groups of them that several commands share.

A parameter that is annotated with a dataclass is replaced by an option for each of its fields::

    @dataclass(frozen=True)
    class Sampling:
        max_tokens: int = option(200)
        '''Maximum tokens to generate.'''       # the help
        temperature: Temperature = 0.8          # or an annotated type, as in Typer

    @app.command()  # of a GroupedTyper
    def run(prompt: str, n: int = option(1, "Continuations.", "-n"), *, sampling: Sampling) -> None:
        ...                                     # -n, --max-tokens, --temperature

So an option has one name, one default and one help text in all commands. A parameter annotated
with ``SettingOptions`` has an option for each setting of an engine, a server or a router instead.
"""

import inspect
from collections import ChainMap
from collections.abc import Callable
from dataclasses import Field, field, fields, is_dataclass
from functools import wraps
from inspect import Parameter
from typing import Annotated, Any, get_type_hints

import typer

from ostinato.cli.options.setting_options import SettingOptions
from ostinato.cli.options.setting_texts import field_docstrings


def option(default: Any, help: str = "", *names: str, panel: str | None = None, **more: Any) -> Any:
    """Return the default of an option: a parameter of a command, or a field of a group.

    Args:
        default: Default value.
        help: Help text; that of a group's field is its docstring if none is given here.
        *names: Flags, such as ``--echo/--no-echo``; by default the parameter's name.
        panel: Heading in the command's help.
        **more: Keywords of ``typer.Option``.
    """
    info = typer.Option(*names, help=help, rich_help_panel=panel, **more)
    return field(default=default, metadata={"option": info})


class GroupedTyper(typer.Typer):
    """Commands whose parameters may be groups of options."""

    def command(self, *args: Any, **settings: Any) -> Callable[[Callable[..., None]], Any]:
        """Return a decorator that adds a command, as in Typer."""
        register = super().command(*args, **settings)
        return lambda run: register(grouped(run))


def grouped(run: Callable[..., None]) -> Callable[..., None]:
    """Return a command with the fields of its groups as Typer options."""
    parameters: dict[str, Parameter] = {}
    groups: dict[str, type] = {}
    settings: dict[str, SettingOptions] = {}
    for parameter in inspect.signature(run).parameters.values():
        kind = parameter.annotation
        sources = [s for s in getattr(kind, "__metadata__", ()) if isinstance(s, SettingOptions)]
        if sources:
            settings[parameter.name] = sources[0]
            spread = sources[0].parameters()
        elif isinstance(kind, type) and is_dataclass(kind):
            groups[parameter.name] = kind
            spread = _options(kind)
        else:
            spread = [_parameter(parameter.name, kind, parameter.default)]
        for each in spread:
            assert each.name not in parameters, f"{each.name} is in two groups"
            parameters[each.name] = each

    @wraps(run)
    def command(**given: Any) -> None:
        for name, kind in groups.items():
            given[name] = kind(**{field.name: given.pop(field.name) for field in fields(kind)})
        for name, source in settings.items():
            given[name] = source.values(given)
        run(**given)

    command.__signature__ = inspect.Signature(list(parameters.values()))  # type: ignore[attr-defined]
    command.__annotations__ = {name: each.annotation for name, each in parameters.items()}
    return command


def _options(kind: type) -> list[Parameter]:
    """Return a group's options, in the order of its fields; each has a default."""
    hints = get_type_hints(kind, include_extras=True)
    texts = ChainMap(*(field_docstrings(each) for each in kind.__mro__ if is_dataclass(each)))
    for each in fields(kind):
        if each.name in texts and "option" in each.metadata:
            each.metadata["option"].help = texts[each.name]
    return [_parameter(each.name, hints[each.name], each) for each in fields(kind)]


def _parameter(name: str, hint: Any, default: Any) -> Parameter:
    """Return a parameter for Typer; its default may be a field of ``option``."""
    if isinstance(default, Field):
        if "option" in default.metadata:
            hint = Annotated[hint, default.metadata["option"]]
        default = default.default
    return Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=hint)
