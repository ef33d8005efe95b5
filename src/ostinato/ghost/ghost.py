"""Estimates the hit rates of other pool sizes, and of LRU beside a policy that learns.

A fixed share of all blocks is sampled, in windows, and replayed by small simulated caches::

    window 1                     pause                                          window 2
    |-- 4,096 sampled blocks ----|............................................|------------

Nothing is timed: the sampled blocks of a window cost about as much as 1,300 requests of the cache,
so there is one window in ``1,300 / ghost_share`` requests. The first one begins after 16 requests,
so that there are estimates early. Between windows, a request costs a counter.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ostinato.cache.block_table import BlockTable
from ostinato.cache.eviction import EvictionPolicy
from ostinato.cache.observer import CacheObserver
from ostinato.core.request import IDLE_WORK, RequestContext
from ostinato.eviction.reuse_hazard import ReuseHazard
from ostinato.ghost.estimator import LEARNED, PLAYED, Coverage, PairedEstimator
from ostinato.ghost.sampler import BlockSampler, SampledRequest
from ostinato.ghost.sampling_window import WINDOW_BLOCKS, SamplingPlan, SamplingWindow
from ostinato.ghost.simulated_cache import (
    LearnedPolicySimulation,
    LruSimulation,
    SimulatedCache,
)
from ostinato.observe.counters import GhostEstimate, LookupCounts
from ostinato.settings import PolicyName, PrefixCacheConfig

SIZES = (0.5, 2.0, 4.0)
"""Multiples of the memory for which estimates are made."""

WINDOW_COST = 1300
"""Requests of the cache that take as long as one window, as ``docs/eviction.md`` has it."""

MAX_INTERVAL = 0.2
"""Maximum width of an interval that is reported."""

COUNTED_ERROR = 0.002
"""Error of the count of LRU's hits if several requests run at once."""

_FIRST = 16
"""Requests whose mean length sets the sampling rate."""

_BACKLOG, _SPREAD = 64, 16
"""Sampled requests that wait for idle time; if there are more, one request in sixteen replays one.

The spread is for a share of 1 %, whose periods are long enough for it. If every request replayed
one, it would take the cache 75 % longer during the first window.
"""

_IDLE_REFUND = 0.75
"""Share of a sampled block's cost that is its replay, which costs nothing in idle time."""


@dataclass(frozen=True, slots=True)
class CandidatePool:
    """A pool that might be configured instead: a multiple of the memory, and a policy."""

    memory: float
    policy: PolicyName


