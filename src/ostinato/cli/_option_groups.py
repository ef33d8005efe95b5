"""Options that several commands take: groups, each a dataclass.

A parameter that is annotated with a dataclass is replaced by an option for each of its fields::

    @dataclass(frozen=True)
    class Sampling:
        max_tokens: int = option(200, "Most tokens to generate.")
        temperature: Temperature = 0.8          # or an annotated type, as in Typer

    @grouped
    def run(prompt: str, sampling: Sampling) -> None: ...      # --max-tokens, --temperature

So an option has one name, one default and one help text in all commands.
"""

import inspect
from collections.abc import Callable
from dataclasses import field, fields, is_dataclass
from functools import wraps
from inspect import Parameter
from typing import Annotated, Any, get_type_hints

import typer


def option(default: Any, help: str, *names: str, panel: str | None = None) -> Any:
    """Return a field of a group of options.

    Args:
        default: Of the option.
        help: Of the option.
        *names: Such as ``--cache/--no-cache``; without any, the field's name.
        panel: Heading in the command's help.
    """
    info = typer.Option(*names, help=help, rich_help_panel=panel)
    return field(default=default, metadata={"option": info})


def grouped(run: Callable[..., None]) -> Callable[..., None]:
    """Return a command with the fields of its groups as options, as Typer wants them."""
    parameters: dict[str, Parameter] = {}
    groups: dict[str, type] = {}
    for parameter in inspect.signature(run).parameters.values():
        kind = parameter.annotation
        if isinstance(kind, type) and is_dataclass(kind):
            groups[parameter.name] = kind
            spread = _options(kind)
        else:
            spread = [parameter.replace(kind=Parameter.KEYWORD_ONLY)]
        for each in spread:
            assert each.name not in parameters, f"{each.name} stands in two groups"
            parameters[each.name] = each

    @wraps(run)
    def command(**given: Any) -> None:
        for name, kind in groups.items():
            given[name] = kind(**{field.name: given.pop(field.name) for field in fields(kind)})
        run(**given)

    command.__signature__ = inspect.Signature(list(parameters.values()))  # type: ignore[attr-defined]
    command.__annotations__ = {name: each.annotation for name, each in parameters.items()}
    return command


def _options(kind: type) -> list[Parameter]:
    """Return a group's options, in the order of its fields; each has a default."""
    hints = get_type_hints(kind, include_extras=True)
    found = []
    for each in fields(kind):
        hint = hints[each.name]
        if "option" in each.metadata:
            hint = Annotated[hint, each.metadata["option"]]
        found.append(
            Parameter(each.name, Parameter.KEYWORD_ONLY, default=each.default, annotation=hint)
        )
    return found
