"""Time of the cache heart for one request. No model, no tensors.

::

    python -m benchmarks.heart                           # this source tree
    python -m benchmarks.heart --against OTHER/src       # two trees, measured by turns

Six scenes, in both indexes, in blocks of 16 tokens:

* ``chats``: 64 conversations of 20 turns of 500 tokens behind one system prompt of 4,096;
* ``hit``: a prompt of 32,768 tokens of which all that may be cached is, as a list or packed;
* ``miss``: 32,768 new tokens, packed, published;
* ``decode``: a step in which 64 sequences get a token each (here the figure is per step);
* ``request``: 2,048 tokens that are cached and 32 that are not, from ``Scheduler.add`` to the end
  of a request that is answered with one token: a look-up when it comes, which is still true when
  it is admitted, admission, publication, the plan for the runner and the release;
* ``steps``: a step of 64 decodes again, through the scheduler, plan and commit.

Times are CPU time of the process, with the garbage collector off. Each round is a process of its
own; with ``--against`` the rounds of both trees alternate. Other programs on the machine can only
make a round slower, so of all rounds the quickest counts, operation by operation.
"""

import argparse
import gc
import json
import os
import random
import subprocess
import sys
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import mean
from time import process_time_ns
from typing import cast, get_args

from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from benchmarks.command_line import parser_of, write_json
from ostinato.assembly import build_cache
from ostinato.cache.manager import CacheManager
from ostinato.core.config import SchedulerConfig
from ostinato.core.identity import Identity, PrefixKey
from ostinato.core.ids import RequestId
from ostinato.core.plan import SampledToken, SequenceResult, StepPlan, StepResult
from ostinato.core.request import Request
from ostinato.core.sampling_params import SamplingParams
from ostinato.sched.scheduler import Scheduler
from ostinato.settings import IndexName, PolicyName, PrefixCacheConfig

BLOCK_SIZE = 16
SYSTEM, CHATS, TURNS, TURN = 4_096, 64, 20, 500
LONG = 32_768
MISSES, HITS = 100, 100
"""Times that a long prompt is measured in one round."""

DECODES, STEPS = 64, 200

PREFIX, QUESTION, REQUESTS = 2_048, 32, 1_000

POLICY = os.environ.get("HEART_POLICY", "reuse_hazard")
"""Eviction policy: the engine's default, unless ``--policy`` says otherwise."""

OPERATIONS = ("key", "match", "admit", "grow", "publish", "commit", "release", "add", "plan", "end")
INDEXES: tuple[IndexName, ...] = get_args(IndexName)

Costs = dict[str, list[int]]
"""Nanoseconds by operation, one number per request."""

HERE = Path(__file__).resolve().parents[1] / "src"


