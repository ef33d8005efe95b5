"""Every page keeps to what the repository holds."""

import re
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

from tests.docs.reading import ROOT, all_blocks, name_of, pages, prose, tracked_files

LINK = re.compile(r"\]\(([^)\s]+)\)")
# A folder at the root of somebody's machine, unless it ends a longer path or an address.
MACHINE_PATH = re.compile(r"(?<![\w.)}\"'/-])/(?:home|root|Users|work|opt|mnt|srv|tmp)/\w+")
LOCAL_ADDRESS = re.compile(
    "file"
    + ":///(?:home|root|Users|work|opt|mnt|srv|tmp)/|--(?:extra-)?index-"
    + "url|--find-"
    + "links"
)
TEXT = {".py", ".md", ".toml", ".txt", ".yml", ".yaml", ".json", ".jinja", ".cfg", ""}


def text_files() -> list[Path]:
    """Every file that a person may have written."""
    return [path for path in tracked_files() if path.suffix in TEXT]


def links() -> list[tuple[Path, str]]:
    """Every link on any page, with the page it is on."""
    return [(page, target) for page in pages() for target in LINK.findall(prose(page))]


def test_every_relative_link_leads_somewhere():
    """Pages move; the links to them do not by themselves."""
    for page, target in links():
        file = target.partition("#")[0]
        if file and not re.match(r"[a-z]+:", target):
            assert (page.parent / file).exists(), f"{name_of(page)} links to {target}"


def test_every_link_into_a_page_names_one_of_its_headings():
    """README's own links included, which the site's build does not see."""
    for page, target in links():
        file, _, anchor = target.partition("#")
        goal = page if not file else page.parent / file
        if anchor and goal.suffix == ".md" and goal.is_file():
            assert anchor in _anchors(goal), f"{name_of(page)} links to {target}"


def test_code_blocks_fit_in_80_columns():
    """A phone or half a screen shows them whole; what a command prints keeps its own width."""
    lines = [
        (name_of(page), line)
        for page in pages()
        if page.parent.name not in ("decisions", "results", "tiny-shakespeare")
        for block in all_blocks(page)
        for line in block.text.splitlines()
        if 'title="prints' not in block.title
    ]
    assert len(lines) > 1000
    assert not [where for where in lines if len(where[1]) > 80]


def test_every_page_is_in_the_navigation_once():
    """A page outside it cannot be found; the reference of commands is generated."""
    navigation = (ROOT / "mkdocs.yml").read_text().partition("\nnav:")[2]
    named = Counter(re.findall(r"[\w./-]+\.md\b", navigation)) - Counter(["reference/cli.md"])
    written = Counter(
        str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")
    )
    assert named == written


def test_no_file_speaks_of_one_machine():
    """A path or an address that only one machine knows misleads everybody else."""
    for path in text_files():
        text = path.read_text(encoding="utf-8")
        assert not MACHINE_PATH.findall(text), name_of(path)
        assert not LOCAL_ADDRESS.findall(text), name_of(path)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("see /" + "home/ada/notes", True),
        ("`/" + "tmp/cache`", True),
        ("out=/" + "work/x", True),
        ("https://example.org/home/page", False),
        ("docs/work/page and a.b/opt/x", False),
        ("host memory/disk", False),
    ],
)
def test_the_watch_tells_machine_paths_from_others(text: str, found: bool):
    """It must neither miss one nor cry at addresses."""
    assert bool(MACHINE_PATH.search(text)) is found


def test_every_number_of_a_law_is_taken_once():
    """Code cites laws by number, so there are ten, in order."""
    text = (ROOT / "docs/laws.md").read_text()
    assert re.findall(r"^## (\d+)\. ", text, re.MULTILINE) == [str(n) for n in range(1, 11)]
    assert text.count("\nTested by:") == 10


def test_every_test_that_a_law_names_exists():
    """`path::name` is a test function in that file."""
    text = (ROOT / "docs/laws.md").read_text()
    named = re.findall(r"`(tests/[\w/.]+\.py)(?:::(\w+))?`", text)
    assert len(named) > 10
    for file, name in named:
        assert (ROOT / file).is_file(), file
        assert not name or f"def {name}(" in (ROOT / file).read_text(), name


def test_every_law_names_its_tests_or_says_that_it_is_not_built_yet():
    """Nothing in between."""
    text = (ROOT / "docs/laws.md").read_text()
    for law in re.split(r"^## \d+\. ", text, flags=re.MULTILINE)[1:]:
        proof = law.partition("\nTested by:")[2]
        assert ("`tests/" in proof) != ("nothing yet" in proof), law.splitlines()[0]


@cache
def _anchors(page: Path) -> set[str]:
    """The names under which a page's headings can be reached."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", h.lower()).strip()) for h in headings}
