"""Runs a function over code that is not ours, in a process with limits.

The child has a time limit twice: an alarm, which interrupts Python where it is, so that the line of
an endless loop is known, and the parent's, for code that does not return to Python.
"""

import importlib
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

MAX_MEMORY_BYTES = 8 * 2**30
"""Of address space, which libraries reserve more of than they use."""

_GRACE_S = 3.0

OUT_OF_TIME, NO_RESULT = "out of time", "no result"


class TimeUp(BaseException):
    """The time of a check is over; no ``except Exception`` catches it."""


def run_limited(function: str, arguments: list[Any], seconds: float) -> Any:
    """Call ``module:function`` in a child process.

    Args:
        function: Takes the arguments and returns a JSON value; of ``ostinato``.
        arguments: JSON values.
        seconds: Its time limit.

    Returns:
        The function's result; ``OUT_OF_TIME`` or ``NO_RESULT`` (the process ended by itself).
    """
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        command = [sys.executable, "-P", "-m", "ostinato.plugins.child", function, str(result)]
        try:
            subprocess.run(
                [*command, str(seconds)],
                input=json.dumps(arguments),
                text=True,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                timeout=seconds + _GRACE_S,
                check=False,
                env=_environment(),
            )
        except subprocess.TimeoutExpired:
            return OUT_OF_TIME
        return json.loads(result.read_text()) if result.exists() else NO_RESULT


def _environment() -> dict[str, str]:
    """Return the environment of the child: this package on its path, and one thread."""
    root = str(Path(__file__).parents[2])
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH", "")]))
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


def with_alarm(seconds: float, call: Callable[[], Any]) -> Any:
    """Return what a call returns; raises TimeUp where it is after so many seconds."""

    def ring(number: int, frame: FrameType | None) -> None:
        raise TimeUp

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        return call()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def main(function: str, result: str, seconds: str) -> None:
    """Run the function in this process; its arguments come over stdin."""
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    module, _, name = function.partition(":")
    call = getattr(importlib.import_module(module), name)
    arguments = json.loads(sys.stdin.read())
    try:
        value = with_alarm(float(seconds), lambda: call(*arguments))
    except TimeUp:
        value = OUT_OF_TIME
    Path(result).write_text(json.dumps(value))


if __name__ == "__main__":  # as a module of its own name, whose TimeUp is the one that others catch
    importlib.import_module("ostinato.plugins.child").main(*sys.argv[1:])
