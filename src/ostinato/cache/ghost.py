"""Estimates what other pool sizes and other eviction policies would find of the traffic.

A fixed share of all blocks is sampled, in windows, and replayed by small simulated caches::

    window 1                     pause                                          window 2
    |-- 4,096 sampled blocks ----|............................................|------------
    request ─► sampler ─► backlog ─► simulations ─► estimators ─► estimates
               on release           in idle time, or one for one when 64 wait

Nothing is timed: a window has so many sampled blocks, which cost about as much as 1,300 requests
of the cache, and there is one of them in ``1,300 / ghost_share`` requests. The first one begins
after 16 requests, so estimates come early and cost most then. Between windows a request costs a
counter.

Simulations begin empty. So does the cache at the first window; in later ones, the first half of
the sample only warms them up.
"""

from array import array
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ostinato.cache.accounts import Accounts
from ostinato.cache.block_table import BlockTable
from ostinato.cache.estimator import (
    LEARNED_SCALE_ERROR,
    LEARNING_SCALE_ERROR,
    SCALE_ERROR,
    Coverage,
    LruBaseline,
    PairedEstimator,
)
from ostinato.cache.policies.contract import LearnedPolicy
from ostinato.cache.sampler import SampledRequest, Sampler
from ostinato.cache.simulated_cache import (
    LearnedPolicySimulation,
    LruSimulation,
    PolicySimulation,
    SimulatedCache,
)
from ostinato.cache.stats import GhostEstimate, LookupCounts
from ostinato.core.config import CacheConfig, PolicyName

SIZES = (0.5, 2.0, 4.0)
"""Multiples of the memory for which estimates are made."""

ALTERNATIVES: tuple[PolicyName, ...] = ("lru", "reuse_hazard")
"""Policies for which estimates are made at the cache's own size."""

WINDOW_BLOCKS = 4096
"""Sampled blocks of one window."""

WINDOW_COST = 1300
"""Requests of the cache that take as long as one window, by ``benchmarks/ghost.py``."""

MAX_INTERVAL = 0.2
"""An interval that is wider says nothing yet."""

COUNTED_ERROR = 0.002
"""By how much an account against LRU may be wrong where requests run at once."""

_FIRST = 16
"""Requests by whose length the sampling rate is set."""

_LEAST_BLOCKS = 64
"""A simulation of fewer blocks says little of a large cache."""

_BACKLOG = 64
"""Sampled requests that wait to be replayed at most."""

_IDLE_REFUND = 0.75
"""Share of a sampled block's cost that is its replay, which costs nothing in idle time."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A pool that might be configured instead: a multiple of the memory, and a policy."""

    memory: float
    policy: PolicyName


@dataclass(frozen=True, slots=True)
class SamplingPlan:
    """Which blocks are sampled, and how large simulations are.

    Attributes:
        size: Blocks of the simulation that stands for the cache itself.
        stride: Blocks of the traffic that one sampled block stands for.
        step: Blocks of which one is asked whether it is chosen.
    """

    size: int
    stride: float
    step: int

    @staticmethod
    def of(config: CacheConfig, counts: LookupCounts) -> "SamplingPlan":
        """Set the rate by the pool and by what was looked up so far.

        A request of mean length has one sampled block at most: a second one tells less than
        the first one of another request. No simulation has fewer than 32 blocks for that, where
        the pool has as many.
        """
        mean_blocks = counts.query_tokens / max(1, counts.num_requests) / config.block_size
        pool, most = config.num_blocks, config.num_ghost_blocks
        size = max(1, min(pool, most, max(_LEAST_BLOCKS, int(pool / max(1.0, mean_blocks)))))
        return SamplingPlan(size, pool / size, max(1, int(mean_blocks / 2)))


