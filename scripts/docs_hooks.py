"""Generates what the pages do not spell out: the reference of the command line, and of the rooms.

A room's files and rules are listed once, in the docstring of its ``__init__``. Its page on the
site shows them in place of ``FILES``, and below it the reference of all of its modules.
"""

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

FILES = "<!-- files and rules: from the docstring of the room -->"
PACKAGE = Path(__file__).parents[1] / "src/ostinato"

CLI_PAGE = "reference/cli.md"
INTRODUCTION = "# Command line\n\nThis page is generated from `ostinato --help`.\n\n"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the command line's page, where the navigation asks for it."""
    if CLI_PAGE in _pages(config.nav):
        files.append(File.generated(config, CLI_PAGE, content=INTRODUCTION + cli_reference()))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, **unused: object) -> str:
    """Fill in a room's files, rules and reference."""
    if FILES not in markdown:
        return markdown
    room = PACKAGE / Path(page.file.src_uri).stem
    text = _docstring(room)
    files, rules = text.find("Files in reading order:"), text.find("Rules:")
    parts = [text[max(files, 0) : rules]] if files >= 0 else []
    parts += [text[rules:]] if rules >= 0 else []
    for section in parts:
        heading, body = section.split(":\n", 1)
        markdown = markdown.replace(FILES, f"## {heading}\n{body.rstrip()}\n\n{FILES}")
    elsewhere = _referenced(Path(config.docs_dir))
    modules = () if room.name == "cli" else _modules(room)  # its commands have a page
    reference = [f"::: {module}" for module in modules if module not in elsewhere]
    if reference:
        markdown += "\n\n".join(["\n## Reference", *reference]) + "\n"
    return markdown.replace(FILES, "")


def cli_reference() -> str:
    """Describe every subcommand and option in Markdown, below headings of level 2.

    Raises:
        PluginError: The command line cannot be imported or described.
    """
    command = [sys.executable, "-m", "typer", "ostinato.cli", "utils", "docs", "--name", "ostinato"]
    # A fixed width and no colours: the page depends on the commands alone.
    environment = os.environ | {"COLUMNS": "100", "TERM": "dumb", "NO_COLOR": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode != 0:
        raise PluginError(f"{' '.join(command)} failed:\n{done.stderr}")
    return "\n".join(
        "#" + line if line.startswith("#") else line for line in done.stdout.splitlines()
    )


def _docstring(room: Path) -> str:
    """The docstring of a room."""
    return ast.get_docstring(ast.parse((room / "__init__.py").read_text(encoding="utf-8"))) or ""


def _referenced(pages: Path) -> set[str]:
    """The modules whose reference stands on a page of its own."""
    texts = (page.read_text(encoding="utf-8") for page in pages.rglob("*.md"))
    return {module for text in texts for module in re.findall(r"^::: (\S+)", text, re.MULTILINE)}


def _modules(room: Path) -> Iterator[str]:
    """The modules of a room in reading order, those of its folders in their place."""
    for name in re.findall(r"``([\w/]+)``", _docstring(room).partition("Rules:")[0]):
        path = room / name
        if (path / "__init__.py").exists():
            yield from _modules(path)
        elif path.with_suffix(".py").exists():
            yield ".".join(("ostinato", *path.relative_to(PACKAGE).parts))


def _pages(nav: object) -> set[str]:
    """Every page that a navigation names, at any depth."""
    if isinstance(nav, str):
        return {nav}
    if isinstance(nav, dict):
        nav = list(nav.values())
    return {page for entry in nav for page in _pages(entry)} if isinstance(nav, list) else set()
