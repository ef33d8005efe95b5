"""Tables and lists on the pages hold what the code holds."""

import ast
import re
import runpy
from pathlib import Path

import pytest

from ostinato.protocol.dialects import DIALECTS, READ_ON, Dialect
from tests.docs.reading import ROOT
from tests.support.models.model_families import FAMILIES

SETTINGS = (ROOT / "docs/settings.md").read_text(encoding="utf-8")
MODELS = (ROOT / "docs/models.md").read_text(encoding="utf-8")
ROOMS = sorted({path.parent for path in (ROOT / "src/ostinato").glob("*/[a-z]*.py")})


def test_the_tables_of_settings_are_those_of_the_code():
    """``python scripts/settings_page.py`` writes them."""
    script = runpy.run_path(str(ROOT / "scripts/settings_page.py"))
    assert script["with_tables"](SETTINGS) == SETTINGS
    assert set(re.findall(r"<!-- settings: (\w+) -->", SETTINGS)) == set(script["KINDS"])


def test_the_table_of_metrics_is_that_of_the_code():
    """``python scripts/metrics_page.py`` writes it."""
    page = (ROOT / "docs/observing.md").read_text(encoding="utf-8")
    assert runpy.run_path(str(ROOT / "scripts/metrics_page.py"))["with_table"](page) == page


def test_the_picture_of_imports_is_that_of_the_code():
    """``python scripts/import_picture.py`` draws it."""
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    assert runpy.run_path(str(ROOT / "scripts/import_picture.py"))["with_picture"](page) == page


def test_the_models_page_names_the_families_that_are_tested_exactly():
    """No more and no fewer than the tests build."""
    [sentence] = re.findall(r"^Tested, .*$", MODELS, re.MULTILINE)
    assert re.findall(r"`(\w+)`", sentence.partition("model types:")[2]) == list(FAMILIES)


@pytest.mark.parametrize("room", ROOMS, ids=lambda room: room.name)
def test_every_room_lists_its_files_where_its_page_finds_them(room: Path):
    """In the docstring of its ``__init__``, and those of its folders likewise."""
    page = (ROOT / "docs/rooms" / f"{room.name}.md").read_text(encoding="utf-8")
    assert "<!-- files and rules: from the docstring of the room -->" in page
    for init in room.rglob("__init__.py"):
        listed = set(re.findall(r"``(\w+)/?``", init.read_text(encoding="utf-8")))
        files = {path.stem for path in init.parent.glob("*.py")}
        folders = {path.parent.name for path in init.parent.glob("*/__init__.py")}
        assert [n for n in files | folders if not n.startswith("_") and n not in listed] == []


@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda dialect: dialect.path)
def test_the_page_of_agents_lists_the_fields_that_are_not_obeyed(dialect: Dialect):
    page = (ROOT / "docs/agents.md").read_text(encoding="utf-8")
    section = page.partition(f"### `{dialect.path}`\n")[2].partition("\n### ")[0]
    rows = [f"| `{name}` | no effect: {reason} |" for name, reason in dialect.no_effect.items()]
    rows += [f"| `{name}` | refused: {instead} |" for name, instead in dialect.refused.items()]
    assert [line for line in section.splitlines() if line.startswith("| `")] == rows
    assert READ_ON in page


@pytest.mark.parametrize("folder", ["", "cache", "models", "servers"])
def test_the_map_of_the_harness_lists_its_files(folder: str):
    """One page in the docstring of ``tests.support``, and a list in each of its folders."""
    package = ROOT / "tests/support" / folder
    text = ast.get_docstring(ast.parse((package / "__init__.py").read_text())) or ""
    listed = set(re.findall(r"``(\w+)/?``(?=[,:])", text))
    names = {path.stem for path in package.iterdir() if path.suffix in ("", ".py")}
    assert listed == names - {"__init__", "__pycache__"}
