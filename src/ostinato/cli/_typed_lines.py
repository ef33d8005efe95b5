"""Where do the lines of a conversation come from?

From a person at a terminal, with a prompt, line editing and history, or from a pipe, without.
"""

import sys
from collections.abc import Iterator

from rich.console import Console

from ostinato.cli._streaming import note
from ostinato.core.errors import RequestError


def is_interactive() -> bool:
    """Whether a person types and reads."""
    return sys.stdin.isatty() and sys.stdout.isatty()


def typed_lines(prompt: str, hint: str) -> Iterator[str]:
    """Yield lines until the end of input; at a terminal, that is Ctrl-D on an empty line.

    Args:
        prompt: Shown at a terminal.
        hint: Shown at a terminal after Ctrl-C, which drops the line that is being typed.

    Raises:
        KeyboardInterrupt: Ctrl-C without a terminal.
        RequestError: A line is no text.
    """
    if not is_interactive():
        yield from _piped_lines()
        return
    shown = _prompt(prompt)
    while True:
        try:
            print()
            line = input(shown)
        except KeyboardInterrupt:
            print()
            note(hint)
            continue
        except EOFError:
            print()
            return
        yield line


def _piped_lines() -> Iterator[str]:
    try:
        for line in sys.stdin:
            yield line.removesuffix("\n")
    except UnicodeDecodeError as error:
        raise RequestError(f"standard input is not UTF-8: {error}") from error


def _prompt(text: str) -> str:
    """Make a prompt bold; ``input`` edits lines and keeps a history once readline is loaded."""
    if Console().is_dumb_terminal:
        return text
    try:
        import readline
    except ImportError:  # not on every platform; lines can be typed all the same
        return f"\x1b[1m{text}\x1b[0m"
    readline.set_auto_history(True)
    # What is between \x01 and \x02 takes no room on the screen.
    return f"\x01\x1b[1m\x02{text}\x01\x1b[0m\x02"
