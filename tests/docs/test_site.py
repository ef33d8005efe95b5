"""The site builds without a warning, and stands on its own."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.reading import ROOT

LOADED = re.compile(r"<(?:script|link|img|iframe)\b[^>]*\b(?:src|href)=\"((?:https?:)?//[^\"]*)\"")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site."""
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        # Not --quiet: what is not shown is not counted, and nothing would be strict any more.
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return folder


def test_every_page_is_built(site: Path):
    """Strictness covers links, headings and pages that the navigation forgot."""
    written = {page.relative_to(ROOT / "docs") for page in (ROOT / "docs").rglob("*.md")}
    built = {page.relative_to(site) for page in site.rglob("*.html")}
    assert {page.with_suffix(".html") for page in written} <= built


def test_no_page_loads_anything_from_elsewhere(site: Path):
    """It is read where there is no network, and reports no reader."""
    loaded = {
        address for page in site.rglob("*.html") for address in LOADED.findall(page.read_text())
    }
    assert loaded == set()


def test_the_error_reference_names_every_error(site: Path):
    """It is generated; an error without a docstring would be missing."""
    page = (site / "reference/errors.html").read_text()
    for module in ("ostinato.errors", "ostinato.core.errors"):
        source = (ROOT / "src" / module.replace(".", "/")).with_suffix(".py").read_text()
        names = re.findall(r"^class (\w+)\(", source, re.MULTILINE)
        assert len(names) > 10
        assert [name for name in names if f'id="{module}.{name}"' not in page] == []
