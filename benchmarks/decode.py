"""Time of a decode step outside the model. Through ``LLM.generate``.

::

    python -m benchmarks.decode CHECKPOINT               # 1 and 16 on 2,048, 32 on 4,096 tokens
    python -m benchmarks.decode CHECKPOINT --cases 16x2048 --rounds 5
    python -m benchmarks.decode CHECKPOINT --json FILE

Each case is so many requests that share a cached prefix and have 32 tokens of their own. Parts are
medians over decode steps, in milliseconds of wall clock. ``model`` is what the native library does
in one call, or the forward where it does not; ``around`` is all other parts together, when memory
stands still. They are so short that they are right on a busy machine, too; the model's is not.
``benchmarks/peers/checkpoint.py`` makes a checkpoint.
"""

import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable
from statistics import median
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.command_line import parser_of, write_json
from benchmarks.greedy import greedy
from ostinato import LLM
from ostinato.runner import model_runner
from ostinato.runner.forward.program import Program

CASES = "1x2048,16x2048,32x4096"
OWN_TOKENS, OUTPUTS, SKIPPED = 32, 32, 2
PARTS = ("plan", "inputs", "attention", "forward", "sample", "commit", "states", "rest", "between")

Step = dict[str, float]


class StepWatch(ABC):
    """Notes what each step of an engine spends on what, in milliseconds.

    What is called within another part is not counted twice.

    Attributes:
        steps: Of each step, milliseconds by part.
    """

    def __init__(self, engine: Any, clock: Callable[[], float]) -> None:
        """Wrap the parts of a step."""
        self.steps: list[Step] = []
        self._clock = clock
        self._now: Step = {}
        self._inner: list[float] = [0.0]  # of the parts that are under way, outermost first
        self._ended_s: float | None = None
        for owner, method, part in (
            (engine.scheduler, "plan", "plan"),
            (model_runner, "build_inputs", "inputs"),
            (engine.runner, "forward", "forward"),
            (engine.runner, "sample", "sample"),
            (engine.scheduler, "commit", "commit"),
            (engine, "process_outputs", "states"),
        ):
            setattr(owner, method, self._timed(getattr(owner, method), part))
        self._step, engine.step = engine.step, self._whole

    def _timed(self, method: Callable[..., Any], part: str) -> Callable[..., Any]:
        def timed(*arguments: Any) -> Any:
            begin_s = self._clock()
            self._inner.append(0.0)
            try:
                return method(*arguments)
            finally:
                whole_ms, inner_ms = 1e3 * (self._clock() - begin_s), self._inner.pop()
                self._inner[-1] += whole_ms
                self._now[part] = self._now.get(part, 0.0) + whole_ms - inner_ms

        return timed

    def _whole(self) -> Any:
        begin_s = self._clock()
        self._now, self._inner = defaultdict(float), [0.0]
        brought = self._step()
        ended_s = self._clock()
        self._now["rest"] = 1e3 * (ended_s - begin_s) - self._inner[0]
        self._now["between"] = 1e3 * (begin_s - (self._ended_s or begin_s))
        self._now["step"] = 1e3 * (ended_s - begin_s) + self._now["between"]
        self._ended_s = ended_s
        self._note(brought)
        return brought

    @abstractmethod
    def _note(self, brought: Any) -> None:
        """Keep the step, if it is one of those that are asked for."""


class Watch(StepWatch):
    """Notes what each step that decodes spends where: around the model, and in it."""

    def __init__(self, llm: LLM) -> None:
        """Wrap the parts of a step."""
        super().__init__(llm.engine, time.perf_counter)
        attention = llm.engine.runner.attention
        attention.start = self._timed(attention.start, "attention")
        self._run, watch = Program.run, self
        timed = self._timed(lambda *arguments: watch._run(*arguments), "model")
        Program.run = lambda *arguments: timed(*arguments)

    def end(self) -> None:
        """Restore what was wrapped."""
        Program.run = self._run

    def _note(self, brought: Any) -> None:
        if brought:
            if "model" not in self._now:  # no program: all of the forward is the model
                self._now["model"] = self._now.pop("forward")
            self.steps.append(self._now)


def measure(llm: LLM, num_requests: int, num_shared: int, rounds: int) -> Step:
    """Decode so many requests on a cached prefix; returns medians over steps."""
    random = np.random.default_rng(0)
    vocab_size = llm.engine.loaded.vocab_size
    shared = random.integers(3, vocab_size, num_shared).tolist()
    prompts = [
        shared + random.integers(3, vocab_size, OWN_TOKENS).tolist() for _ in range(num_requests)
    ]
    llm.generate([shared], greedy(1), use_tqdm=False)
    llm.generate(prompts, greedy(2), use_tqdm=False)
    watch, steps = Watch(llm), list[Step]()
    try:
        for _ in range(rounds):
            watch.steps.clear()
            llm.generate(prompts, greedy(OUTPUTS), use_tqdm=False)
            steps += watch.steps[SKIPPED:]  # prompts, and the first decode behind them
    finally:
        watch.end()
    results = {part: median(step[part] for step in steps) for part in (*PARTS, "model", "step")}
    return results | {"around": sum(results[part] for part in PARTS)}


def open_llm(checkpoint: str, num_requests: int, num_shared: int) -> LLM:
    """Open an engine with room for a case."""
    tokens = num_shared + num_requests * (OWN_TOKENS + OUTPUTS + 32) + 64
    return LLM(
        checkpoint,
        dtype="bfloat16",
        block_size=16,
        num_blocks=-(-tokens // 16),
        max_num_seqs=max(1, num_requests),
    )


def table_of(results: dict[str, Step]) -> Table:
    """Lay the medians out."""
    table = Table("case", *PARTS, "around", "model", "step", "tokens/s", title="ms per decode step")
    for case, step in results.items():
        cells = [f"{step[part]:.2f}" for part in (*PARTS, "around", "model", "step")]
        table.add_row(case, *cells, f"{1e3 * int(case.split('x')[0]) / step['step']:.1f}")
    return table


def main() -> None:
    """Measure the cases, and print what their steps take."""
    parser = parser_of(__doc__, rounds=3, threads=2, has_json=True)
    parser.add_argument("checkpoint")
    parser.add_argument("--cases", default=CASES, help="requests x shared tokens, with commas")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    results: dict[str, Step] = {}
    for case in options.cases.split(","):
        num_requests, num_shared = map(int, case.split("x"))
        llm = open_llm(options.checkpoint, num_requests, num_shared)
        results[case] = measure(llm, num_requests, num_shared, options.rounds)
        llm.close()
    Console(width=160).print(table_of(results))
    write_json(options.json, results)


if __name__ == "__main__":
    main()