class Ghost:
    """Estimates for other sizes and policies.

    Attributes:
        is_sampling: Whether blocks of requests that come now are sampled.
        seed: Of the samples; to see how far they differ.
    """

    def __init__(
        self,
        config: CacheConfig,
        clock: Callable[[], float],
        counts: LookupCounts,
        accounts: Accounts,
    ) -> None:
        """Begin with the sixteenth request.

        Args:
            config: Of the cache.
            clock: The cache's.
            counts: What the cache has found.
            accounts: Whose policies may know what LRU would have found.
        """
        self.seed, self.is_sampling = 0, False
        self._config, self._clock, self._counts = config, clock, counts
        policies = [account.policy for account in accounts]
        learned = [policy for policy in policies if isinstance(policy, LearnedPolicy)]
        self._learned = learned[0] if learned else None
        self._lru = LruBaseline(counts, learned, config.block_size)
        self._plan: SamplingPlan | None = None
        self._estimators: dict[Candidate, PairedEstimator] = {}
        self._num_seen, self._due, self._next_period = 0, _FIRST, 0
        self._blocks_left, self._num_windows = 0.0, 0
        self._window: _Window | None = None
        self._watched: dict[int, int] = {}  # prompt tokens of running requests, by table

    def on_admit(self, table: BlockTable, num_tokens: int) -> None:
        """Note that a request begins, with a prompt of so many tokens."""
        self._num_seen += 1
        if self._num_seen >= self._due:
            self._begin()
        if self.is_sampling and table.writes:
            self._watched[id(table)] = num_tokens

    def on_release(self, table: BlockTable, num_tokens: int) -> None:
        """Sample a request that ends, of which so many tokens are computed."""
        if not self._watched:
            return
        num_asked, window = self._watched.pop(id(table), None), self._window
        if num_asked is None or window is None or not self.is_sampling:
            return
        chosen = window.sampler.choose(table.key, num_tokens)
        if chosen:
            names = window.sampler.names(table.key, chosen)
            size, turn = self._config.block_size, table.turn
            last = (num_asked - 1) // size * size  # where the block begins that can not hit whole
            asked = sum(start < last for start, _ in chosen)
            kinds = 0 if self._learned is None else self._learned.request_class(turn)
            request = SampledRequest(names, asked, self._clock(), turn.num_output_tokens, kinds)
            window.add(request, Coverage.of(self._counts))
            self._blocks_left -= len(names)
            if self._blocks_left <= 0:
                self._end_sampling()

    def rest(self) -> bool:
        """Replay a sampled request in idle time; returns whether there are more."""
        window = self._window
        if window is None or not window.backlog:
            return False
        self._blocks_left += _IDLE_REFUND * window.replay()
        self._close()
        return bool(window.backlog)

    def catch_up(self) -> None:
        """Replay all that was sampled."""
        while self.rest():
            pass

    def clear(self) -> None:
        """Drop what was sampled; estimates stay, which say nothing of single requests."""
        self._window, self.is_sampling = None, False
        self._watched.clear()
        enough = self._blocks_left >= WINDOW_BLOCKS // 2
        self._due = self._num_seen + 1 if enough else self._next_period

    def estimates(self) -> tuple[GhostEstimate, ...]:
        """Return what others would have found, as far as it is known to ten points either way."""
        if self.is_sampling and self._window is not None:
            self._window.reach(Coverage.of(self._counts))
        found = [self._estimate(*pair) for pair in self._estimators.items()]
        return tuple(estimate for estimate in found if 2 * estimate.error <= MAX_INTERVAL)

    def _begin(self) -> None:
        """Begin another window, if this period has blocks left for one."""
        if self._num_seen >= self._next_period:
            self._blocks_left = WINDOW_BLOCKS
            self._next_period = self._num_seen + int(WINDOW_COST / self._config.ghost_share)
        self._due = self._next_period
        if self.is_sampling:
            return
        if self._plan is None:
            self._plan = SamplingPlan.of(self._config, self._counts)
        number = self._num_windows + (self.seed << 16)
        sampler = Sampler(self._config.block_size, self._plan.stride, self._plan.step, number)
        self._window = _Window(sampler, self._pairs(self._plan), is_cold=not self._num_windows)
        self._num_windows += 1
        self.is_sampling = True

    def _end_sampling(self) -> None:
        """Replay what waits, in idle time, and sample no more."""
        self.is_sampling = False
        self._watched.clear()
        self._close()

    def _close(self) -> None:
        """Drop the simulations when all of a window is replayed."""
        if not self.is_sampling and self._window is not None and not self._window.backlog:
            self._window = None

    def _pairs(self, plan: SamplingPlan) -> "list[_Pair]":
        """Make the simulations: each candidate beside one of what is counted."""
        own = self._config.policy
        beside_own = self._simulation(Candidate(1.0, own), plan)
        pairs = [self._pair(Candidate(memory, own), beside_own, plan) for memory in SIZES]
        others = [Candidate(1.0, name) for name in ALTERNATIVES if name != own]
        return [*pairs, *(self._pair(candidate, beside_own, plan) for candidate in others)]

    def _pair(self, candidate: Candidate, beside: SimulatedCache, plan: SamplingPlan) -> "_Pair":
        """Set a candidate's simulation beside another one."""
        estimator = self._estimators.get(candidate)
        if estimator is None:
            scale_error = SCALE_ERROR
            if candidate.policy == "reuse_hazard":
                scale_error = LEARNED_SCALE_ERROR if self._learned else LEARNING_SCALE_ERROR
            size = max(1, int(min(1.0, candidate.memory) * plan.size))
            estimator = PairedEstimator(plan.stride, size, scale_error)
            self._estimators[candidate] = estimator
        return _Pair(self._simulation(candidate, plan), beside, estimator)

    def _simulation(self, candidate: Candidate, plan: SamplingPlan) -> SimulatedCache:
        """Make the small cache that stands for a candidate."""
        size = max(1, round(candidate.memory * plan.size))
        if candidate.policy == "lru":
            return LruSimulation(size)
        if candidate.policy == self._config.policy and self._learned is not None:
            return LearnedPolicySimulation(size, self._learned)
        return PolicySimulation(size, candidate.policy)

    def _estimate(self, candidate: Candidate, estimator: PairedEstimator) -> GhostEstimate:
        """Say what is known of a candidate, and from how much traffic."""
        config, counts = self._config, self._counts
        if self._learned is not None and candidate.policy == "lru":
            return self._counted_lru()
        ratio, error = estimator.estimate(counts, config.block_size, config.num_blocks)
        if self._learned is not None:
            restraint = self._restraint()
            ratio, error = ratio + restraint / 2, error + abs(restraint) / 2
        return GhostEstimate(
            int(candidate.memory * config.num_blocks),
            candidate.policy,
            ratio,
            estimator.num_blocks,
            candidate.memory,
            error,
            estimator.covered.requests,
            max(0, counts.num_requests - estimator.reached.requests),
        )

    def _restraint(self) -> float:
        """Return how much less the real policy finds than its simulation, as a hit ratio.

        It is held back by its account against LRU, and a simulation is not. Another size may be
        held back by as much or not at all.
        """
        config, simulated_lru = self._config, self._estimators[Candidate(1.0, "lru")]
        ratio, _ = simulated_lru.estimate(self._counts, config.block_size, config.num_blocks)
        return self._lru.hit_ratio - ratio

    def _counted_lru(self) -> GhostEstimate:
        """Say what LRU would have found, as the policy has counted."""
        lru, config = self._lru, self._config
        return GhostEstimate(
            config.num_blocks,
            "lru",
            lru.hit_ratio,
            lru.query_tokens // config.block_size,
            error=COUNTED_ERROR,
            num_requests=lru.num_requests,
        )


