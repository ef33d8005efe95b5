"""The hits of each policy at each size of the cache, and their upper bound.

The bound is Belady's: evict what is used furthest in the future. A prefix cache may evict leaves
only; that costs nothing here, since a block is used whenever a block after it is, so one of the
furthest is always a leaf. With bypass, a block whose next use is later than those of all cached
blocks is not inserted in the first place; it has still been computed.

Source: L. A. Belady, A study of replacement algorithms for a virtual-storage computer, 1966.
"""

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import get_args

import numpy as np
import numpy.typing as npt

from ostinato.lab.replay.replay import ReplayedRequest
from ostinato.lab.replay.serial_replay import (
    USUAL_POLICY,
    Pools,
    SerialResult,
    each_path,
    replay_serially,
)
from ostinato.lab.replay.tier_model import DiskModel
from ostinato.lab.simulate.timed_replay import TimedResult
from ostinato.lab.traces.block_trace import BlockTrace
from ostinato.lab.work.kv_groups import KVGroups
from ostinato.settings import CheckpointPlacement, PolicyName, StateConfig

PLACEMENTS: Mapping[str, CheckpointPlacement] = {
    "where prompts part": "where_prompts_part",
    "one per request": "prompt_end",
    "every block": "every_unit",
}
"""Where checkpoints of a model with states are kept: by our engine, and by others."""

SHARES = (0.05, 0.1, 0.2, 0.4, 0.7)
"""Shares of the memory for states that are tried."""

_LEADING = (1, 2, 5)
_NEVER = 2**62


@dataclass(slots=True)
class Simulation:
    """The simulation of one trace.

    Attributes:
        trace: The traffic.
        capacities: Sizes of the cache in blocks of the trace, rising.
        kv: KV of a token; None if no model is known.
        results: One per size, by policy; of a model with states, by where checkpoints are kept.
        bounds: Hit ratios that no policy can exceed, one per size, by name.
        unbounded: Hits of a cache that never evicts.
        timed: Runs with the scheduler, by name.
        slowdown: Factor on the gaps between arrivals in ``timed``.
        is_slowed_to_fit: Whether it was chosen so that one engine can serve them.
        cost_origin: Source of the costs of ``timed``.
        tiered: Results with a disk behind the cache, one per size, under the usual policy.
        disk: The disk; None without one.
        replayed: The requests of a recording, replayed with the recorded settings.
    """

    trace: BlockTrace
    capacities: tuple[int, ...]
    results: dict[str, list[SerialResult]]
    unbounded: SerialResult
    kv: KVGroups | None = None
    bounds: dict[str, list[float]] = field(default_factory=dict)
    timed: dict[str, TimedResult] = field(default_factory=dict)
    slowdown: float = 1.0
    is_slowed_to_fit: bool = False
    cost_origin: str = ""
    tiered: list[SerialResult] = field(default_factory=list)
    disk: DiskModel | None = None
    replayed: list[ReplayedRequest] = field(default_factory=list)

    def ratios(self) -> Mapping[str, list[float]]:
        """Return hit ratios, one per size: policies first, then bounds."""
        ratios = {p: [r.hit_ratio for r in rs] for p, rs in self.results.items()}
        if self.disk is not None:
            ratios[f"{self.tiered[0].policy} + disk"] = [r.hit_ratio for r in self.tiered]
        return ratios | self.bounds

    def memory(self) -> list[int] | None:
        """Return the bytes of each size; None where no model is known."""
        if self.kv is None:
            return None
        return [self.kv.memory_for(size, self.trace.block_tokens) for size in self.capacities]


def add_bounds(simulation: Simulation, progress: Callable[[int], None] | None = None) -> None:
    """Add what a cache of each size could have found, had it known the future.

    ``progress`` is called twice per size, with the number of requests.

    Cost: twice per size O(n log n) in all blocks of all requests.
    """
    trace, ceiling = simulation.trace, simulation.unbounded.hit_ratio
    paths, tokens = list(each_path(trace)), max(1, trace.total_input_tokens)
    for name, bypass in (("Belady", False), ("Belady, bypass", True)):
        ratios = []
        for size in simulation.capacities:
            hits = belady_hits(paths, size, bypass)
            # If a trace has the blocks of answers, they are among the hits.
            ratios.append(min(hits * trace.block_tokens / tokens, ceiling))
            if progress is not None:
                progress(len(trace))
        simulation.bounds[name] = ratios


def add_disk(
    simulation: Simulation, disk: DiskModel, progress: Callable[[int], None] | None = None
) -> None:
    """Add what a disk behind each cache would have found, under the usual policy or the first."""
    known = [name for name in get_args(PolicyName) if name in simulation.results]
    policy = USUAL_POLICY if USUAL_POLICY in known else known[0]
    trace, kv, simulation.disk = simulation.trace, simulation.kv, disk
    simulation.tiered = [
        replay_serially(trace, _pools(trace, n, kv), policy, progress, disk)
        for n in simulation.capacities
    ]


