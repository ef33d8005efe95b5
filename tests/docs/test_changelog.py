"""The changelog keeps its shape, and agrees with the package."""

import re
import tomllib

from packaging.version import Version

import ostinato
from tests.docs.reading import ROOT

KINDS = ("added", "changed", "deprecated", "removed", "fixed", "security")
CHANGELOG = (ROOT / "CHANGELOG.md").read_text()


def test_it_opens_with_what_is_not_released_yet():
    """Keep a Changelog: the newest is on top, and the next one above it."""
    titles = re.findall(r"^## (.+)$", CHANGELOG, re.MULTILINE)
    assert CHANGELOG.startswith("# Changelog\n")
    assert titles[0] == "[Unreleased]"
    assert all(re.fullmatch(r"\[\d+\.\d+\.\d+\] - \d{4}-\d\d-\d\d", title) for title in titles[1:])


def test_releases_run_from_the_newest_to_the_oldest():
    """Versions and dates both fall."""
    releases = re.findall(r"^## \[(\d\S*)\] - (\S+)$", CHANGELOG, re.MULTILINE)
    order = [(Version(version), date) for version, date in releases]
    assert order == sorted(order, reverse=True)


def test_its_sections_are_the_known_kinds():
    """Six kinds of change, no others."""
    kinds = re.findall(r"^### (.+)$", CHANGELOG, re.MULTILINE)
    assert {kind.lower() for kind in kinds} <= set(KINDS)


def test_every_fragment_says_its_kind_and_something():
    """`name.kind.md`, and a sentence that ends."""
    fragments = [f for f in (ROOT / "changelog.d").iterdir() if f.name != "README.md"]
    for fragment in fragments:
        assert re.fullmatch(rf"[a-z0-9-]+\.({'|'.join(KINDS)})\.md", fragment.name), fragment.name
        assert fragment.read_text().strip().endswith("."), fragment.name


def test_the_version_stands_in_one_place():
    """Both distributions read it from the package."""
    for folder in (ROOT, ROOT / "packaging/core"):
        settings = tomllib.loads((folder / "pyproject.toml").read_text())
        assert "version" in settings["project"]["dynamic"]
        source = folder / settings["tool"]["hatch"]["version"]["path"]
        assert f'__version__ = "{ostinato.__version__}"' in source.read_text()
