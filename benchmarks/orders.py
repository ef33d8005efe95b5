"""Waits by scheduling policy. No model: the real scheduler and cache, a cost model.

::

    python -m benchmarks.orders                       # all orders, both scenes
    python -m benchmarks.orders --seed 2 --json FILE

A step takes 8 ms, and 0.1 ms more for each token that goes through the model: about a GPU that
reads its weights once per step and computes 10,000 tokens a second. Answers are as long as the
traffic says and drawn at random. All of it depends on the seed alone, but for the last column.

Scene ``mixed``: three tenants send at once, more than is served without the cache.

* ``rag``: 400 questions on 40 documents of 2,000 tokens, popular ones more often;
* ``chat``: 24 conversations of 8 turns, each turn behind all before it;
* ``once``: 150 prompts of 800 tokens that have nothing in common.

Scene ``flood``: as above, and a fourth tenant sends 400 such prompts at once after ten seconds.

The pool holds 40,000 tokens: what runs, and a dozen documents at most.
"""

import heapq
import random
import time
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from statistics import fmean, quantiles
from typing import Any, get_args

from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from benchmarks.command_line import parser_of, write_json
from benchmarks.depth_first import DepthFirst
from ostinato.assembly import build_cache, build_scheduler
from ostinato.core.config import SchedulerConfig, WaitingOrder
from ostinato.core.identity import Identity
from ostinato.core.ids import RequestId, SequenceId
from ostinato.core.plan import SampledToken, SequenceResult, StepPlan, StepResult
from ostinato.core.request import Request
from ostinato.core.sampling_params import SamplingParams
from ostinato.settings import PrefixCacheConfig

STEP_S, TOKEN_S = 0.008, 0.0001
NUM_BLOCKS, SEATS, BUDGET, CHUNK = 2_500, 16, 1_024, 512
VOCABULARY = 50_000
SCENES = ("mixed", "flood")
DEPTH_FIRST = "depth_first"
"""The order of ``benchmarks.depth_first``, which no engine has."""


@dataclass(slots=True)
class Turn:
    """Something that is sent, and what came of it.

    Attributes:
        tenant: Whose.
        prompt: What.
        num_answer_tokens: How long the answer is.
        arrives_s: When.
        next_texts: What a chat's user says after this one's answer, turn by turn.
        admitted_s: When it was first admitted.
        first_token_s: When its first token was there.
    """

    tenant: str
    prompt: array
    num_answer_tokens: int
    arrives_s: float
    next_texts: list[array] = field(default_factory=list)
    admitted_s: float | None = None
    first_token_s: float | None = None

    @property
    def ttft_s(self) -> float:
        """Seconds from arrival to the first token."""
        assert self.first_token_s is not None
        return self.first_token_s - self.arrives_s

    @property
    def wait_s(self) -> float:
        """Seconds from arrival to admission."""
        assert self.admitted_s is not None
        return self.admitted_s - self.arrives_s


# --- traffic ---


def make_traffic(scene: str, rng: random.Random) -> list[Turn]:
    """Draw a scene; it is the same for every order."""
    turns = [*rag(rng), *chats(rng), *strangers(rng, "once", 150, lambda: rng.uniform(0, 60))]
    if scene == "flood":
        turns += strangers(rng, "flood", 400, lambda: 10.0)
    return turns


def rag(rng: random.Random) -> Iterator[Turn]:
    """Ask on documents behind one system prompt, the n-th of them in proportion to 1/sqrt(n)."""
    system = draw(rng, 500)
    documents = [system + draw(rng, 2_000) for _ in range(40)]
    weights = [(number + 1) ** -0.5 for number in range(40)]
    for document in rng.choices(documents, weights, k=400):
        yield Turn("rag", document + draw(rng, 50), rng.randint(20, 60), rng.uniform(0, 60))


def chats(rng: random.Random) -> Iterator[Turn]:
    """Open conversations behind one system prompt; each goes on when it has its answer."""
    system = draw(rng, 300)
    for _ in range(24):
        texts = [draw(rng, rng.randint(50, 250)) for _ in range(8)]
        yield Turn("chat", system + texts[0], 100, rng.uniform(0, 20), texts[1:])


def strangers(
    rng: random.Random, tenant: str, number: int, arrival: Callable[[], float]
) -> Iterator[Turn]:
    """Send prompts that share nothing."""
    for _ in range(number):
        yield Turn(tenant, draw(rng, 800), rng.randint(10, 30), arrival())


def draw(rng: random.Random, num_tokens: int) -> array:
    """Draw token ids."""
    return array("I", [rng.randrange(VOCABULARY) for _ in range(num_tokens)])


# --- one run ---


