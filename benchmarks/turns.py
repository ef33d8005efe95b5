"""Cost of a step besides the model, and whether a next turn misses a step. Through ``AsyncLLM``.

::

    python -m benchmarks.turns CHECKPOINT                 # 16 conversations of 5 turns, two threads
    python -m benchmarks.turns CHECKPOINT --threads 1     # on a busy machine
    python -m benchmarks.turns CHECKPOINT --impatient     # without the moment for next turns

Times are CPU time of the engine's thread, per step; with one thread, that is all there is. Steps
are told apart by their number of tokens. ``benchmarks/peers/checkpoint.py`` makes a checkpoint.
"""

import asyncio
import time
from collections import defaultdict
from statistics import mean
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.command_line import parser_of
from benchmarks.decode import Step, StepWatch
from benchmarks.greedy import greedy
from benchmarks.peers.protocol import Talk
from benchmarks.peers.samples import FULL, Draw, talk
from ostinato import AsyncLLM
from ostinato.engine.api import engine_thread

PARTS = ("plan", "inputs", "forward", "sample", "commit", "states", "between")
TOKENS = ((1, 15), (16, 16), (17, 64), (65, 128), (129, 4096))


class Watch(StepWatch):
    """Notes the CPU time of each step, and how much it computed."""

    def __init__(self, llm: AsyncLLM) -> None:
        """Wrap the parts of a step."""
        super().__init__(llm.engine, time.thread_time)
        runner = llm.engine.runner
        self._execute, runner.execute = runner.execute, self._sized

    def _sized(self, plan: Any) -> Any:
        self._now |= {"sequences": len(plan.sequences), "tokens": plan.num_tokens}
        return self._execute(plan)

    def _note(self, brought: Any) -> None:
        if "tokens" in self._now:
            self.steps.append(self._now)


def conversations(num_turns: int, seed: int) -> list[Talk]:
    """Draw the conversations of the peers' benchmark, with other turns for each seed."""
    draw = Draw(32_000, "turns", seed)
    system = draw(FULL.system)
    return [talk(draw, system, num_turns, FULL.turn, FULL.answer) for _ in range(FULL.chats)]


async def serve(llm: AsyncLLM, talks: list[Talk]) -> float:
    """Serve conversations at once; returns seconds."""

    async def converse(turns: Talk) -> None:
        history: list[int] = []
        for tokens, num_outputs in turns:
            history = history + tokens
            async for output in llm.generate(history, greedy(num_outputs)):
                answer = output.outputs[0].token_ids
            history = history + answer

    begin_s = time.monotonic()
    await asyncio.gather(*map(converse, talks))
    return time.monotonic() - begin_s


def table_of(steps: list[Step]) -> Table:
    """Means per step, by its number of tokens."""
    table = Table(
        "tokens", "steps", *PARTS, "rest", title="CPU ms per step; rest: besides the forward"
    )
    by_size: dict[tuple[int, int], list[Step]] = defaultdict(list)
    for step in steps:
        by_size[next(r for r in TOKENS if r[0] <= step["tokens"] <= r[1])].append(step)
    for (least, most), some in sorted(by_size.items()):
        means = [mean(step.get(part, 0.0) for step in some) for part in PARTS]
        rest = sum(means) - means[PARTS.index("forward")]
        share = f"{100 * rest / sum(means):.1f} %"
        label = f"{least}–{most}" if least < most else f"{least}"
        table.add_row(label, str(len(some)), *(f"{m:.2f}" for m in means), share)
    return table


def main() -> None:
    """Serve conversations, and print what steps cost."""
    parser = parser_of(__doc__, threads=2)
    parser.add_argument("checkpoint")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--impatient", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.impatient:
        engine_thread.PATIENCE = 0.0
    llm = AsyncLLM(options.checkpoint, dtype="bfloat16", num_blocks=1536, max_num_seqs=32)
    asyncio.run(serve(llm, conversations(1, 0)))  # kernels compiled, memory touched
    watch = Watch(llm)
    seconds = asyncio.run(serve(llm, conversations(options.turns, 1)))
    llm.shutdown()
    while_all_talk = [step["sequences"] for step in watch.steps[: len(watch.steps) // 2]]
    console = Console()
    console.print(table_of(watch.steps))
    console.print(
        f"{len(watch.steps)} steps, {seconds:.1f} s; in the first half, "
        f"{FULL.chats * len(while_all_talk) - sum(while_all_talk):.0f} of "
        f"{FULL.chats * len(while_all_talk)} places in steps were empty"
    )


if __name__ == "__main__":
    main()