def main() -> None:
    """Read the command line and measure."""
    parser = parser_of(__doc__, has_json=True)
    parser.add_argument("--against", type=Path, help="the src directory of another checkout")
    parser.add_argument("--rounds", type=int, default=5, help="processes per source tree")
    parser.add_argument("--policy", default=POLICY, help="eviction policy of the caches")
    parser.add_argument("--one-round", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one_round:
        print(json.dumps(measure_all()))
        return
    os.environ["HEART_POLICY"] = options.policy
    trees = [HERE] if options.against is None else [options.against.resolve(), HERE]
    for tree in trees:
        if not (tree / "ostinato").is_dir():
            parser.error(f"there is no package ostinato in {tree}")
    quickest = measure_by_turns(trees, options.rounds)
    show(trees, quickest)
    write_json(options.json, quickest)


# --- one round, in its own process ---


def measure_all() -> dict[str, float]:
    """Measure all scenes once.

    Returns:
        Microseconds per request, by ``"index scene operation"``.
    """
    figures = {}
    for index in INDEXES:
        for scene, run in SCENES.items():
            gc.collect()
            gc.disable()
            costs = run(index)
            gc.enable()
            # The mean, and not the median: work that is done for many requests at once counts.
            for operation, cost in costs.items():
                figures[f"{index} {scene} {operation}"] = mean(cost) / 1e3
    return figures


def chats(index: IndexName) -> Costs:
    """Serve every conversation's next turn, one conversation after the other."""
    rng, cache, costs = random.Random(1), make_cache(index, 42_000), Costs()
    system = draw(rng, SYSTEM)
    texts = [system[:] for _ in range(CHATS)]
    for _ in range(TURNS):
        for text in texts:
            text.extend(draw(rng, TURN))
            serve(cache, text, costs)
    return costs


def hit(index: IndexName, given: Callable[[array], Iterable[int]]) -> Costs:
    """Serve a long prompt again and again."""
    cache, costs = make_cache(index, 2 * LONG // BLOCK_SIZE), Costs()
    prompt = draw(random.Random(2), LONG)
    serve(cache, prompt, Costs())
    for _ in range(HITS):
        serve(cache, given(prompt), costs)
    return costs


def miss(index: IndexName) -> Costs:
    """Serve long prompts that have nothing in common, while there is room for all."""
    rng, costs = random.Random(3), Costs()
    cache = make_cache(index, (MISSES + 1) * LONG // BLOCK_SIZE)
    serve(cache, draw(rng, LONG), Costs())
    for _ in range(MISSES):
        serve(cache, draw(rng, LONG), costs)
    return costs


def decode(index: IndexName) -> Costs:
    """Let sequences of 512 tokens grow by a token each, step by step."""
    rng, costs = random.Random(4), Costs()
    cache = make_cache(index, DECODES * (512 + STEPS) // BLOCK_SIZE + DECODES)
    tables = [serve(cache, draw(rng, 512), Costs(), release=False) for _ in range(DECODES)]
    for _ in range(STEPS):
        for table in tables:
            table.key.append(rng.randrange(65_536))
        times = [process_time_ns()]
        for table in tables:
            cache.grow(table, cache.growable(table, len(table.key)))
        times.append(process_time_ns())
        for table in tables:
            cache.publish(table, len(table.key))
        times.append(process_time_ns())
        cache.commit()
        times.append(process_time_ns())
        note(costs, ("grow", "publish", "commit"), times)
    return costs


def request(index: IndexName) -> Costs:
    """Take requests that share a prefix through a scheduler, one at a time."""
    rng, costs = random.Random(5), Costs()
    blocks = (PREFIX + REQUESTS * (QUESTION + BLOCK_SIZE)) // BLOCK_SIZE
    scheduler, prefix = make_scheduler(index, blocks), draw(rng, PREFIX)
    for number in range(REQUESTS):
        asked = make_request(number, prefix + draw(rng, QUESTION), 1)
        times = [process_time_ns()]
        scheduler.add(asked, (0,))
        times.append(process_time_ns())
        plan = scheduler.plan()
        times.append(process_time_ns())
        scheduler.commit(answers(plan))
        times.append(process_time_ns())
        if number:  # the first one computes the prefix
            note(costs, ("add", "plan", "end"), times)
    return costs


def steps(index: IndexName) -> Costs:
    """Let a scheduler's sequences of 512 tokens grow by a token each, step by step."""
    rng, costs = random.Random(6), Costs()
    scheduler = make_scheduler(index, DECODES * (512 + STEPS) // BLOCK_SIZE + 2 * DECODES)
    for number in range(DECODES):
        scheduler.add(make_request(number, draw(rng, 512), STEPS + 2), (0,))
    scheduler.commit(answers(scheduler.plan()))
    for _ in range(STEPS):
        times = [process_time_ns()]
        plan = scheduler.plan()
        times.append(process_time_ns())
        result = answers(plan)
        between = process_time_ns()
        scheduler.commit(result)
        times.append(times[-1] + process_time_ns() - between)
        note(costs, ("plan", "end"), times)
    return costs


SCENES: dict[str, Callable[[IndexName], Costs]] = {
    "chats": chats,
    "hit (list)": lambda index: hit(index, list),
    "hit (packed)": lambda index: hit(index, lambda prompt: prompt),
    "miss": miss,
    "decode": decode,
    "request": request,
    "steps": steps,
}


def make_cache(index: IndexName, num_blocks: int) -> CacheManager:
    """Return an empty cache of the source tree that is on the path, with all that observes it."""
    policy = cast("PolicyName", POLICY)
    config = PrefixCacheConfig(num_blocks, BLOCK_SIZE, index=index, eviction_policy=policy)
    return build_cache(config).manager


def make_scheduler(index: IndexName, num_blocks: int) -> Scheduler:
    """Return a scheduler over an empty cache, with room in a step for all."""
    room = max(PREFIX + QUESTION, DECODES * 512)
    config = SchedulerConfig(room, max_num_seqs=DECODES, max_model_len=65_536)
    return Scheduler(config, make_cache(index, num_blocks))


def make_request(number: int, prompt: array, max_tokens: int) -> Request:
    """Return a request for so many tokens."""
    return Request(RequestId(str(number)), prompt, SamplingParams(max_tokens=max_tokens))


def answers(plan: StepPlan) -> StepResult:
    """Answer a plan as a runner would: one token each."""
    return StepResult(tuple(SequenceResult((SampledToken(7),)) for _ in plan.sequences))


def serve(cache, prompt: Iterable[int], costs: Costs, release: bool = True):
    """Take one prompt through the cache, note what each call took, and return its table."""
    times = [process_time_ns()]
    key = PrefixKey(Identity(), prompt)
    times.append(process_time_ns())
    match = cache.match(key)
    times.append(process_time_ns())
    table, _ = cache.admit(key, match)
    times.append(process_time_ns())
    cache.publish(table, len(key))
    times.append(process_time_ns())
    cache.commit()
    times.append(process_time_ns())
    if release:
        cache.release(table, len(key))
        times.append(process_time_ns())
    note(costs, ("key", "match", "admit", "publish", "commit", "release"), times)
    return table


def note(costs: Costs, operations: tuple[str, ...], times: list[int]) -> None:
    """Note what each operation took, and all together."""
    for operation, start, stop in zip(operations, times, times[1:], strict=False):
        costs.setdefault(operation, []).append(stop - start)
    costs.setdefault("all", []).append(times[-1] - times[0])


def draw(rng: random.Random, num_tokens: int) -> array:
    """Draw token ids of a vocabulary of 65,536."""
    tokens = array("I", bytes(4 * num_tokens))
    tokens[:] = array("I", array("H", rng.randbytes(2 * num_tokens)).tolist())
    return tokens


# --- many rounds ---


def measure_by_turns(trees: list[Path], rounds: int) -> list[dict[str, float]]:
    """Measure every tree in turn; return the quickest of each."""
    figures: list[dict[str, list[float]]] = [defaultdict(list) for _ in trees]
    bar = tqdm(total=rounds * len(trees), unit="round")
    for number in range(rounds):
        # Every other round begins with the other tree: no tree always comes second.
        for place in range(len(trees))[:: 1 if number % 2 else -1]:
            for name, value in _one_round(trees[place]).items():
                figures[place][name].append(value)
            bar.update()
    bar.close()
    return [{name: min(values) for name, values in results.items()} for results in figures]


def _one_round(tree: Path) -> dict[str, float]:
    environment = {**os.environ, "PYTHONPATH": str(tree), "PYTHONHASHSEED": "0"}
    command = [sys.executable, "-m", "benchmarks.heart", "--one-round"]
    answer = subprocess.run(
        command, cwd=HERE.parent, env=environment, check=True, capture_output=True, text=True
    )
    results: dict[str, float] = json.loads(answer.stdout)
    return results


def show(trees: list[Path], quickest: list[dict[str, float]]) -> None:
    """Print a table: microseconds per request, and the change between two trees."""
    table = Table(title="microseconds of CPU time per request (decode: per step)")
    for name in ("index", "scene", *OPERATIONS, "all"):
        table.add_column(name, justify="left" if name in ("index", "scene") else "right")
    for index in INDEXES:
        for scene in SCENES:
            for tree, figures in zip(trees, quickest, strict=True):
                which = scene if len(trees) == 1 else f"{scene}, {_which(tree)}"
                cells = [figures.get(f"{index} {scene} {o}") for o in (*OPERATIONS, "all")]
                table.add_row(index, which, *("" if c is None else f"{c:,.1f}" for c in cells))
            if len(trees) == 2:
                old, new = (figures[f"{index} {scene} all"] for figures in quickest)
                table.add_row("", "", *([""] * len(OPERATIONS)), f"{100 * (new / old - 1):+.1f} %")
    Console(width=130).print(table)


def _which(tree: Path) -> str:
    return "here" if tree == HERE else "there"


if __name__ == "__main__":
    main()