class Run:
    """One order, one scene, from the first arrival to the last answer."""

    def __init__(self, order: str, traffic: list[Turn], seed: int) -> None:
        """Start at time 0 with nothing cached."""
        self.now_s = 0.0
        self.plan_s = 0.0
        self.turns: list[Turn] = []
        self.cache = build_cache(PrefixCacheConfig(NUM_BLOCKS), clock=lambda: self.now_s)
        named: Any = "fcfs" if order == DEPTH_FIRST else order
        config = SchedulerConfig(BUDGET, CHUNK, SEATS, order=named)
        make = partial(DepthFirst, config.max_overtakes) if order == DEPTH_FIRST else None
        self.scheduler = build_scheduler(config, self.cache, lambda: self.now_s, order=make)
        self._rng = random.Random(seed)
        self._numbers = count()
        self._live: dict[RequestId, Turn] = {}
        self._names: dict[SequenceId, RequestId] = {}
        self._coming: list[tuple[float, int, Turn]] = []
        for turn in traffic:
            self._expect(turn)

    def go(self, bar: tqdm) -> None:
        """Serve everything."""
        while self._coming or self.scheduler.has_work:
            if not self.scheduler.has_work:
                self.now_s = max(self.now_s, self._coming[0][0])
            while self._coming and self._coming[0][0] <= self.now_s:
                self._arrive(heapq.heappop(self._coming)[2])
            self._step(bar)

    def _expect(self, turn: Turn) -> None:
        heapq.heappush(self._coming, (turn.arrives_s, next(self._numbers), turn))

    def _arrive(self, turn: Turn) -> None:
        name, number = RequestId(str(len(self.turns))), SequenceId(len(self.turns))
        params = SamplingParams(max_tokens=turn.num_answer_tokens)
        request = Request(name, turn.prompt, params, Identity(tenant=turn.tenant.encode()))
        self.turns.append(turn)
        self._live[name], self._names[number] = turn, name
        self.scheduler.add(request, (0,))

    def _step(self, bar: tqdm) -> None:
        start = time.perf_counter()
        plan = self.scheduler.plan()
        self.plan_s += time.perf_counter() - start
        for scheduled in plan.sequences:
            turn = self._live[self._names[scheduled.sequence_id]]
            if turn.admitted_s is None:
                turn.admitted_s = self.now_s
        self.now_s += STEP_S + TOKEN_S * plan.num_tokens
        for update in self.scheduler.commit(self._sample(plan)):
            turn = self._live[update.sequence.request.request_id]
            if turn.first_token_s is None:
                turn.first_token_s = self.now_s
            if update.sequence.finish_reason is not None:
                self._end(turn, update.sequence.key.tokens)
                bar.update()

    def _sample(self, plan: StepPlan) -> StepResult:
        return StepResult(
            tuple(
                SequenceResult((SampledToken(self._rng.randrange(VOCABULARY)),) if s.sample else ())
                for s in plan.sequences
            )
        )

    def _end(self, turn: Turn, tokens: array) -> None:
        """A chat's user reads for two seconds and says the next thing."""
        if turn.next_texts:
            prompt = tokens + turn.next_texts[0]
            self._expect(Turn(turn.tenant, prompt, 100, self.now_s + 2.0, turn.next_texts[1:]))


def measure(order: str, scene: str, seed: int) -> dict[str, Any]:
    """Run one order on one scene; return the figures."""
    traffic = make_traffic(scene, random.Random(seed))
    run = Run(order, traffic, seed)
    total = len(traffic) + sum(len(turn.next_texts) for turn in traffic)
    with tqdm(total=total, desc=f"{scene}, {order}", unit="request", leave=False) as bar:
        run.go(bar)
    ttfts = defaultdict(list)
    for turn in run.turns:
        ttfts[turn.tenant].append(turn.ttft_s)
    all_ttfts = [ttft for tenant in ttfts.values() for ttft in tenant]
    stats = run.scheduler.stats
    return {
        "scene": scene,
        "order": order,
        "hit_ratio": run.cache.stats.first.hit_ratio,
        "computed_tokens": stats.computed_prompt_tokens + stats.computed_output_tokens,
        "preemptions": stats.num_preemptions,
        "ttft_mean_s": fmean(all_ttfts),
        "ttft_p95_s": quantiles(all_ttfts, n=20)[-1],
        "longest_wait_s": max(turn.wait_s for turn in run.turns),
        "end_s": run.now_s,
        "ttft_by_tenant_s": {tenant: fmean(values) for tenant, values in ttfts.items()},
        "plan_ms_per_step": 1e3 * run.plan_s / stats.num_steps,
    }


def show(figures: list[dict[str, Any]]) -> None:
    """Print a table per scene."""
    for scene in dict.fromkeys(f["scene"] for f in figures):
        rows = [f for f in figures if f["scene"] == scene]
        tenants = list(rows[0]["ttft_by_tenant_s"])
        table = Table(title=f"scene {scene}; seconds are the cost model's", pad_edge=False)
        columns = ["hits", "tokens", "first token", "95 %", "longest wait", "end", *tenants]
        table.add_column("order")
        for name in [*columns, "planning, ms a step"]:
            table.add_column(name, justify="right")
        for row in rows:
            seconds = ("ttft_mean_s", "ttft_p95_s", "longest_wait_s", "end_s")
            table.add_row(
                row["order"],
                f"{row['hit_ratio']:.1%}",
                f"{row['computed_tokens']:,}",
                *(f"{row[name]:.1f}" for name in seconds),
                *(f"{row['ttft_by_tenant_s'][tenant]:.1f}" for tenant in tenants),
                f"{row['plan_ms_per_step']:.2f}",
            )
        Console(width=118).print(table)


def main() -> None:
    """Read the command line and measure."""
    parser = parser_of(__doc__, has_json=True)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    orders = (*get_args(WaitingOrder), DEPTH_FIRST)
    figures = [measure(order, scene, options.seed) for scene in SCENES for order in orders]
    show(figures)
    write_json(options.json, figures)


if __name__ == "__main__":
    main()
