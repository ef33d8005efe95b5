"""Hits, balance and times to first token of a simulated fleet, by router.

Eight replicas of the real scheduler and cache serve a trace behind each router, on the same
arrivals, in simulated time (``benchmarks/router/fleet.py``)::

    python -m benchmarks.router.routing mooncake_synthetic.npz
    python -m benchmarks.router.routing agentic_a.npz --peers routers/bin/python  # peers/routers.py
    python -m benchmarks.router.routing mooncake_synthetic.npz --late  # late events, and more
    python -m benchmarks.router.routing --hard  # a hot tenant, paced agents, a burst
    python -m benchmarks.router.routing --hard --order shortest_first  # the engine's default

One simulated token stands for ``SCALE`` of the trace, with the prices of a step to match, so that
blocks of 512 tokens are blocks of 16. Arrivals are stretched until the fleet would be busy for 80 %
of the time without a cache, times ``--load``.
"""

import time
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np

from benchmarks.command_line import parser_of
from benchmarks.peers.routers import DYNAMO, NAMES, DynamoRouter, HttpRouter
from benchmarks.router.fleet import (
    Dispatcher,
    FleetConfig,
    FleetResult,
    LibraryDispatcher,
    Outage,
    replay_fleet,
)
from ostinato.core.config import SchedulerConfig, WaitingOrder
from ostinato.lab.simulate.timed_replay import slowed_to_fit
from ostinato.lab.traces.block_trace import BlockRequest, BlockTrace
from ostinato.lab.traces.trace_builder import TraceBuilder
from ostinato.lab.traces.traces import read_npz
from ostinato.lab.work.cost_model import CostModel
from ostinato.router import POLICIES, RouterConfig
from ostinato.router.policy import WorkerPrices
from ostinato.settings import PrefixCacheConfig

