"""How does a command take options that others take as well?

A parameter that is annotated with a dataclass stands for all of its fields, each an option::

    @dataclass(frozen=True)
    class Sampling:
        max_tokens: MaxTokens = 200
        temperature: Temperature = 0.8

    @grouped
    def run(prompt: str, sampling: Sampling) -> None: ...      # --max-tokens, --temperature

So an option has one name, one default and one help text, wherever it stands.
"""

import inspect
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from functools import wraps
from inspect import Parameter
from typing import Any, get_type_hints


def grouped(run: Callable[..., None]) -> Callable[..., None]:
    """Return a command whose groups of options are spread out, as Typer wants them."""
    parameters: dict[str, Parameter] = {}
    groups: dict[str, type] = {}
    for parameter in inspect.signature(run).parameters.values():
        kind = parameter.annotation
        if isinstance(kind, type) and is_dataclass(kind):
            groups[parameter.name] = kind
            spread = _options(kind)
        else:
            spread = [parameter.replace(kind=Parameter.KEYWORD_ONLY)]
        for option in spread:
            assert option.name not in parameters, f"{option.name} stands in two groups"
            parameters[option.name] = option

    @wraps(run)
    def command(**given: Any) -> None:
        for name, kind in groups.items():
            given[name] = kind(**{field.name: given.pop(field.name) for field in fields(kind)})
        run(**given)

    command.__signature__ = inspect.Signature(list(parameters.values()))  # type: ignore[attr-defined]
    command.__annotations__ = {name: option.annotation for name, option in parameters.items()}
    return command


def _options(kind: type) -> list[Parameter]:
    """Return a group's options, in the order of its fields; each has a default."""
    hints = get_type_hints(kind, include_extras=True)
    return [
        Parameter(
            field.name, Parameter.KEYWORD_ONLY, default=field.default, annotation=hints[field.name]
        )
        for field in fields(kind)
    ]
