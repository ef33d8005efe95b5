"""One window of sampled traffic, and the simulations that replay it.

::

    request ─► sampler ─► backlog ─► simulations ─► estimators
               on release           in idle time, or now and then when 64 wait

Simulations begin empty. So does the cache at the first window; in later ones, the first half of
the sample only warms them up.
"""

from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from ostinato.ghost.estimator import Coverage, PairedEstimator
from ostinato.ghost.sampler import BlockSampler, SampledRequest
from ostinato.ghost.simulated_cache import SimulatedCache
from ostinato.observe.counters import LookupCounts
from ostinato.settings import PrefixCacheConfig

WINDOW_BLOCKS = 4096
"""Sampled blocks of one window."""

_MIN_BLOCKS = 64
"""Minimum size of a simulation; a smaller one says little about a large cache."""


@dataclass(frozen=True, slots=True)
class SamplingPlan:
    """Which blocks are sampled, and how large simulations are.

    Attributes:
        size: Blocks of the simulation that stands for the cache itself.
        stride: Blocks of the traffic per sampled block.
        step: Blocks per candidate: every ``step``-th block of a prompt may be sampled.
    """

    size: int
    stride: float
    step: int

    @staticmethod
    def of(config: PrefixCacheConfig, counts: LookupCounts) -> "SamplingPlan":
        """Derive the rate from the pool and the mean length of requests so far.

        A request of mean length has at most one sampled block: a second one would tell less than
        the first one of another request. But a simulation has 64 blocks at least, if the pool has.
        """
        mean_blocks = counts.query_tokens / max(1, counts.num_requests) / config.block_size
        pool, max_blocks = config.num_blocks, config.num_ghost_blocks
        size = max(1, min(pool, max_blocks, max(_MIN_BLOCKS, int(pool / max(1.0, mean_blocks)))))
        return SamplingPlan(size, pool / size, max(1, int(mean_blocks / 2)))


class SamplingWindow:
    """One window of sampled traffic.

    Attributes:
        sampler: Chooses blocks.
        backlog: Sampled requests that are not replayed yet, each with the traffic before it.
    """

    def __init__(
        self,
        sampler: BlockSampler,
        own: SimulatedCache,
        others: Sequence[tuple[SimulatedCache, PairedEstimator]],
        *,
        is_cold: bool,
    ) -> None:
        """Begin with empty simulations.

        Args:
            sampler: Chooses blocks.
            own: The simulation of the cache itself.
            others: Simulations of other pools, and their estimators.
            is_cold: Whether the cache is empty as well, so that no warm-up is needed.
        """
        self.sampler, self._own, self._others = sampler, own, others
        self.backlog: deque[tuple[SampledRequest, Coverage]] = deque()
        self._uses: dict[int, int] = {}  # by name, in order of last use
        self._num_replayed, self._is_counting = 0, False
        if is_cold:
            self._begin_counting(Coverage())

    def add(self, request: SampledRequest, at: Coverage) -> None:
        """Queue a request for replay."""
        self.backlog.append((request, at))

    def replay(self) -> int:
        """Replay the oldest request of the backlog in all simulations; returns its blocks."""
        request, at = self.backlog.popleft()
        request = self._count_uses(request)
        requested, own = request.names[: request.num_requested], self._own.serve(request)
        for simulation, estimator in self._others:
            simulated = simulation.serve(request)
            if self._is_counting:
                estimator.add(requested, own, simulated)
                estimator.reached = at
        self._num_replayed += len(request.names)
        if not self._is_counting and self._num_replayed >= WINDOW_BLOCKS // 2:
            self._begin_counting(at)
        return len(request.names)

    def _count_uses(self, request: SampledRequest) -> SampledRequest:
        """Add to a request how often each of its blocks was used so far."""
        uses = self._uses
        for name in request.names:
            uses[name] = uses.pop(name, 0) + 1
        counted = array("I", [uses[name] for name in request.names])
        while len(uses) > WINDOW_BLOCKS:
            del uses[next(iter(uses))]
        return request._replace(uses=counted)

    def reach(self, at: Coverage) -> None:
        """Note the traffic so far, also if none of its blocks was sampled."""
        if self._is_counting and not self.backlog:
            for _, estimator in self._others:
                estimator.reached = at

    def _begin_counting(self, at: Coverage) -> None:
        self._is_counting = True
        for _, estimator in self._others:
            estimator.begin(at)
