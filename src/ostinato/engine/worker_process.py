"""Processes for work that may never end, so that it can be killed.

Questions and answers are bytes, each preceded by its length::

    ask ─► a free worker ─► answers
              └── over its limits: it is killed, and a new one starts with the next question

A worker limits its own memory and processor time, and ends with its input, and so with its parent.
macOS has no limit of memory that a process could set: there, processor time alone is limited.
"""

import contextlib
import math
import os
import resource
import select
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from queue import SimpleQueue
from typing import IO

PATIENCE_S = 60.0
"""A worker without an answer by then hangs: its own limits count processor time alone."""

_LENGTH_BYTES = 8

Bytes = bytes | bytearray | memoryview


class ProcessPool:
    """Worker processes that ``command`` starts when they are needed. Thread-safe."""

    def __init__(self, command: Sequence[str], num_workers: int) -> None:
        self._idle: SimpleQueue[_Worker] = SimpleQueue()
        for _ in range(num_workers):
            self._idle.put(_Worker(command))

    def ask(self, question: Bytes) -> bytearray | None:
        """Return a worker's answer; None if it went beyond its limits.

        Effects: waits for a free worker, and for the answer.
        """
        worker = self._idle.get()
        try:
            return worker.ask(question)
        finally:
            self._idle.put(worker)


class _Worker:
    """One process, replaced after it dies."""

    def __init__(self, command: Sequence[str]) -> None:
        self._command = command
        self._process: subprocess.Popen[bytes] | None = None

    def ask(self, question: Bytes) -> bytearray | None:
        process = self._alive()
        assert process.stdin is not None and process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            _write(process.stdin, [question])
        ready, _, _ = select.select([process.stdout], [], [], PATIENCE_S)
        answer = _read(process.stdout) if ready else None
        if answer is None:
            _end(process)
            self._process = None
        return answer

    def _alive(self) -> "subprocess.Popen[bytes]":
        if self._process is None or self._process.poll() is not None:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            )
            weakref.finalize(self, _end, self._process)
        return self._process


def answer_questions(
    answer: Callable[[bytearray], Iterable[Bytes]], cpu_limit_s: float, memory_limit_bytes: int
) -> None:
    """Answer questions from standard input until its end; called in a worker.

    Args:
        answer: Returns the parts of an answer.
        cpu_limit_s: Processor time of one question.
        memory_limit_bytes: Address space of all questions, on top of the initial size.
    """
    if sys.platform != "darwin":
        _limit(resource.RLIMIT_AS, _address_space_bytes() + memory_limit_bytes)
    _limit(resource.RLIMIT_CORE, 0)
    while (question := _read(sys.stdin.buffer)) is not None:
        _limit(resource.RLIMIT_CPU, math.ceil(_cpu_s() + cpu_limit_s))
        parts = answer(question)
        del question
        _write(sys.stdout.buffer, parts)
        del parts


def _write(pipe: IO[bytes], parts: Iterable[Bytes]) -> None:
    views = [memoryview(part).cast("B") for part in parts]
    pipe.write(sum(map(len, views)).to_bytes(_LENGTH_BYTES, "little"))
    for view in views:
        pipe.write(view)
    pipe.flush()


def _read(pipe: IO[bytes]) -> bytearray | None:
    """Return what was written; None if the process at the other end has ended."""
    length = pipe.read(_LENGTH_BYTES)
    if len(length) < _LENGTH_BYTES:
        return None
    content = bytearray(int.from_bytes(length, "little"))
    left = memoryview(content)
    while left:
        num_bytes = pipe.readinto(left)  # type: ignore[attr-defined]
        if not num_bytes:
            return None
        left = left[num_bytes:]
    return content


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Kill a process and close its pipes."""
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(BrokenPipeError):
                pipe.close()


def _limit(kind: int, value: int) -> None:
    """Lower a soft limit as far as the hard one allows."""
    hard = resource.getrlimit(kind)[1]
    resource.setrlimit(kind, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))


def _cpu_s() -> float:
    """Processor time of this process so far."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def _address_space_bytes() -> int:
    """Address space of this process; 0 where /proc does not say."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[0]) * resource.getpagesize()
    except OSError:
        return 0
