"""Turns errors into one line on stderr and an exit code.

====  ==============================================================
code  meaning
====  ==============================================================
1     a bug in Ostinato
2     the user can fix it: an ``OstinatoError``, or a wrong option
130   interrupted with Ctrl-C
====  ==============================================================

``OSTINATO_TRACEBACK=1`` prints the traceback instead.
"""

import os
import sys
from typing import Any

import typer
from rich.console import Console
from rich.text import Text
from typer.core import TyperGroup

from ostinato.core.errors import OstinatoError

EXIT_BUG = 1
EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 130


class CommandGroup(TyperGroup):
    """Commands that print errors as one line."""

    def invoke(self, ctx: Any) -> Any:
        """Run the chosen command."""
        try:
            return super().invoke(ctx)
        except OstinatoError as error:
            _raise_in_debug_mode(error)
            print_error(str(error))
            raise typer.Exit(EXIT_USER_ERROR) from error
        except MemoryError as error:
            _raise_in_debug_mode(error)
            print_error("there is not enough memory for this: use less, or close other programs")
            raise typer.Exit(EXIT_USER_ERROR) from error
        except KeyboardInterrupt as interrupt:
            print_error("interrupted")
            raise typer.Exit(EXIT_INTERRUPTED) from interrupt


def run(app: typer.Typer) -> None:
    """Run the command line and exit the process."""
    try:
        app(prog_name="ostinato")
    except Exception as error:
        _raise_in_debug_mode(error)
        print_error(
            f"this is a bug in Ostinato: {type(error).__name__}: {error} "
            "(OSTINATO_TRACEBACK=1 shows where)"
        )
        sys.exit(EXIT_BUG)


def print_error(message: str) -> None:
    """Print one red line to stderr; terminals may wrap it, files do not."""
    line = Text("error: ", style="bold red").append(" ".join(message.split()), style="red")
    Console(stderr=True, soft_wrap=True).print(line)


def _raise_in_debug_mode(error: Exception) -> None:
    if os.environ.get("OSTINATO_TRACEBACK") == "1":
        raise error
