"""A terminal of 80 columns for the commands under test."""

from collections.abc import Callable
from io import StringIO
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner, Result

from ostinato.cli import app


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> "Terminal":
    """A terminal without colours, as wide as asked for."""
    for name in ("FORCE_COLOR", "OSTINATO_TRACEBACK", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    return Terminal()


class Terminal:
    """Runs the command line in this process.

    Attributes:
        columns: Width that the commands draw for.
    """

    def __init__(self, columns: int = 80) -> None:
        self.columns = columns

    def run(self, *args: str, stdin: str | bytes | None = None) -> Result:
        """Run ``ostinato`` with these arguments, and with this piped in."""
        width = {"COLUMNS": str(self.columns), "TERM": "dumb", "NO_COLOR": "1"}
        return CliRunner().invoke(app, args, input=stdin, env=width, prog_name="ostinato")

    def show(self, *args: str) -> str:
        """Return what a successful command prints."""
        result = self.run(*args)
        assert result.exit_code == 0, result.output
        assert result.stderr == ""
        return result.stdout

    def refuse(self, *args: str, stdin: str | bytes | None = None) -> str:
        """Return the single line with which a command ends that the user must mend."""
        result = self.run(*args, stdin=stdin)
        assert result.exit_code == 2, result.output
        assert result.stdout == ""
        assert "Traceback" not in result.stderr
        [line] = result.stderr.splitlines()
        return line


def drawn(draw: Callable[[Console, Any], None], answer: Any, width: int = 80) -> str:
    """Return what is printed of an answer on a terminal of some width."""
    console = Console(record=True, width=width, file=StringIO())
    draw(console, answer)
    return console.export_text()


def row(text: str, name: str) -> list[str]:
    """Return the cells of one row of a table."""
    [line] = [line for line in text.splitlines() if line.strip().startswith(f"{name}  ")]
    return line.split()[len(name.split()) :]


def unwrapped(text: str) -> str:
    """Return a text without the line breaks that the width of the terminal brought."""
    return " ".join(text.split())