def usual_capacities(trace: BlockTrace) -> tuple[int, ...]:
    """Return useful sizes: 1, 2, 5, 10, ... and the least that never evicts.

    The smallest is about a two-hundredth of the distinct blocks.
    """
    smallest, largest = max(1, trace.num_distinct // 200), max(1, trace.num_distinct)
    powers = (10**power for power in range(len(str(largest))))
    sizes = [lead * power for power in powers for lead in _LEADING]
    return (*(size for size in sizes if smallest <= size < largest), largest)


def simulate(
    trace: BlockTrace,
    capacities: Sequence[int],
    policies: Sequence[PolicyName] = get_args(PolicyName),
    progress: Callable[[int], None] | None = None,
    kv: KVGroups | None = None,
) -> Simulation:
    """Replay a trace on caches of every size under every policy.

    Args:
        trace: The traffic.
        capacities: Sizes in blocks of the trace.
        policies: Policies to compare.
        progress: Called with numbers of requests that were served, in total the trace's per cache.
        kv: KV of the model, for the sizes of its windows. If it keeps states, placements of
            checkpoints are compared instead of policies, each with the best of ``SHARES``.

    Cost: one serial replay per size and policy, or placement and share, and one more.
    """
    sizes = tuple(sorted(set(capacities)))
    unbounded = replay_serially(trace, trace.num_distinct + 1, "lru", progress)
    results: dict[str, list[SerialResult]]
    if kv is not None and kv.state_bytes:
        results = {
            name: [_replay_states(trace, n, kv, placement, progress) for n in sizes]
            for name, placement in PLACEMENTS.items()
        }
    else:
        results = {
            policy: [replay_serially(trace, _pools(trace, n, kv), policy, progress) for n in sizes]
            for policy in policies
        }
    return Simulation(trace, sizes, results, unbounded, kv)


def _pools(trace: BlockTrace, num_blocks: int, kv: KVGroups | None) -> Pools:
    """Return a cache with ``num_blocks`` for full attention, its windows sized as engines do."""
    if kv is None or not kv.windows:
        return Pools(num_blocks)
    size = trace.block_tokens
    windows = kv.pools(kv.memory_for(num_blocks, size), size).windows
    return Pools(num_blocks, windows)


def num_replays(num_sizes: int, num_policies: int, kv: KVGroups | None) -> int:
    """Return how many serial replays a simulation takes."""
    has_states = kv is not None and kv.state_bytes > 0
    return num_sizes * (len(PLACEMENTS) * len(SHARES) if has_states else num_policies) + 1


def _replay_states(
    trace: BlockTrace,
    num_blocks: int,
    kv: KVGroups,
    placement: CheckpointPlacement,
    progress: Callable[[int], None] | None,
) -> SerialResult:
    """Serve a trace with the memory of ``num_blocks`` blocks shared between blocks and states.

    A share that has no room for a block or for two states finds nothing.
    """
    memory, block = kv.memory_for(num_blocks, trace.block_tokens), kv.token_bytes
    results: list[SerialResult] = []
    for share in SHARES:
        slots = int(memory * share) // kv.state_bytes
        full = (memory - slots * kv.state_bytes) // (block * trace.block_tokens)
        # The slot of the one running sequence comes on top, as does its partial block.
        states = StateConfig(max(2, slots + 1), 1, placement=placement)
        pools = Pools(max(1, full), states=states)
        results.append(replay_serially(trace, pools, USUAL_POLICY, progress))
    return max(results, key=lambda result: result.hit_ratio)


def belady_hits(paths: Sequence[Sequence[int]], num_blocks: int, bypass: bool = False) -> int:
    """Return how many blocks hit when requests come one by one.

    Args:
        paths: Block ids of each request, in token order; a block has one parent wherever it is.
        num_blocks: Blocks that fit; longer requests are cut to it.
        bypass: Whether a block need not be inserted.

    Cost: O(n log n) in all blocks of all requests.
    """
    next_uses = _next_uses(paths)
    end = 0
    next_use: dict[int, int] = {}  # of what is cached
    heap: list[tuple[int, int, int]] = []
    hits = 0
    for whole in paths:
        begin, end = end, end + len(whole)
        path = whole[:num_blocks]
        uses = next_uses[begin:end].tolist()
        num_hits = next((i for i, block in enumerate(path) if block not in next_use), len(path))
        hits += num_hits
        running = set(path)
        if not bypass:
            num_missing = len(path) - num_hits
            _evict(heap, next_use, running, len(next_use) + num_missing - num_blocks)
        for depth, block in enumerate(path):
            next_use[block] = uses[depth]
            heapq.heappush(heap, (-next_use[block], -depth, block))
        if bypass:
            _evict(heap, next_use, set(), len(next_use) - num_blocks)
    return hits


def _evict(
    heap: list[tuple[int, int, int]], next_use: dict[int, int], running: set[int], num_blocks: int
) -> None:
    """Evict what is wanted last, and of equals the deepest; not what is running."""
    spared = []
    while num_blocks > 0 and heap:
        entry = heapq.heappop(heap)
        block = entry[2]
        if next_use.get(block) != -entry[0]:
            continue  # it is gone, or wanted at another time
        if block in running:
            spared.append(entry)
            continue
        del next_use[block]
        num_blocks -= 1
    for entry in spared:
        heapq.heappush(heap, entry)


def _next_uses(paths: Sequence[Sequence[int]]) -> npt.NDArray[np.int64]:
    """Return, for every block of every request, the number of the next request that wants it."""
    request = np.repeat(np.arange(len(paths)), [len(path) for path in paths])
    ids = np.concatenate([np.asarray(path, np.int64) for path in paths])
    order = np.argsort(ids, kind="stable")  # by block, and of one block by request
    ids, later = ids[order], request[order]
    uses = np.full(len(order), _NEVER, np.int64)
    again = np.flatnonzero(ids[1:] == ids[:-1])
    uses[order[again]] = later[again + 1]
    return uses
