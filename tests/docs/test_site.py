"""The site builds without a warning, and stands on its own.

By day without its search and without what docstrings say, which take five sixths of the time; what
a build would complain about in docstrings is read out of these. At night the site is built whole.
"""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import griffe
import pytest

from tests.docs.reading import ROOT

LOADED = re.compile(r"<(?:script|link|img|iframe)\b[^>]*\b(?:src|href)=\"((?:https?:)?//[^\"]*)\"")
CODE = re.compile(r"^ {4}.*$|`[^`]*`", re.MULTILINE)
REFERENCE = re.compile(r"\]\[[\w.]*\]")
ERRORS = ("ostinato.errors", "ostinato.core.errors")


def build(folder: Path, is_whole: bool) -> Path:
    """Build the site."""
    done = subprocess.run(
        # Not --quiet: what is not shown is not counted, and nothing would be strict any more.
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1", "DOCS_WHOLE": str(is_whole).lower()},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return folder


def loaded_from_elsewhere(site: Path) -> set[str]:
    """Addresses from which pages load something."""
    return {
        address for page in site.rglob("*.html") for address in LOADED.findall(page.read_text())
    }


def test_every_page_is_built_and_loads_nothing_from_elsewhere(tmp_path: Path):
    """Strictness covers links, headings and pages that the navigation forgot.

    The site is read where there is no network, and reports no reader.
    """
    site = build(tmp_path, is_whole=False)
    written = {page.relative_to(ROOT / "docs") for page in (ROOT / "docs").rglob("*.md")}
    built = {page.relative_to(site) for page in site.rglob("*.html")}
    assert {page.with_suffix(".html") for page in written} <= built
    assert loaded_from_elsewhere(site) == set()


@pytest.mark.nightly
@pytest.mark.timeout(1200)
def test_the_whole_site_is_built_and_names_every_error(tmp_path: Path):
    site = build(tmp_path, is_whole=True)
    assert loaded_from_elsewhere(site) == set()
    page = (site / "reference/errors.html").read_text()
    for module in ERRORS:
        source = (ROOT / "src" / module.replace(".", "/")).with_suffix(".py").read_text()
        names = re.findall(r"^class (\w+)\(", source, re.MULTILINE)
        assert len(names) > 10
        assert [name for name in names if f'id="{module}.{name}"' not in page] == []


def documented(parent: griffe.Object) -> Iterator[griffe.Object]:
    """The public objects below a package that the reference shows."""
    for name, member in parent.members.items():
        if isinstance(member, griffe.Object) and not name.startswith("_"):
            yield member
            yield from documented(member)


def test_docstrings_are_what_the_reference_can_show(caplog: pytest.LogCaptureFixture):
    """Parameters that they describe exist, references in them are links; every error has one."""
    extensions = griffe.load_extensions(str(ROOT / "scripts/docs_docstrings.py"))
    package = griffe.load(
        "ostinato", search_paths=[ROOT / "src"], docstring_parser="google", extensions=extensions
    )
    objects = list(documented(package))
    docstrings = [each.docstring for each in objects if each.docstring is not None]
    assert len(docstrings) > 5000
    for docstring in docstrings:
        assert docstring.parsed
        assert not REFERENCE.search(CODE.sub("", docstring.value)), "the build would look it up"
    assert caplog.messages == []
    errors = [each for each in objects if each.is_class and each.path.startswith(ERRORS)]
    assert len(errors) > 20 and all(each.has_docstring for each in errors)
