"""The site builds without a warning, and stands on its own.

By day a site of three pages is built with the settings of the whole one: what is true of every page
(links, headings, navigation) is read out of the sources in ``test_pages``, and what a build would
complain about in docstrings out of these. At night the whole site is built.
"""

import re
import shutil
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
FILES = "<!-- files and rules: from the docstring of the room -->"
ERRORS = ("ostinato.errors", "ostinato.core.errors")


def build(folder: Path, root: Path = ROOT) -> Path:
    """Build the site of a repository."""
    done = subprocess.run(
        # Not --quiet: what is not shown is not counted, and nothing would be strict any more.
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=root,
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


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A repository with a page, a room's page and the generated page of commands."""
    for name in ("src", "scripts"):
        (tmp_path / name).symlink_to(ROOT / name)
    pages = {"index": "# Small\n\n```python\nx = 1\n```\n", "rooms/plugins": f"# Room\n\n{FILES}\n"}
    for name, text in pages.items():
        (page := tmp_path / f"docs/{name}.md").parent.mkdir(exist_ok=True, parents=True)
        page.write_text(text)
    shutil.copytree(ROOT / "docs/stylesheets", tmp_path / "docs/stylesheets")
    settings = (ROOT / "mkdocs.yml").read_text().partition("\nnav:")[0]
    nav = "".join(f"  - {name}.md\n" for name in (*pages, "reference/cli"))
    (tmp_path / "mkdocs.yml").write_text(f"{settings}\nnav:\n{nav}")
    return tmp_path


def test_pages_are_filled_in_and_load_nothing_from_elsewhere(small: Path):
    """A room's page with its files, its rules and its reference; the site reports no reader."""
    site = build(small / "site", small)
    room = (site / "rooms/plugins.html").read_text()
    assert {f'id="{part}"' in room for part in ("files-in-reading-order", "rules")} == {True}
    assert 'id="ostinato.plugins.prefix_map"' in room and FILES not in room
    assert 'id="ostinato-serve"' in (site / "reference/cli.html").read_text()
    assert loaded_from_elsewhere(site) == set()


@pytest.mark.nightly
@pytest.mark.timeout(1200)
def test_the_whole_site_is_built_and_names_every_error(tmp_path: Path):
    site = build(tmp_path)
    written = {page.relative_to(ROOT / "docs") for page in (ROOT / "docs").rglob("*.md")}
    built = {page.relative_to(site) for page in site.rglob("*.html")}
    assert {page.with_suffix(".html") for page in written} <= built
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
