"""Compiles each new grammar in a worker process first, which can be killed.

``llguidance`` bounds most of its work, but takes exponential time and memory to decide whether an
intersection of expressions (``allOf`` over many patterns) is empty, and cannot be stopped.
"""

import sys
from collections.abc import Sequence

from ostinato.engine.grammar.grammar_worker import CPU_LIMIT_S, MEMORY_LIMIT_BYTES
from ostinato.engine.worker_process import ProcessPool

NUM_WORKERS = 2
WORKER = (sys.executable, "-m", "ostinato.engine.grammar.grammar_worker")


class GrammarChecker:
    """Compiles grammars in worker processes, which ``command`` starts when they are needed."""

    def __init__(self, command: Sequence[str] = WORKER) -> None:
        self._workers = ProcessPool(command, NUM_WORKERS)

    def check(self, grammar: str) -> str:
        """Compile a grammar in a worker.

        Returns:
            Why it does not compile; empty if it does.

        Effects: waits for a free worker, and for the answer.
        """
        answer = self._workers.ask(grammar.encode())
        if answer is None:
            return (
                f"it takes more than {CPU_LIMIT_S:g} s of processor time or "
                f"{MEMORY_LIMIT_BYTES >> 20} MiB to compile: make it simpler"
            )
        return answer.decode()
