"""A program that believes to be at a terminal, and the hand that types there."""

import os
import pty
import re
import select
import subprocess
import sys

CTRL_C, CTRL_D, UP, RETURN = "\x03", "\x04", "\x1b[A", "\n"

_PATIENCE_S = 60
"""A program that hangs fails its test in the end; machines that are busy do not."""

_PROGRAM = """
import fcntl, signal, sys, termios
signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
fcntl.ioctl(0, termios.TIOCSCTTY, 0)  # from now on, Ctrl-C comes from this terminal
from ostinato.cli import main
sys.argv = ["ostinato", *sys.argv[1:]]
main()
"""
_ESCAPE_CODES = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|[\r\x01\x02]")


class PseudoTerminal:
    """``ostinato`` at a terminal of 80 columns; a context manager."""

    def __init__(self, *arguments: str) -> None:
        self._screen, self._num_read = "", 0
        self._master, slave = pty.openpty()
        self._process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, *arguments],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
            env=os.environ | {"COLUMNS": "80", "TERM": "xterm", "NO_COLOR": "1"},
        )
        os.close(slave)

    def __enter__(self) -> "PseudoTerminal":
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._master)

    def type(self, keys: str) -> None:
        """Press keys, among them ``RETURN`` and those with Ctrl."""
        os.write(self._master, keys.encode())

    def press(self, key: str, pattern: str) -> str:
        """Press a key until the screen shows this, as a person would; then as ``read_to``.

        A signal that comes just before a program begins to wait for keys goes unseen until the
        next one.
        """
        for _ in range(10):
            self.type(key)
            if self._shows(pattern, patience_s=5):
                break
        return self.read_to(pattern)

    def read_to(self, pattern: str) -> str:
        """Wait until the screen shows this, and return what is new on it up to there."""
        found = self._shows(pattern, _PATIENCE_S)
        assert found, f"no {pattern!r} on the screen:\n{self._screen}"
        start, self._num_read = self._num_read, self._num_read + found.end()
        return self._screen[start : self._num_read]

    def exit_code(self) -> int:
        """Wait for the program's end, and return what it says to the shell."""
        while self._more():
            pass
        return self._process.wait(_PATIENCE_S)

    def _shows(self, pattern: str, patience_s: int) -> re.Match[str] | None:
        """Find this in what is new on the screen, or wait for it as long as more comes."""
        while not (found := re.search(pattern, self._screen[self._num_read :])):
            more = self._more(patience_s)
            if not more:
                return None
            self._screen = _ESCAPE_CODES.sub("", self._screen + more)
        return found

    def _more(self, patience_s: int = _PATIENCE_S) -> str:
        """Wait for more on the screen; nothing at the program's end."""
        ready, _, _ = select.select([self._master], [], [], patience_s)
        try:
            return os.read(self._master, 4096).decode(errors="replace") if ready else ""
        except OSError:  # how Linux tells that the other side was closed
            return ""
