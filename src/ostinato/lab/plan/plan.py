"""The number of replicas, and their cache memory, for some traffic.

Memory saves prefill and so machines, but those are bought whole, and each has its own cache. For
each size of a replica's memory the trace is replayed on as many replicas as the load needs with the
resulting hits, once with prefix-aware and once with round-robin routing::

    load with hits / utilisation  ─►  replicas  ─►  hits with N caches  ─►  load with hits ...

Three points of the curve matter: the lowest bill, the *knee* of the hits, and the first size at
which nothing is evicted.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import ceil

import numpy as np

from ostinato.core.config import check_minimum
from ostinato.core.errors import ConfigError
from ostinato.lab.plan.replicas import ReplicaWork, RoutedResult, Routing, replay_routed, work_of
from ostinato.lab.replay.serial_replay import USUAL_POLICY, hit_tokens
from ostinato.lab.traces.block_trace import BlockTrace, Numbers
from ostinato.lab.work.cost_model import StepCost
from ostinato.lab.work.kv_groups import KVGroups
from ostinato.settings import PolicyName

GIB = 2**30
MAX_POINTS = 200
"""Maximum sizes of a curve; more could not be distinguished in a plot."""

ROUTINGS: tuple[Routing, Routing] = ("affinity", "round_robin")


@dataclass(frozen=True, slots=True)
class HourlyRates:
    """Prices per hour, in one currency.

    Attributes:
        gpu: One GPU, or the whole machine where its GPUs are not known.
        memory_gib: A GiB of memory for the cache, beyond what the GPUs have left.
    """

    gpu: float
    memory_gib: float

    def __post_init__(self) -> None:
        """Refuse prices below zero.

        Raises:
            ConfigError: One is.
        """
        for name, price in (("compute_price", self.gpu), ("memory_price", self.memory_gib)):
            if not 0 <= price < float("inf"):
                raise ConfigError(f"{name}={price}: must be at least 0")


@dataclass(frozen=True, slots=True)
class ReplicaSetup:
    """A replica's hardware and settings.

    Attributes:
        cost: Cost of a step.
        kv: KV of a token.
        prices: Prices of machines and memory.
        num_gpus: Number of GPUs of one replica.
        own_bytes: Memory that its GPUs have left after the weights, at no extra price.
        utilisation: Share of the time that replicas may be busy on average.
        policy: Eviction policy.
    """

    cost: StepCost
    kv: KVGroups
    prices: HourlyRates
    num_gpus: int = 1
    own_bytes: int = 0
    utilisation: float = 0.7
    policy: PolicyName = USUAL_POLICY

    def __post_init__(self) -> None:
        """Check the utilisation.

        Raises:
            ConfigError: It is not above 0, or above 1.
        """
        if not 0 < self.utilisation <= 1:
            raise ConfigError(f"utilisation={self.utilisation}: must be above 0 and at most 1")

    def money_per_hour(self, num_replicas: int, memory_bytes: int) -> float:
        """Return the bill for a number of replicas with a given memory each."""
        bought = max(0, memory_bytes - self.own_bytes) / GIB
        return num_replicas * (self.num_gpus * self.prices.gpu + bought * self.prices.memory_gib)


@dataclass(frozen=True, slots=True)
class ReplicaFleet:
    """Replicas that serve a trace.

    Attributes:
        num_replicas: Number of replicas that the load needs.
        hit_ratio: Share of prompt tokens that hit, 0 to 1.
        saved_share: Share of the prefill work that is saved, attention included, 0 to 1.
        busy_share: Share of its time that a replica is busy, on average.
        busiest_share: The same for the busiest replica.
        money: Price per hour.
        evicts: Whether any cache evicted something of full attention.
    """

    num_replicas: int
    hit_ratio: float
    saved_share: float
    busy_share: float
    busiest_share: float
    money: float
    evicts: bool


@dataclass(frozen=True, slots=True)
class Option:
    """One size of a replica's cache.

    Attributes:
        memory_bytes: Memory of each replica.
        affinity: The fleet with prefix-aware routing.
        round_robin: The fleet with round-robin routing.
    """

    memory_bytes: int
    affinity: ReplicaFleet
    round_robin: ReplicaFleet


@dataclass(frozen=True, slots=True)
class CapacityPlan:
    """The curve, and the points on it.

    Attributes:
        options: One per size, rising; the last evicts nothing, or is the largest asked for.
        without: The fleet without a cache.
        best: The option with the lowest bill; None if it is no lower than without a cache.
        knee: The option where the curve of hits bends.
        seen_ratio: Share of prompt tokens that an earlier request had: the hits of one cache for
            all traffic that never evicts.
        setup: Hardware, prices and settings.
    """

    options: tuple[Option, ...]
    without: ReplicaFleet
    best: Option | None
    knee: Option
    seen_ratio: float
    setup: ReplicaSetup

    @property
    def ceiling(self) -> Option:
        """The largest size: its hits are all that there are."""
        return self.options[-1]


def make_plan(
    trace: BlockTrace,
    setup: ReplicaSetup,
    num_points: int = 8,
    progress: Callable[[int], None] | None = None,
) -> CapacityPlan:
    """Weigh memory against the machines that it saves.

    The largest size is the least at which no replica evicts anything of full attention, the
    smallest about a two-hundredth of it; each is as many times as large as the one before. What
    the GPUs have left is among them.

    Args:
        trace: The traffic.
        setup: A replica's hardware and settings.
        num_points: Number of sizes.
        progress: Called with 1 for each size that is done.

    Raises:
        ConfigError: The trace is too short to speak of hours, or there are too few or too many
            sizes.

    Cost: two to four serial replays per size and routing.
    """
    check_minimum("points", num_points, 2)
    if num_points > MAX_POINTS:
        raise ConfigError(f"points={num_points}: {MAX_POINTS} at most, each is several replays")
    if trace.duration_s <= 0:
        raise ConfigError(
            f"{trace.name} spans {trace.duration_s:g} s: a plan needs a trace with times"
        )
    planner = _Planner(trace, setup)
    options: list[Option] = []
    min_memory, max_memory = setup.kv.memory_for(1, trace.block_tokens), planner.min_memory()
    for memory in _memories(
        max(min_memory, max_memory // 200), max_memory, num_points, setup.own_bytes
    ):
        options.append(planner.option(memory))
        if progress is not None:
            progress(1)
    cheapest = min(options, key=lambda o: (o.affinity.money, -o.affinity.hit_ratio))
    best = cheapest if cheapest.affinity.money < planner.without.money else None
    seen = float(_seen_tokens(trace).sum()) / max(1, trace.total_input_tokens)
    return CapacityPlan(tuple(options), planner.without, best, knee(options), seen, setup)


def _memories(min_memory: int, max_memory: int, num_points: int, own_bytes: int) -> list[int]:
    """Return the sizes of a replica's memory to look at, rising."""
    sizes = {round(memory) for memory in np.geomspace(min_memory, max_memory, num_points).tolist()}
    own = {own_bytes} if min_memory < own_bytes < max_memory else set()
    return sorted(sizes | own)


