"""What does mkdocs generate? The command line's reference, from the commands themselves."""

import os
import subprocess
import sys

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

CLI_PAGE = "reference/cli.md"
INTRODUCTION = "# Command line\n\nThis page is generated from `ostinato --help`.\n\n"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the command line's page, where the navigation asks for it."""
    if CLI_PAGE in _pages(config.nav):
        files.append(File.generated(config, CLI_PAGE, content=INTRODUCTION + cli_reference()))
    return files


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


def _pages(nav: object) -> set[str]:
    """Every page that a navigation names, at any depth."""
    if isinstance(nav, str):
        return {nav}
    if isinstance(nav, dict):
        nav = list(nav.values())
    return {page for entry in nav for page in _pages(entry)} if isinstance(nav, list) else set()
