"""The glossary has the words of the code, and the code has the words of the glossary."""

import ast
import re
from pathlib import Path

import pytest

from tests.docs.reading import ROOT

PAGE = (ROOT / "docs/glossary.md").read_text(encoding="utf-8")
SOURCE = ROOT / "src/ostinato"


def terms() -> list[str]:
    """The words of the first column, several of one row apart, without what is in brackets."""
    rows = re.findall(r"^\| ([^|]+) \|", PAGE, re.M)
    words = [re.sub(r" \(.*?\)", "", row) for row in rows if row not in ("Word", "---")]
    return [word for row in words for word in row.split(", ")]


def plain(text: str) -> str:
    """Lower-case words: names in camel case and with underscores are cut into theirs."""
    text = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", text)
    return re.sub(r"[\W_]+", " ", text.lower())


@pytest.fixture(scope="module")
def words_of_code() -> str:
    """All words of the package, its comments and docstrings included."""
    return plain(" ".join(path.read_text() for path in SOURCE.rglob("*.py")))


def test_every_word_of_the_glossary_occurs_in_the_code(words_of_code: str):
    missing = [term for term in terms() if f" {plain(term)}" not in words_of_code]
    assert len(terms()) > 100
    assert not missing


@pytest.mark.parametrize("room", ["core", "cache", "sched"])
def test_every_public_class_of_the_heart_is_in_the_glossary(room: str):
    """Errors have a page of their own."""
    files = [path for path in (SOURCE / room).glob("*.py") if path.name != "errors.py"]
    classes = [name for path in files for name in public_classes(path)]
    assert len(classes) > 10
    assert not [name for name in classes if f"`{name}`" not in PAGE]


def public_classes(path: Path) -> list[str]:
    """The public classes that a file defines."""
    body = ast.parse(path.read_text()).body
    names = [node.name for node in body if isinstance(node, ast.ClassDef)]
    return [name for name in names if not name.startswith("_")]
