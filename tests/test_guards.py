"""Guards of the text: tests use public names only and do not sleep; identifiers are nouns."""

import ast
import re
import tokenize
from collections import Counter
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


SOURCES = {".py", ".h", ".cpp"}

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


DIALECT = frozenset(
    {"found", "most", "least", "wanted", "mine", "theirs", "made", "whose", "asked"}
)
"""Words that name nothing; write the noun (``match``, ``max_blocks``, ``requested``)."""

IN_DIALECT = re.compile(rf"(?<![^\W_])(?:{'|'.join(DIALECT)})(?![^\W_])")
"""What a file without it need not be tokenized for."""

FIELD_WORDS = frozenset({"connection_made", "most_common", "least_loaded", "least_busy"})
"""Names of asyncio, of ``Counter``, and of load balancing."""

MAX_DIALECT = {
    "observe": 6,  # the fields of Difference and the parameter of top_prefixes are public
    "cli": 3,  # keys of ``ostinato demo --json``
    "cache": 3,  # so is CacheManager.admit(most_new=)
    "lab": 1,
}
"""Identifiers of the dialect per room: today's numbers, to be lowered; no other room has one."""


def dialect_in(path: Path) -> list[str]:
    """Return the identifiers of a file that contain a word of the dialect."""
    if not IN_DIALECT.search(path.read_text()):
        return []
    with path.open("rb") as file:
        names = [t.string for t in tokenize.tokenize(file.readline) if t.type == tokenize.NAME]
    return [n for n in names if n not in FIELD_WORDS and not DIALECT.isdisjoint(n.split("_"))]


def test_identifiers_are_nouns_of_the_field():
    """No room gets an identifier such as ``found`` or ``most`` more than it has today."""
    names: dict[str, list[str]] = {}
    for path in SOURCE.rglob("*.py"):
        names.setdefault(path.relative_to(SOURCE).parts[0], []).extend(dialect_in(path))
    over = {
        room: sorted(set(used))
        for room, used in names.items()
        if len(used) > MAX_DIALECT.get(room, 0)
    }
    assert over == {}


def test_the_guard_counts_identifiers_alone(tmp_path: Path):
    path = tmp_path / "example.py"
    path.write_text('"""It found most."""\nmost_rows = x.found  # made\nCounter().most_common()\n')
    assert dialect_in(path) == ["most_rows", "found"]


def test_no_file_begins_with_a_question():
    """A headline says what the file does."""
    trees = [
        SOURCE,
        *(TESTS.parent / name for name in ("tests", "benchmarks", "scripts", "native")),
    ]
    files = [path for tree in trees for path in tree.rglob("*") if path.suffix in SOURCES]
    assert len(files) > 1_000
    assert not [path for path in files if "?" in path.read_text().partition("\n")[0]]


def test_no_folder_has_more_than_twenty_files():
    """Headers and ``__init__`` included; pages of the docs are a list by nature."""
    trees = [SOURCE, *(TESTS.parent / name for name in ("tests", "benchmarks", "native"))]
    folders = Counter(
        path.parent for tree in trees for path in tree.rglob("*") if path.suffix in SOURCES
    )
    assert not {str(folder): count for folder, count in folders.items() if count > 20}
