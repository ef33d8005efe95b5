"""Starts workers, asks them, and puts them to sleep.

A worker that is not asked anything is stopped (SIGSTOP): engines whose threads spin while they
wait would otherwise take the cores of the one that is measured.
"""

import json
import os
import select
import signal
import subprocess
from pathlib import Path
from typing import Any

from benchmarks.peers.engines import ROOT

TICKS = os.sysconf("SC_CLK_TCK")


class WorkerFailed(Exception):
    """A worker answered with an error, not in time, or not at all."""


class NotSupported(Exception):
    """A worker said that its engine has no such thing."""


class WorkerProcess:
    """One engine in a process of its own; asleep unless it is asked."""

    def __init__(self, worker: str, python: Path, environment: dict[str, str], log: Path) -> None:
        """Start it; nothing is loaded yet.

        Args:
            worker: Its file in ``workers``.
            python: What runs it.
            environment: All of it.
            log: Where its standard error goes.
        """
        self.log = log
        with log.open("w") as errors:
            self._process = subprocess.Popen(
                [str(python), "-m", f"benchmarks.peers.workers.{worker}"],
                cwd=ROOT,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                start_new_session=True,
            )
        self._buffer = b""

    def ask(self, question: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        """Wake it, ask, and put it to sleep again.

        Raises:
            WorkerFailed: No answer in time, none at all, or an error.
            NotSupported: The engine has no such thing.
        """
        self._signal(signal.SIGCONT)
        try:
            self._write(json.dumps(question).encode() + b"\n")
            answer: dict[str, Any] = json.loads(self._read_line(timeout_s))
        finally:
            self._signal(signal.SIGSTOP)
        if "error" in answer:
            raise WorkerFailed(answer["error"])
        if "unsupported" in answer:
            raise NotSupported(answer["unsupported"])
        return answer

    @property
    def pid(self) -> int:
        """Of the worker."""
        return self._process.pid

    def cpu_seconds(self) -> float:
        """CPU time of the worker and of what it started, so far."""
        group, total = self._process.pid, 0
        for stat in Path("/proc").glob("[0-9]*/stat"):
            try:
                fields = stat.read_text().rpartition(")")[2].split()
            except OSError:  # it has just ended
                continue
            if int(fields[2]) == group:
                total += int(fields[11]) + int(fields[12])
        return total / TICKS

    def end(self) -> None:
        """Kill it, asleep or not."""
        self._signal(signal.SIGKILL)
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()
        self._process.wait()

    def __enter__(self) -> "WorkerProcess":
        """Return itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """End it."""
        self.end()

    def _signal(self, number: int) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, number)

    def _write(self, data: bytes) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(data)
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise self._gone() from error

    def _read_line(self, timeout_s: float) -> bytes:
        assert self._process.stdout is not None
        pipe = self._process.stdout.fileno()
        while b"\n" not in self._buffer:
            ready, _, _ = select.select([pipe], [], [], timeout_s)
            if not ready:
                raise WorkerFailed(f"no answer after {timeout_s:.0f} s")
            data = os.read(pipe, 1 << 20)
            if not data:
                raise self._gone()
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line

    def _gone(self) -> WorkerFailed:
        lines = self.log.read_text(errors="replace").strip().splitlines() or ["without a word"]
        status = self._process.wait()
        how = signal.Signals(-status).name if status < 0 else f"status {status}"
        return WorkerFailed(f"the worker ended with {how}: {lines[-1][:300]}")
