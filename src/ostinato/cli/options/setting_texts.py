"""What settings mean: their docstrings, as one line of ``--help`` and whole in the docs.

The first sentence of a docstring is the help; ``scripts/settings_page.py`` writes all of it to
``docs/settings.md``.
"""

import ast
import inspect
import re
import sys
from collections.abc import Iterator
from dataclasses import Field
from functools import cache
from typing import Any

from ostinato.core.setting import Setting, choices_of, setting_fields, value_types

_NAME = re.compile(r"``(.+?)``")
_UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))


@cache
def setting_texts(kind: type) -> dict[str, str]:
    """Return the docstring of each setting of a dataclass, in one line.

    One that is the setting of another dataclass, or inherited, has that one's docstring unless it
    has its own.
    """
    own = field_docstrings(kind)
    texts = {}
    for name, known in setting_fields(kind).items():
        origins = (known.metadata.get("origin"), *kind.__mro__[1:-1])
        inherited = (setting_texts(one).get(name) for one in origins if one is not None)
        texts[name] = own.get(name) or next(filter(None, inherited), "")
    return texts


def field_docstrings(kind: type) -> dict[str, str]:
    """Return the docstrings of a class's own fields, each in one line."""
    return _docstrings(sys.modules[kind.__module__]).get(kind.__name__, {})


@cache
def _docstrings(module: Any) -> dict[str, dict[str, str]]:
    """Return the docstrings of a module's fields, by class and field."""
    classes = (each for each in ast.parse(inspect.getsource(module)).body)
    return {each.name: dict(_of_fields(each)) for each in classes if isinstance(each, ast.ClassDef)}


def _of_fields(body: ast.ClassDef) -> Iterator[tuple[str, str]]:
    for statement, following in zip(body.body, body.body[1:], strict=False):
        match statement, following:
            case ast.AnnAssign(target=ast.Name(name)), ast.Expr(ast.Constant(str(text))):
                yield name, " ".join(text.split())


def help_line(kind: type, name: str) -> str:
    """Return the help of a setting's option: the first sentence, and the choices if not named."""
    sentence = re.split(r"(?<=\.) (?=[A-Z`])", setting_texts(kind)[name], maxsplit=1)[0]
    text = with_choices(sentence, choices_of(setting_fields(kind)[name]))
    return _NAME.sub(lambda match: _spelled(kind, match[1]), text)


def with_choices(text: str, choices: tuple[str, ...]) -> str:
    """Return a text that ends with a setting's choices, unless it names all of them."""
    names = [f"``{choice}``" for choice in choices]
    if all(name in text for name in names):
        return text
    listed = f"{', '.join(names[:-1])} or {names[-1]}."
    return f"{text} One of {listed}" if set(text) & {":", ";"} else f"{text[:-1]}: {listed}"


def _spelled(kind: type, name: str) -> str:
    """Return a name as the command line spells it, if it is a setting's."""
    known = setting_fields(kind).get(name)
    return name if known is None or not about(known).group else option_names(known)[0]


def about(known: "Field[Any]") -> Setting:
    """Return what a field says of its setting."""
    described: Setting = known.metadata["setting"]
    return described


def option_names(known: "Field[Any]") -> tuple[str, ...]:
    """Return the spellings of a setting's option."""
    return about(known).options or (f"--{known.name.replace('_', '-')}",)


def is_bytes(known: "Field[Any]") -> bool:
    """Return whether a setting is an amount of memory."""
    return about(known).unit == "bytes" or (
        int in value_types(known.type) and "_bytes" in known.name
    )


def write_exactly(num_bytes: int) -> str:
    """Write an amount of memory that reads back as the same: ``8MiB``."""
    for unit, factor in _UNITS:
        if num_bytes and num_bytes % factor == 0:
            return f"{num_bytes // factor}{unit}"
    return str(num_bytes)
