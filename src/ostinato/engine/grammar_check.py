"""Compiles each new grammar in a worker process first, which can be killed.

``llguidance`` bounds most of its work, but takes exponential time and memory to decide whether an
intersection of expressions (``allOf`` over many patterns) is empty, and cannot be stopped::

    check ─► a free worker ─► compiles: ""  or  why not
                 └── over its limits: it is killed, the grammar is refused, a new worker starts
"""

import contextlib
import json
import os
import select
import subprocess
import sys
import weakref
from collections.abc import Sequence
from queue import SimpleQueue

from ostinato.engine.grammar_worker import CPU_LIMIT_S, MEMORY_LIMIT_BYTES

NUM_WORKERS = 2
WORKER = (sys.executable, "-m", "ostinato.engine.grammar_worker")
PATIENCE_S = 60.0
"""A worker without an answer by then hangs: its own limits count processor time alone."""


class GrammarChecker:
    """Compiles grammars in worker processes, which ``command`` starts when they are needed."""

    def __init__(self, command: Sequence[str] = WORKER) -> None:
        self._idle: SimpleQueue[_Worker] = SimpleQueue()
        for _ in range(NUM_WORKERS):
            self._idle.put(_Worker(command))

    def check(self, grammar: str) -> str:
        """Compile a grammar in a worker.

        Returns:
            Why it does not compile; empty if it does.

        Effects: waits for a free worker, and for the answer.
        """
        worker = self._idle.get()
        try:
            return worker.check(grammar)
        finally:
            self._idle.put(worker)


class _Worker:
    """One process, replaced after it dies."""

    def __init__(self, command: Sequence[str]) -> None:
        self._command = command
        self._process: subprocess.Popen[bytes] | None = None

    def check(self, grammar: str) -> str:
        process = self._alive()
        assert process.stdin is not None and process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(json.dumps(grammar).encode() + b"\n")
            process.stdin.flush()
        ready, _, _ = select.select([process.stdout], [], [], PATIENCE_S)
        answer = process.stdout.readline() if ready else b""
        if not answer.endswith(b"\n"):
            _end(process)
            self._process = None
            return (
                f"it takes more than {CPU_LIMIT_S:g} s of processor time or "
                f"{MEMORY_LIMIT_BYTES >> 20} MiB to compile: make it simpler"
            )
        error: str = json.loads(answer)
        return error

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


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Kill a process and close its pipes."""
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
