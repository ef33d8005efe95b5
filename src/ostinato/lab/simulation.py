"""What would each policy have found, at each size of the cache?"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from ostinato.core.config import CacheConfig
from ostinato.lab.block_trace import BlockTrace
from ostinato.lab.bounds import belady_hits
from ostinato.lab.policies import SIMULATED_POLICIES, SimulatedPolicyName
from ostinato.lab.replay import ReplayedRequest
from ostinato.lab.serial_replay import SerialResult, replay_serially
from ostinato.lab.timed_replay import TimedResult

USUAL_POLICY = CacheConfig(num_blocks=1).policy
"""Of an engine that is told nothing else."""

_LEADING = (1, 2, 5)


@dataclass(slots=True)
class Simulation:
    """What was asked and found of one trace.

    Attributes:
        trace: The traffic.
        capacities: Sizes of the cache in blocks of the trace, rising.
        results: One per size, by policy.
        bounds: Hit ratios that no policy can exceed, one per size, by name.
        unbounded: Of a cache that never evicts.
        timed: Runs with the scheduler, by what was different.
        slowdown: By which the arrivals of ``timed`` were stretched.
        is_slowed_to_fit: Whether that was chosen so that one engine can serve them.
        cost_origin: Where the prices of ``timed`` come from.
        replayed: For a recording, its requests, done again with the recorded settings.
    """

    trace: BlockTrace
    capacities: tuple[int, ...]
    results: dict[SimulatedPolicyName, list[SerialResult]]
    unbounded: SerialResult
    bounds: dict[str, list[float]] = field(default_factory=dict)
    timed: dict[str, TimedResult] = field(default_factory=dict)
    slowdown: float = 1.0
    is_slowed_to_fit: bool = False
    cost_origin: str = ""
    replayed: list[ReplayedRequest] = field(default_factory=list)

    def ratios(self) -> Mapping[str, list[float]]:
        """Return hit ratios, one per size: policies first, then bounds."""
        found = {str(p): [r.hit_ratio for r in rs] for p, rs in self.results.items()}
        return found | self.bounds


def add_bounds(simulation: Simulation, progress: Callable[[int], None] | None = None) -> None:
    """Add what a cache of each size could have found, had it known the future.

    Args:
        simulation: Gets its ``bounds``.
        progress: Is told of requests that were served; of each size twice as many as there are.

    Cost: twice per size O(n log n) in all blocks of all requests.
    """
    trace, ceiling = simulation.trace, simulation.unbounded.hit_ratio
    paths, tokens = trace.paths(), max(1, trace.total_input_tokens)
    for name, bypass in (("Belady", False), ("Belady, bypass", True)):
        ratios = []
        for size in simulation.capacities:
            hits = belady_hits(paths, size, bypass)
            # Where a trace knows answers, their blocks are among the hits.
            ratios.append(min(hits * trace.block_tokens / tokens, ceiling))
            if progress is not None:
                progress(len(trace))
        simulation.bounds[name] = ratios


def usual_capacities(trace: BlockTrace) -> tuple[int, ...]:
    """Return sizes worth looking at: 1, 2, 5, 10, ... up to a cache that never evicts.

    The smallest is about a two-hundredth of the distinct blocks.
    """
    least, most = max(1, trace.num_distinct // 200), trace.num_distinct + 1
    sizes: list[int] = []
    power = 1
    while not sizes or sizes[-1] < most:
        sizes += [lead * power for lead in _LEADING]
        power *= 10
    needed = [size for size in sizes if size >= least]
    enough = next(place for place, size in enumerate(needed) if size >= most)
    return tuple(needed[: enough + 1])


def simulate(
    trace: BlockTrace,
    capacities: Sequence[int],
    policies: Sequence[SimulatedPolicyName] = SIMULATED_POLICIES,
    progress: Callable[[int], None] | None = None,
) -> Simulation:
    """Serve a trace from caches of every size under every policy.

    Args:
        trace: The traffic.
        capacities: Sizes in blocks of the trace.
        policies: Which to try.
        progress: Is told of requests that were served; of each cache as many as the trace has.

    Cost: one serial replay per size and policy, and one more.
    """
    sizes = tuple(sorted(set(capacities)))
    unbounded = replay_serially(trace, trace.num_distinct + 1, "lru", progress)
    results = {
        policy: [replay_serially(trace, size, policy, progress) for size in sizes]
        for policy in policies
    }
    return Simulation(trace, sizes, results, unbounded)