class Ghost(CacheObserver):
    """Estimates for other sizes, and for LRU.

    Attributes:
        is_sampling: Whether blocks of new requests are sampled.
        seed: Seed of the samples, to compare several.
    """

    def __init__(
        self,
        config: PrefixCacheConfig,
        clock: Callable[[], float],
        counts: LookupCounts,
        policies: Sequence[EvictionPolicy],
    ) -> None:
        """Begin with the sixteenth request.

        Args:
            config: Settings of the cache.
            clock: Clock of the cache.
            counts: Lookups and hits of the cache.
            policies: Policies of the cache; learned ones know what LRU would have found.
        """
        self.seed, self.is_sampling = 0, False
        self._config, self._clock, self._counts = config, clock, counts
        self._learned = [policy for policy in policies if isinstance(policy, ReuseHazard)]
        self._plan: SamplingPlan | None = None
        self._estimators: dict[CandidatePool, PairedEstimator] = {}
        self._num_seen, self._due, self._next_period = 0, _FIRST, 0
        self._blocks_left, self._num_windows = 0.0, 0
        self._window: SamplingWindow | None = None
        self._spread = max(1, min(_SPREAD, int(0.01 * _SPREAD / config.ghost_share)))
        self._watched: dict[int, int] = {}  # prompt tokens of running requests, by table

    def on_admit(self, table: BlockTable, context: RequestContext) -> None:
        """Note that a request begins."""
        if context.is_readmission or context.name.startswith(IDLE_WORK):
            return
        self._num_seen += 1
        if self._num_seen >= self._due:
            self._begin()
        if self.is_sampling and table.writes:
            self._watched[table.table_id] = len(table.key.tokens)
        window = self._window
        if (
            window is not None
            and len(window.backlog) >= _BACKLOG
            and not self._num_seen % self._spread
        ):
            window.replay()
            self._close()

    def on_release(
        self, table: BlockTable, num_tokens: int, num_findable: int, sealed: bool
    ) -> None:
        """Sample a request that ends with ``num_tokens`` computed tokens."""
        if not self._watched:
            return
        num_matchable, window = self._watched.pop(table.table_id, None), self._window
        if num_matchable is None or window is None or not self.is_sampling:
            return
        chosen = window.sampler.choose(table.key, num_tokens)
        if chosen:
            names = window.sampler.names(table.key, chosen)
            size, summary = self._config.block_size, table.summary
            last = (
                (num_matchable - 1) // size * size
            )  # start of the block that cannot hit as a whole
            num_requested = bisect_left(chosen, (last, 0))
            request_class = self._learned[0].request_class(summary) if self._learned else 0
            request = SampledRequest(
                names, num_requested, self._clock(), summary.num_output_tokens, request_class
            )
            window.add(request, Coverage.of(self._counts))
            self._blocks_left -= len(names)
            if self._blocks_left <= 0:
                self.is_sampling = False
                self._watched.clear()
                self._close()

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

    def erase(self, tenant: bytes) -> int:
        """Drop what was sampled, of any tenant."""
        self.on_clear(everything=False)
        return 0

    def on_clear(self, everything: bool) -> None:
        """Drop what was sampled; estimates stay, since they name no request."""
        self._window, self.is_sampling = None, False
        self._watched.clear()
        enough = self._blocks_left >= WINDOW_BLOCKS // 2
        self._due = self._num_seen + 1 if enough else self._next_period

    def estimates(self) -> tuple[GhostEstimate, ...]:
        """Return the estimates that are known to within ten points."""
        if self.is_sampling and self._window is not None:
            self._window.reach(Coverage.of(self._counts))
        estimates = [self._estimate(*pair) for pair in self._estimators.items()]
        return tuple(estimate for estimate in estimates if 2 * estimate.error <= MAX_INTERVAL)

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
        sampler = BlockSampler(self._config.block_size, self._plan.stride, self._plan.step, number)
        own, others = self._simulations(self._plan)
        self._window = SamplingWindow(sampler, own, others, is_cold=not self._num_windows)
        self._num_windows += 1
        self.is_sampling = True

    def _close(self) -> None:
        """Drop the simulations when all of a window is replayed."""
        if not self.is_sampling and self._window is not None and not self._window.backlog:
            self._window = None

    def _simulations(
        self, plan: SamplingPlan
    ) -> tuple[SimulatedCache, list[tuple[SimulatedCache, PairedEstimator]]]:
        """Create the simulation of the cache itself, and those of all candidates."""
        own = self._config.eviction_policy
        candidates = [CandidatePool(memory, own) for memory in SIZES]
        if self._learned:
            candidates.append(CandidatePool(1.0, "lru"))
        others = [
            (self._simulation(each, plan), self._estimator(each, plan)) for each in candidates
        ]
        return self._simulation(CandidatePool(1.0, own), plan), others

    def _estimator(self, candidate: CandidatePool, plan: SamplingPlan) -> PairedEstimator:
        """Return a candidate's estimator over all windows."""
        unsure = PLAYED if candidate.policy == "lru" else LEARNED
        size = max(1, int(min(1.0, candidate.memory) * plan.size))
        new = PairedEstimator(plan.stride, size, unsure)
        return self._estimators.setdefault(candidate, new)

    def _simulation(self, candidate: CandidatePool, plan: SamplingPlan) -> SimulatedCache:
        """Create the simulation of a candidate."""
        size = max(1, round(candidate.memory * plan.size))
        if candidate.policy == "lru":
            return LruSimulation(size)
        return LearnedPolicySimulation(size, self._learned[0])

    def _estimate(self, candidate: CandidatePool, estimator: PairedEstimator) -> GhostEstimate:
        """Return a candidate's estimate."""
        config, counts = self._config, self._counts
        if self._learned and candidate.policy == "lru":
            return self._counted_lru()
        ratio, error = estimator.estimate(counts, config.block_size, config.num_blocks)
        if self._learned:
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

    def _counted_lru(self) -> GhostEstimate:
        """Estimate LRU's hits from the counts of learning policies.

        It is exact if requests run one by one, else to a few blocks.
        """
        config, counts = self._config, self._counts
        lead = sum(policy.lru_lead for policy in self._learned) * config.block_size
        return GhostEstimate(
            config.num_blocks,
            "lru",
            max(0, counts.hit_tokens - lead) / max(1, counts.query_tokens),
            counts.query_tokens // config.block_size,
            error=COUNTED_ERROR,
            num_requests=counts.num_requests,
        )

    def _restraint(self) -> float:
        """Return how much less the real policy finds than its simulation, as a hit ratio.

        The real one is limited by its budget against LRU, and a simulation is not. At another size,
        the limit may cost as much or nothing.
        """
        config, simulated = self._config, self._estimators[CandidatePool(1.0, "lru")]
        ratio, _ = simulated.estimate(self._counts, config.block_size, config.num_blocks)
        return self._counted_lru().hit_ratio - ratio
