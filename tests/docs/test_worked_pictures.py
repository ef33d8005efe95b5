"""What stands below a snippet is what the snippet prints.

A page's Python blocks are one program, from top to bottom. A block that prints is followed by
what it prints, in a fence of its own::

    ```text title="prints"

Below a `bash` block with one `ostinato` command, such a fence holds that command's output.
`title="prints, for example"` marks output that depends on weights or the machine: not compared.
"""

import contextlib
import io
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import httpx
import pytest
from openai import OpenAI

from tests.cli.terminal import Terminal
from tests.docs.conftest import address_filled_in
from tests.docs.reading import ROOT, CodeBlock, all_blocks, code_blocks, name_of

NOT_RUN = re.compile(r"<!-- not run: .{5,} -->")
PRINTS, FOR_EXAMPLE = 'title="prints"', 'title="prints, for example"'


@dataclass(frozen=True, slots=True)
class Snippet:
    """A block that can be run.

    Attributes:
        language: `python` or `bash`.
        text: What stands between the fences.
        prints: What stands in the fence below; None if there is none, or it is an example.
        is_example: Whether the fence below is an example of the output.
    """

    language: str
    text: str
    prints: str | None
    is_example: bool


def snippets(page: Path) -> list[Snippet]:
    """A page's runnable blocks in order, each with what it is said to print."""
    return [
        Snippet(
            block.language,
            block.text,
            below.text if below.title == PRINTS else None,
            below.title == FOR_EXAMPLE,
        )
        for block, below in pairwise([*all_blocks(page), CodeBlock("", "")])
        if block.language in ("python", "bash") and not NOT_RUN.fullmatch(block.before)
    ]


PAGES = [
    page
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
    if page.name != "tutorial.md" and any(s.language == "python" for s in snippets(page))
]
COMMANDS = [
    pytest.param(snippet, id=f"{name_of(page)}:{snippet.text.strip()}")
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
    for snippet in snippets(page)
    if snippet.language == "bash" and snippet.prints is not None
]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_snippets_print_what_stands_below_them(page: Path, request: pytest.FixtureRequest):
    """Block by block, in one program; a block that prints in silence is a mistake as well.

    Where a page speaks to a server, one runs.
    """
    program: dict[str, object] = {"__name__": "page"}
    for snippet in snippets(page):
        if snippet.language == "python":
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                text = address_filled_in(snippet.text, request)
                exec(compile(text, name_of(page), "exec"), program)
            if not snippet.is_example:
                assert lines(printed.getvalue()) == lines(snippet.prints or ""), snippet.text
    for value in program.values():
        if isinstance(value, (OpenAI, httpx.Client)):
            value.close()  # a page need not say so; its connections would outlive the page


@pytest.mark.parametrize("snippet", COMMANDS)
def test_commands_print_what_stands_below_them(snippet: Snippet):
    """In a terminal of 80 columns."""
    words = shlex.split(snippet.text.replace("\\\n", " "), comments=True)
    assert words.pop(0) == "ostinato"
    done = Terminal().run(*words)
    assert lines(done.stdout + done.stderr) == lines(snippet.prints or "")


def test_snippets_keep_the_house_style(tmp_path: Path):
    """Readers copy what they see, so it passes the formatter as well."""
    for page in (*PAGES, ROOT / "docs/tutorial.md"):
        for number, block in enumerate(code_blocks(page, "python")):
            name = f"{name_of(page).replace('/', '.')}-{number}.py"
            (tmp_path / name).write_text(block.text)
    command = [sys.executable, "-m", "ruff", "format", "--diff", "--line-length=80", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_snippets_are_told_from_their_output(tmp_path: Path):
    """Said to print something, nothing, or something of the kind; and those not to be run."""
    page = tmp_path / "page.md"
    page.write_text(
        '```python\nprint(1)\n```\n\n```text title="prints"\n1\n```\n'
        "```python\nx = 1\n```\n\n```text\na picture\n```\n"
        '```bash\nostinato x\n```\n```text title="prints, for example"\ny\n```\n'
        "<!-- not run: needs a GPU -->\n```python\nbig()\n```\n"
    )
    assert snippets(page) == [
        Snippet("python", "print(1)\n", "1\n", is_example=False),
        Snippet("python", "x = 1\n", None, is_example=False),
        Snippet("bash", "ostinato x\n", None, is_example=True),
    ]


def lines(text: str) -> list[str]:
    """Lines without trailing blanks, and without blank lines around them."""
    return [line.rstrip() for line in text.strip("\n").splitlines()]
