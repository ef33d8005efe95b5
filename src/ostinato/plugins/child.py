"""Runs a function over code that is not ours, in a process with limits.

Time is the child's processor time, so that a busy machine changes nothing: an alarm interrupts
Python where it is, so that the line of an endless loop is known, and code that survives three of
them, or that does not return to Python, ends with its process. Only code that waits without working
meets the parent's limit, in seconds of a clock.
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

from ostinato.core.errors import ConfigError

MAX_MEMORY_BYTES = 8 * 2**30
"""Of address space, which libraries reserve more of than they use; macOS has no such limit."""

_GRACE_S = 5.0
"""Processor time after the alarm, in which code may end."""

_MAX_RINGS, _STUCK = 3, 75
"""Alarms that code may survive, one a second, and the exit code after the last of them."""

_CLOCK_FACTOR, _MIN_CLOCK_S = 6.0, 60.0
"""Seconds of a clock per second of processor time, and the least number of them."""

CONTRACT_S = 30.0
"""Time limit of a contract; the solutions of the labs take less than one second."""

OUT_OF_TIME, NO_RESULT = "out of time", "no result"


class TimeUp(BaseException):
    """The time of a check is over; no ``except Exception`` catches it."""


def run_limited(function: str, arguments: list[Any], seconds: float) -> Any:
    """Call ``module:function`` in a child process.

    Args:
        function: Takes the arguments and returns a JSON value; of ``ostinato``.
        arguments: JSON values.
        seconds: Its limit of processor time.

    Returns:
        The function's result; ``OUT_OF_TIME`` or ``NO_RESULT`` (the process ended by itself).
    """
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        command = [sys.executable, "-P", "-m", "ostinato.plugins.child", function, str(result)]
        try:
            ended = subprocess.run(
                [*command, str(seconds)],
                input=json.dumps(arguments),
                text=True,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                timeout=max(_MIN_CLOCK_S, seconds * _CLOCK_FACTOR),
                check=False,
                env=_environment(),
            )
        except subprocess.TimeoutExpired:
            return OUT_OF_TIME
        if ended.returncode in (_STUCK, -signal.SIGXCPU, -signal.SIGKILL):
            return OUT_OF_TIME
        return json.loads(result.read_text()) if result.exists() else NO_RESULT


def pass_contract(name: str, function: str, arguments: list[Any]) -> None:
    """Refuse code that breaks its contract, as a child process finds it.

    Args:
        name: The setting that names the code.
        function: As in ``run_limited``; returns the counterexample, or an empty text.
        arguments: JSON values, the last of which names the code.

    Raises:
        ConfigError: It cannot be loaded or breaks its contract; the message has the counterexample.
    """
    answer = run_limited(function, arguments, CONTRACT_S)
    failure = {
        OUT_OF_TIME: f"it did not return within {CONTRACT_S:g} s",
        NO_RESULT: "it ended the process that checked it",
    }.get(answer, answer)
    if failure:
        code = f"{name}={arguments[-1]!r}"
        reason = failure.removeprefix(f"{code}: ")
        raise ConfigError(f"{code} is not plugged in: {reason}")


def _environment() -> dict[str, str]:
    """Return the environment of the child: this package on its path, and one thread."""
    root = str(Path(__file__).parents[2])
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH", "")]))
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


def with_alarm(seconds: float, call: Callable[[], Any]) -> Any:
    """Return what a call returns; raises TimeUp after its limit of processor time."""
    rings = 0

    def ring(number: int, frame: FrameType | None) -> None:
        nonlocal rings
        rings += 1
        if rings > _MAX_RINGS:
            os._exit(_STUCK)
        raise TimeUp

    before = signal.signal(signal.SIGPROF, ring)
    signal.setitimer(signal.ITIMER_PROF, seconds, 1.0)
    try:
        return call()
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def main(function: str, result: str, seconds: str) -> None:
    """Run the function in this process; its arguments come over stdin."""
    if sys.platform != "darwin":
        resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    max_seconds = round(float(seconds) + _GRACE_S) + 5  # what importing takes, too
    resource.setrlimit(resource.RLIMIT_CPU, (max_seconds, max_seconds + 1))
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
