"""Time of whole steps with packed weights and the fused forward, without a scheduler.

::

    python -m benchmarks.forward CHECKPOINT                       # all scenes, two threads
    python -m benchmarks.forward CHECKPOINT --scenes prefill,decode-16 --rounds 9
    python -m benchmarks.forward CHECKPOINT --clock cpu --threads 1   # on a busy machine
    python -m benchmarks.forward CHECKPOINT --ways auto,int8,int4     # weights of fewer bits
    python -m benchmarks.forward CHECKPOINT --ways auto,auto+int8kv   # keys and values in 8 bits
    python -m benchmarks.forward CHECKPOINT --profile             # where a step's time goes
    python -m benchmarks.forward CHECKPOINT --json FILE

The forwards ``plain``, ``packed`` and ``auto`` (fused, where the model is known), or ``auto`` with
weights in ``int8`` and ``int4``, each also with keys and values in 8 bits (``+int8kv``), take
turns, round by round. Medians over rounds are compared, and the smallest and largest ratio to the
first way within a round stand beside.
``benchmarks/peers/checkpoint.py`` makes a checkpoint to measure with.

Attention is what the engine would use here. A scene's cached tokens were never computed, only
allocated: what they hold does not change how long a step takes.
"""

import os
import platform
import time
from array import array
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from statistics import median
from typing import Any, get_args

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.command_line import by_turns, parser_of, write_json
from ostinato.core.ids import SequenceId
from ostinato.core.plan import SampleTask, ScheduledSequence, StepPlan
from ostinato.core.sampling_params import SamplingParams
from ostinato.runner.attention_choice import AttentionCase, choose_attention
from ostinato.runner.forward.weight_refs import weight_bytes
from ostinato.runner.malloc_tuning import keep_large_blocks
from ostinato.runner.model_loader import load_model
from ostinato.runner.model_runner import ModelRunner
from ostinato.runner.settings import ForwardName, QuantizationName

BLOCK_SIZE = 16
GREEDY = SampleTask(SamplingParams(temperature=0.0), (0,), array("I"), array("I"))


@dataclass(frozen=True)
class Scene:
    """What a step computes.

    Attributes:
        name: For the table.
        num_sequences: How many, all sampled from.
        num_tokens: New tokens of each.
        num_cached: Tokens before them, shared by all.
    """

    name: str
    num_sequences: int
    num_tokens: int
    num_cached: int

    @property
    def num_computed(self) -> int:
        """Tokens of the step."""
        return self.num_sequences * self.num_tokens

    def plan(self, random: np.random.Generator) -> StepPlan:
        """Return the step, with tokens of its own."""
        shared = self.num_cached // BLOCK_SIZE
        own = -(-self.num_tokens // BLOCK_SIZE)
        return StepPlan(
            tuple(
                ScheduledSequence(
                    SequenceId(index),
                    array("I", random.integers(500, size=self.num_tokens).tolist()),
                    self.num_cached,
                    (
                        array(
                            "I",
                            [
                                *range(shared),
                                *range(shared + index * own, shared + index * own + own),
                            ],
                        ),
                    ),
                    GREEDY,
                )
                for index in range(self.num_sequences)
            )
        )


SCENES = (
    Scene("prefill", 1, 2048, 0),
    Scene("warm", 1, 32, 2048),
    Scene("decode-1", 1, 1, 2048),
    Scene("decode-16", 16, 1, 2048),
    Scene("decode-32", 32, 1, 2048),
    Scene("decode-32-4k", 32, 1, 4096),
    Scene("prompt-119", 1, 119, 0),
    Scene("prompt-131", 1, 131, 0),
    Scene("prompt-512", 1, 512, 0),
    Scene("warm-16", 16, 32, 2048),
)


Clock = Callable[[], float]

CLOCKS: dict[str, Clock] = {"wall": time.perf_counter, "cpu": time.process_time}


def measure(
    runners: dict[str, ModelRunner], scene: Scene, rounds: int, clock: Clock
) -> dict[str, list[float]]:
    """Time a scene's step with each forward by turns; returns seconds, round by round."""
    random = np.random.default_rng(0)

    def step(runner: ModelRunner) -> float:
        plan, start = scene.plan(random), clock()
        runner.execute(plan)
        return clock() - start

    return by_turns({name: partial(step, each) for name, each in runners.items()}, rounds)


def profile(runner: ModelRunner, scene: Scene) -> None:
    """Print which operations a scene's step spends its time in."""
    random = np.random.default_rng(0)
    runner.execute(scene.plan(random))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
        runner.execute(scene.plan(random))
    print(seen.key_averages().table(sort_by="self_cpu_time_total", row_limit=12))


def report(results: dict[str, dict[str, list[float]]]) -> Table:
    """Lay out medians and ratios."""
    first, *others = next(iter(results.values()))
    table = Table("step", "tokens", first, *others, *(f"{name} x" for name in others))
    for scene in (scene for scene in SCENES if scene.name in results):
        seconds = results[scene.name]
        plain = seconds[first]
        cells = [
            f"{median(s) * 1e3:.1f} ms, {scene.num_computed / median(s):.0f}/s"
            for s in seconds.values()
        ]
        ratios = []
        for name in others:
            each = [p / s for p, s in zip(plain, seconds[name], strict=True)]
            ratios.append(
                f"{median(plain) / median(seconds[name]):.2f} ({min(each):.2f}-{max(each):.2f})"
            )
        table.add_row(scene.name, str(scene.num_computed), *cells, *ratios)
    return table


def main() -> None:
    """Measure what was asked for."""
    parser = parser_of(__doc__, rounds=7, threads=2, has_json=True)
    parser.add_argument("checkpoint")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--scenes", default=",".join(scene.name for scene in SCENES))
    parser.add_argument("--ways", default=",".join(get_args(ForwardName)))
    parser.add_argument("--clock", default="wall", choices=CLOCKS)
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    keep_large_blocks()
    scenes = [scene for scene in SCENES if scene.name in options.scenes.split(",")]
    runners: dict[str, ModelRunner] = {}
    for name in options.ways.split(","):
        start = time.perf_counter()
        way: Any = name.removesuffix("+int8kv")
        bits = way if name in get_args(QuantizationName) else None
        forward: ForwardName = "auto" if bits else way
        loaded = load_model(options.checkpoint, options.dtype, forward=forward, quantization=bits)
        kv_dtype = loaded.dtype if name == way else torch.int8
        kind = (loaded.kv_spec, loaded.dtype, kv_dtype, BLOCK_SIZE, loaded.device)
        attention = choose_attention("auto", AttentionCase(*kind))
        runners[name] = ModelRunner(loaded, 300, BLOCK_SIZE, kv_dtype, attention)
        fused = "fused" if loaded.fused else "the model's own modules"
        spent, size = time.perf_counter() - start, weight_bytes(loaded.model) / 2**30
        print(f"{name}: loaded in {spent:.1f} s, {fused}, weights of {size:.2f} GiB")
    if options.profile:
        for scene in scenes:
            for name, runner in runners.items():
                print(scene.name, name)
                profile(runner, scene)
        return
    results = {
        scene.name: measure(runners, scene, options.rounds, CLOCKS[options.clock])
        for scene in scenes
    }
    Console(width=150).print(report(results))
    machine, load = platform.processor() or platform.machine(), os.getloadavg()[0]
    print(f"{options.dtype}, {options.threads} threads on {machine}, load {load:.1f}")
    print(f"{options.clock} clock")
    write_json(options.json, {"scenes": [asdict(s) for s in scenes], "seconds": results})


if __name__ == "__main__":
    main()
