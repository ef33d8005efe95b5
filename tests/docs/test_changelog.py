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


def test_the_package_and_its_metadata_agree_on_the_version():
    """Two places name it, so they are compared."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["version"] == ostinato.__version__