def _seen_tokens(trace: BlockTrace) -> Numbers:
    """Return the prompt tokens of each request in blocks that an earlier one had."""
    request = np.repeat(np.arange(len(trace)), np.diff(trace.offsets))
    _, firsts, block = np.unique(trace.ids, return_index=True, return_inverse=True)
    known = request[firsts][block.ravel()] < request
    return hit_tokens(trace, np.bincount(request[known], minlength=len(trace)).tolist())


@dataclass(frozen=True, slots=True)
class _Tried:
    """A number of replicas that was tried, its result, and the number that the load then needs."""

    fleet: ReplicaFleet
    result: RoutedResult
    needed: int


class _Planner:
    """Finds how many replicas each size of memory needs."""

    def __init__(self, trace: BlockTrace, setup: ReplicaSetup) -> None:
        self._trace, self._setup = trace, setup
        self._work = work_of(trace, setup.cost)
        idle = np.zeros(len(trace), np.int64)
        nothing = RoutedResult(idle, idle, 0, 0)
        self.without = self._fleet(nothing, self._needed(self._work.total_s), 0, self._work)
        seen = RoutedResult(_seen_tokens(trace), idle, 0, 0)
        self._fewest = self._needed(self._work_behind(seen).total_s)

    def min_memory(self) -> int:
        """Return the least memory of a replica with which full attention evicts nothing."""
        size, setup = self._trace.block_tokens, self._setup
        memory = setup.kv.memory_for(max(1, self._trace.num_distinct), size)
        everything = setup.kv.with_states(memory)
        # Nothing is evicted, so the fastest policy will do.
        planner = _Planner(self._trace, replace(setup, policy="lru"))
        tried = planner.serve(everything, "affinity")
        memory = setup.kv.memory_for(max(1, tried.result.max_cached_blocks), size)
        return setup.kv.with_states(memory)

    def option(self, memory_bytes: int) -> Option:
        """Return one size with the replicas that it needs."""
        return Option(memory_bytes, *(self.serve(memory_bytes, each).fleet for each in ROUTINGS))

    def serve(self, memory_bytes: int, routing: Routing) -> _Tried:
        """Find the fewest replicas that can serve the load with their hits."""
        too_few, num = self._fewest - 1, self._fewest
        tried = self._try(memory_bytes, num, routing)
        while tried.needed > num:
            too_few, num = num, tried.needed
            tried = self._try(memory_bytes, num, routing)
        while num - too_few > 1:
            middle = (too_few + num) // 2
            other = self._try(memory_bytes, middle, routing)
            if other.needed > middle:
                too_few = middle
            else:
                tried, num = other, middle
        return tried

    def _try(self, memory_bytes: int, num_replicas: int, routing: Routing) -> _Tried:
        """Serve the trace from ``num_replicas`` replicas."""
        trace, setup = self._trace, self._setup
        pools = setup.kv.pools(memory_bytes, trace.block_tokens)
        result = replay_routed(trace, pools, num_replicas, routing, setup.policy, self._work)
        work = self._work_behind(result)
        fleet = self._fleet(result, num_replicas, memory_bytes, work)
        return _Tried(fleet, result, self._needed(work.total_s))

    def _work_behind(self, result: RoutedResult) -> ReplicaWork:
        inputs = self._trace.input_tokens.astype(np.float64)
        hits = result.hit_tokens.astype(np.float64)
        return ReplicaWork(self._setup.cost.prefill_s(inputs, hits), self._work.decode_s)

    def _needed(self, total_s: float) -> int:
        return max(1, ceil(total_s / (self._trace.duration_s * self._setup.utilisation)))

    def _fleet(
        self, result: RoutedResult, num_replicas: int, memory_bytes: int, work: ReplicaWork
    ) -> ReplicaFleet:
        busy_s = np.bincount(
            result.replica, weights=work.prefill_s + work.decode_s, minlength=num_replicas
        )
        whole_s = float(self._work.prefill_s.sum())
        tokens = self._trace.total_input_tokens
        duration_s = self._trace.duration_s
        return ReplicaFleet(
            num_replicas,
            float(result.hit_tokens.sum()) / tokens if tokens else 0.0,
            1 - float(work.prefill_s.sum()) / whole_s if whole_s else 0.0,
            work.total_s / num_replicas / duration_s,
            float(busy_s.max()) / duration_s,
            self._setup.money_per_hour(num_replicas, memory_bytes),
            result.evicted_blocks > 0,
        )


def knee(options: Sequence[Option]) -> Option:
    """Return where the curve of hits over memory bends.

    It is the point highest above the straight line from nothing to the end; of equals the last.

    Source: Satopää et al., "Finding a 'Kneedle' in a Haystack", 2011, without smoothing.
    """
    last = options[-1]

    def above(option: Option) -> tuple[float, int]:
        max_ratio = last.affinity.hit_ratio
        height = option.affinity.hit_ratio / max_ratio if max_ratio else 0.0
        return height - option.memory_bytes / last.memory_bytes, option.memory_bytes

    return max(options, key=above)