NUM_REPLICAS = 8
SCALE = 32
SCHEDULING = SchedulerConfig(max_num_batched_tokens=8192 // SCALE)


def cost_of(num_gpus: int) -> CostModel:
    """Return the price of a step: 8B on so many H100s, scaled."""
    token_s = SCALE / 25_000 / num_gpus
    return CostModel(0.02, token_s, SCALE * token_s / 30_000, f"8B on {num_gpus} H100, scaled")


COST = cost_of(1)


def scaled(trace: BlockTrace) -> BlockTrace:
    """Return the trace with one token for each ``SCALE``."""
    return replace(
        trace,
        block_tokens=trace.block_tokens // SCALE,
        input_tokens=np.maximum(1, trace.input_tokens // SCALE),
        output_tokens=np.maximum(1, trace.output_tokens // SCALE),
    )


def pooled_hit_ratio(trace: BlockTrace, num_blocks: int) -> float:
    """Return what one cache of the size of all finds, requests one after another."""
    cached: OrderedDict[int, None] = OrderedDict()
    hit_tokens = 0
    for number, input_tokens in enumerate(trace.input_tokens.tolist()):
        path = trace.path(number).tolist()
        num_hits = next((at for at, block in enumerate(path) if block not in cached), len(path))
        hit_tokens += min(num_hits * trace.block_tokens, input_tokens - 1)
        for block in reversed(path):
            cached[block] = None
            cached.move_to_end(block)
        while len(cached) > num_blocks:
            cached.popitem(last=False)
    return hit_tokens / trace.total_input_tokens


def hot_tenant() -> BlockTrace:
    """Half of the requests are one tenant's, behind one prefix; 64 chats go on beside them."""
    chats = [[f"chat {number}"] for number in range(64)]
    paths = []
    for number in range(2000):
        chat = chats[number // 2 % 64]
        chat += [f"{number}.{block}" for block in range(2)]
        hot = [*range(40), *(f"{number}.{block}" for block in range(4))]
        paths.append(hot if number % 2 else list(chat))
    return _trace("a hot tenant", paths, [number * 0.1 for number in range(2000)])


def paced_agents() -> BlockTrace:
    """448 agents with one system prompt take turns one after another: no queue is ever seen."""
    paths = [
        [*range(8), *(f"{agent}.{block}" for block in range(3 * turn + 3))]
        for turn in range(5)
        for agent in range(448)
    ]
    return _trace("paced agents", paths, [number * 0.5 for number in range(len(paths))])


def burst() -> BlockTrace:
    """Within a second, 400 requests of 64 blocks ask behind one new prefix of 60."""
    paths = [[*range(60), *(f"{n}.{block}" for block in range(4))] for n in range(400)]
    return _trace("a burst of one new prefix", paths, [number / 400 for number in range(400)])


def long_and_short() -> BlockTrace:
    """Turns of 64 chats, and after each thirty a prompt of 100,000 tokens that nothing has seen."""
    chats: list[list[int | str]] = [[f"chat {number}"] for number in range(64)]
    paths = []
    for number in range(1500):
        chat = chats[number % 64]
        chat += [f"{number}.{block}" for block in range(2)]
        paths.append(list(chat))
        if number % 30 == 29:
            paths.append([f"long {number}.{block}" for block in range(200)])
    return _trace("long prompts", paths, [number * 0.06 for number in range(len(paths))])


def _trace(name: str, paths: list[list[int | str]], arrivals: list[float]) -> BlockTrace:
    requests = [
        BlockRequest(at, len(path) * 512 // SCALE + 1, 4, tuple(path))
        for at, path in zip(arrivals, paths, strict=True)
    ]
    return TraceBuilder(requests).build(name, 512 // SCALE)


class Bench:
    """One trace, and what is the same for all routers."""

    def __init__(
        self, trace: BlockTrace, num_blocks: int, load: float, order: WaitingOrder
    ) -> None:
        """Set the fleet's size, and stretch the arrivals."""
        self.trace = trace
        is_shortest_first = order == "shortest_first"
        self.prices = WorkerPrices(COST.token_s, COST.pair_s, True) if is_shortest_first else None
        scheduling = replace(SCHEDULING, order=order)
        slowdown = slowed_to_fit(trace, COST) / NUM_REPLICAS / load
        cache = PrefixCacheConfig(
            block_size=trace.block_tokens, num_blocks=num_blocks, keep_event_batches=16
        )
        self.fleet = FleetConfig(NUM_REPLICAS, cache, scheduling, COST, slowdown)
        self.span_s = trace.duration_s * slowdown

    def library(self, policy: str, routers: int = 1) -> LibraryDispatcher:
        """Return our router, or several side by side."""
        config = RouterConfig(policy, max_tracked_tokens=10**9)
        return LibraryDispatcher(self.trace, NUM_REPLICAS, config, routers, self.prices)

    def run_as_one(self) -> None:
        """Replay on one engine with the memory and the speed of all, and print a row."""
        blocks = replace(self.fleet.cache, num_blocks=self.fleet.cache.num_blocks * NUM_REPLICAS)
        tokens = SCHEDULING.max_num_batched_tokens * NUM_REPLICAS
        one = replace(
            self.fleet,
            num_replicas=1,
            cache=blocks,
            scheduling=replace(self.fleet.scheduling, max_num_batched_tokens=tokens),
            cost=cost_of(NUM_REPLICAS),
        )
        config = RouterConfig("round_robin", max_tracked_tokens=10**9)
        self.run("one engine of all", LibraryDispatcher(self.trace, 1, config), one)

    def run(
        self, name: str, dispatcher: Dispatcher, fleet: FleetConfig | None = None
    ) -> FleetResult:
        """Replay and print a row."""
        began_s = time.process_time()
        result = replay_fleet(self.trace, fleet or self.fleet, dispatcher)
        print(
            f"| {name} | {result.hit_ratio:.2%} | {result.imbalance:.3f} "
            f"| {result.mean_first_token_s:.3f} | {result.percentile(50):.3f} "
            f"| {result.percentile(99):.2f} | {time.process_time() - began_s:.0f} |",
            flush=True,
        )
        return result


@contextmanager
def peer(python: Path, name: str, bench: Bench) -> Iterator[DynamoRouter | HttpRouter]:
    """Start a router of others, and stop it."""
    trace, num_blocks = bench.trace, bench.fleet.cache.num_blocks
    router: DynamoRouter | HttpRouter
    if name == DYNAMO:
        router = DynamoRouter(python, trace, NUM_REPLICAS, num_blocks)
    else:
        router = HttpRouter(python, name, trace, NUM_REPLICAS)
    try:
        yield router
    finally:
        router.close()


def compare(bench: Bench, names: list[str], peers: Path | None) -> None:
    """Compare policies, and routers of others, with one engine in place of the fleet."""
    bench.run_as_one()
    for name in names:
        if name in POLICIES:
            bench.run(name, bench.library(name))
        elif peers is not None:
            with peer(peers, name, bench) as router:
                bench.run(name, router)


def disturb(bench: Bench) -> None:
    """Let the default policy work with late events, beside a second router, and with an outage."""
    ours, fleet = bench.library, bench.fleet
    for late_s in (0.0, 0.05, 0.5, 5.0):
        late = replace(fleet, late_s=late_s)
        bench.run(f"events {late_s * 1000:,.0f} ms late", ours("cache_state"), late)
    bench.run("two routers side by side", ours("cache_state", 2))
    outage = Outage(3, bench.span_s * 0.4, bench.span_s * 0.5)
    bench.run("a worker lost and back", ours("cache_state"), replace(fleet, outages=(outage,)))


def endure(order: WaitingOrder) -> None:
    """Serve made-up traffic in which routers went wrong, at its own pace."""
    for make in (hot_tenant, paced_agents, burst, long_and_short):
        bench = Bench(make(), 1000, 1.0, order)
        fleet = replace(bench.fleet, slowdown=1.0)
        for policy in ("cache_state", "session", "least_loaded"):
            bench.run(f"{bench.trace.name}, `{policy}`", bench.library(policy), fleet)


def main(arguments: list[str] | None = None) -> None:
    """Print a table."""
    parser = parser_of(__doc__)
    parser.add_argument("trace", type=Path, nargs="?", help="an .npz of 512-token blocks")
    parser.add_argument("--requests", type=int, default=4000, help="the first so many")
    parser.add_argument("--blocks", type=int, default=1000, help="of each replica's cache")
    parser.add_argument("--load", type=float, default=1.1)
    parser.add_argument("--peers", type=Path, help="Python of the environment with other routers")
    everything = [*POLICIES, *NAMES]
    parser.add_argument("--routers", nargs="+", choices=everything, default=everything)
    parser.add_argument("--late", action="store_true", help="late events, two routers, an outage")
    parser.add_argument("--hard", action="store_true", help="made-up traffic in place of a trace")
    orders = ["fcfs", "shortest_first"]
    parser.add_argument("--order", choices=orders, default="fcfs", help="of the replicas")
    options = parser.parse_args(arguments)
    heading = (
        "| router | hits | imbalance | mean TTFT, s | p50 | p99 | CPU, s |\n|---|" + "--:|" * 6
    )
    if options.hard:
        print(heading)
        return endure(options.order)
    if options.trace is None:
        parser.error("name a trace, or --hard")
    trace = scaled(read_npz(options.trace).first(options.requests))
    bench = Bench(trace, options.blocks, options.load, options.order)
    pooled = pooled_hit_ratio(trace, options.blocks * NUM_REPLICAS)
    print(f"{trace.name}: {len(trace):,} requests; one pool of all finds {pooled:.2%}\n")
    print(heading)
    if options.late:
        disturb(bench)
    else:
        compare(bench, options.routers, options.peers)


if __name__ == "__main__":
    main()