@dataclass(frozen=True, slots=True)
class _Pair:
    """A candidate's simulation, the one that it is compared with, and what came of it."""

    simulation: SimulatedCache
    beside: SimulatedCache
    estimator: PairedEstimator


class _Window:
    """One stretch of traffic of which blocks are sampled.

    Attributes:
        sampler: Chooses blocks.
        backlog: Sampled requests that are not replayed, and how far the traffic had come.
    """

    def __init__(self, sampler: Sampler, pairs: Sequence[_Pair], *, is_cold: bool) -> None:
        """Begin; where the cache is cold as well, pairs are compared from the first request on."""
        self.sampler, self._pairs = sampler, pairs
        self.backlog: deque[tuple[SampledRequest, Coverage]] = deque()
        self._uses: dict[int, int] = {}  # by name
        self._num_replayed, self._is_counting = 0, False
        if is_cold:
            self._begin_counting(Coverage())

    def add(self, request: SampledRequest, at: Coverage) -> None:
        """Let a request wait to be replayed, or replay it when too many do."""
        uses = self._uses
        for name in request.names:
            uses[name] = uses.get(name, 0) + 1
        counted = array("I", [uses[name] for name in request.names])
        self.backlog.append((request._replace(uses=counted), at))
        if len(self.backlog) > _BACKLOG:
            self.replay()

    def replay(self) -> int:
        """Serve all simulations the request that has waited longest; return its blocks."""
        request, at = self.backlog.popleft()
        asked = request.names[: request.num_asked]
        beside = {id(pair.beside): pair.beside for pair in self._pairs}
        own = {key: simulation.serve(request) for key, simulation in beside.items()}
        for pair in self._pairs:
            found = pair.simulation.serve(request)
            if self._is_counting:
                pair.estimator.add(asked, own[id(pair.beside)], found)
                pair.estimator.reached = at
        self._num_replayed += len(request.names)
        if not self._is_counting and self._num_replayed >= WINDOW_BLOCKS // 2:
            self._begin_counting(at)
        return len(request.names)

    def reach(self, at: Coverage) -> None:
        """Note how far the traffic has come, also where nothing of it was chosen."""
        if self._is_counting and not self.backlog:
            for pair in self._pairs:
                pair.estimator.reached = at

    def _begin_counting(self, at: Coverage) -> None:
        self._is_counting = True
        for pair in self._pairs:
            pair.estimator.begin(at)
