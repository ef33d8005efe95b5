"""What holds for every test: it uses public names only, and it does not sleep."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
SOURCE = TESTS.parent / "src/ostinato"

MAY_SLEEP = TESTS / "support/waiting.py"
"""The one place that sleeps: between two looks at a condition."""

DEFINED = re.compile(
    r"\b(?:def|class|self\.|cls\.)\s*(_[a-zA-Z]\w*)|^ *(_[a-zA-Z]\w*)(?:: .*)? = ", re.M
)
"""A definition, or an assignment; names such as ``__init__`` and ``_repr_html_`` are public."""

USED = re.compile(r"\._[a-zA-Z]|[\"']_[a-zA-Z]|import .*\b_[a-zA-Z]")
"""What a file without any of these need not be parsed for."""


SLEEPS = re.compile("sleep|wait_for_timeout")
"""Functions that sleep, a browser's among them."""


def defined_in(text: str) -> set[str]:
    """Return the private names that a file defines."""
    found = {name for names in DEFINED.findall(text) for name in names}
    return {name for name in found if name and not name.endswith("_")}


def used_in(text: str) -> Iterator[tuple[int, str]]:
    """Walk line and name of what a file takes from others: attributes, imports, patched names."""
    for node in ast.walk(ast.parse(text)) if USED.search(text) else ():
        match node:
            case ast.Attribute(ast.Name("self" | "cls")):
                continue
            case ast.Attribute(_, name):
                yield node.lineno, name
            case ast.ImportFrom(str(module), names) if module.startswith("ostinato"):
                yield from ((node.lineno, alias.name) for alias in names)
            case ast.Call(_, [_, ast.Constant(str(name)), *_]):
                yield node.lineno, name
            case ast.Constant(str(path)) if path.startswith("ostinato."):
                yield node.lineno, path.rpartition(".")[2]


def sleeps_in(text: str) -> Iterator[int]:
    """Walk the lines that sleep; ``sleep(0)`` only lets other tasks run."""
    for node in ast.walk(ast.parse(text)) if SLEEPS.search(text) else ():
        match node:
            case ast.Call(ast.Name(name) | ast.Attribute(_, name), arguments):
                is_zero = any(isinstance(a, ast.Constant) and a.value == 0 for a in arguments)
                if SLEEPS.fullmatch(name) and not is_zero:
                    yield node.lineno


FILES = {path.relative_to(TESTS): path.read_text() for path in sorted(TESTS.rglob("*.py"))}


def test_tests_use_public_names_only():
    """A private name is for its own file, and for the ``check()`` of its class."""
    private = set[str]().union(*(defined_in(path.read_text()) for path in SOURCE.rglob("*.py")))
    used = [
        f"{path}:{line} {name}"
        for path, text in FILES.items()
        for line, name in used_in(text)
        if name in private and name not in defined_in(text)
    ]
    assert used == []


def test_tests_do_not_sleep():
    """They wait for a condition or an event."""
    found = [(path, line) for path, text in FILES.items() for line in sleeps_in(text)]
    assert {path for path, _ in found} == {MAY_SLEEP.relative_to(TESTS)}, found


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("import ostinato.lab; ostinato.lab._cost", ["_cost"]),
        ("from ostinato.lab import _cost", ["_cost"]),
        ("monkeypatch.setattr(engine, '_take', None)", ["_take"]),
        ("patch('ostinato.router.process.worker._LIMIT', 1)", ["_LIMIT"]),
        ("self._own = engine.step()", []),
    ],
)
def test_the_guard_finds_private_names(text: str, names: list[str]):
    found = {name for _, name in used_in(text)}
    assert sorted(name for name in found if name.startswith("_")) == names


def test_the_guard_finds_sleeps():
    text = "import time\nfrom asyncio import sleep\ntime.sleep(0.1)\nawait sleep(0)\nawait sleep(1)"
    assert sorted(sleeps_in(text + "\nview.wait_for_timeout(1300)")) == [3, 5, 6]
