"""How much of the traffic is sampled at once, and what comes of it?

An episode is a stretch of traffic: a sample of it is recorded, then replayed on small caches that
start empty. They are compared from the moment on at which the largest of them is full, or over the
last third of the episode if that comes first.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass

from ostinato.cache.block_table import BlockTable
from ostinato.cache.sample import Sampler, TrafficLog
from ostinato.cache.small_cache import LruStack, SmallCache
from ostinato.cache.stats import LookupCounts
from ostinato.core.config import CacheConfig, PolicyName

SIZES = (0.5, 2.0, 4.0)
"""Multiples of the memory for which estimates are made."""

FIRST_LOGGED, MOST_LOGGED = 1024, 8192
"""Sampled blocks of the first episode, each as often as it is in use; the next has twice as many,
up to the most: a rough estimate soon, and a good one later."""

_TURNOVERS = 6
"""Times that an episode should fill the small cache anew: the largest is four times as large."""

_LEAST_BLOCKS = 32
"""A small cache of fewer blocks is no likeness of a large one."""

_ASKED = 3
"""Blocks of a request of mean length that are asked whether they are chosen."""

Tell = Callable[[float, PolicyName, int, int], None]
"""Is told of a size, a policy, the hits that it had more than the cache's own, and of how many
blocks that were looked up."""


@dataclass(frozen=True, slots=True)
class EpisodePlan:
    """Sizes of an episode.

    Attributes:
        num_blocks: Blocks of the small cache that stands for the large one.
        most_logged: Sampled blocks after which it ends.
        stride: Blocks of the traffic of which one is sampled.
        step: Blocks of which one is asked.
        num_requests: Requests that it takes, as far as can be told.
    """

    num_blocks: int
    most_logged: int
    stride: float
    step: int
    num_requests: float

    @staticmethod
    def of(number: int, config: CacheConfig, counts: LookupCounts) -> "EpisodePlan":
        """Plan the episode of a number, from 0 on, by what the cache has seen.

        The small cache is as large as can be filled often enough: where little misses, little
        is new, and it takes long.
        """
        fresh = max(0.01, 1.0 - counts.hit_ratio)
        mean_blocks = counts.query_tokens / max(1, counts.num_requests) / config.block_size
        wanted = max(FIRST_LOGGED << min(number, 8), int(_TURNOVERS * _LEAST_BLOCKS / fresh))
        logged = min(wanted, MOST_LOGGED)
        small = min(max(_LEAST_BLOCKS, int(logged * fresh / _TURNOVERS)), config.num_ghost_blocks)
        stride = max(1.0, config.num_blocks / small)
        step = max(1, int(mean_blocks / _ASKED))
        return EpisodePlan(small, logged, stride, step, logged * stride / max(1.0, mean_blocks))


class Episode:
    """One stretch of traffic.

    Attributes:
        plan: Its sizes.
    """

    def __init__(
        self, number: int, plan: EpisodePlan, config: CacheConfig, clock: Callable[[], float]
    ) -> None:
        """Begin to record; each number has a sample of its own."""
        self.plan = plan
        self._config, self._clock = config, clock
        self._sampler = Sampler(config.block_size, plan.stride, plan.step, number)
        self._log = TrafficLog()

    @property
    def is_full(self) -> bool:
        """Whether enough is recorded."""
        return self._log.num_blocks >= self.plan.most_logged

    @property
    def tells_something(self) -> bool:
        """Whether what is recorded is more than the small cache holds."""
        return self._log.num_blocks > self.plan.num_blocks

    def note(self, table: BlockTable, num_tokens: int) -> None:
        """Record a request that ends, if a block of it is sampled.

        Args:
            table: Its tokens, how many of them were looked up, and how many were generated.
            num_tokens: How many of them are computed.
        """
        size = self._config.block_size
        places = self._sampler.choose(table.key, num_tokens // size)
        if places:
            names = self._sampler.names(table.key, places)
            num_asked = bisect_left(places, table.num_watched // size)
            outputs = table.turn.num_output_tokens
            self._log.add(names, places, num_asked, self._clock(), outputs)

    def replay(self, others: Sequence[PolicyName], tell: Tell) -> Generator[None, None, None]:
        """Replay for the sizes, then for other policies; yields after each turn.

        Args:
            others: Policies beside the cache's own and LRU.
            tell: Is told of each size and policy as soon as it is known.
        """
        own = self._config.policy
        by_size, first, num_asked = yield from self._replay_lru()
        if not num_asked:
            return
        same = by_size[1.0] if own == "lru" else (yield from self._replay_small(1.0, own, first))
        for memory in SIZES:
            hits = by_size[memory]
            if own != "lru":
                hits = yield from self._replay_small(memory, own, first)
            tell(memory, own, hits - same, num_asked)
        if own != "lru":
            tell(1.0, "lru", by_size[1.0] - same, num_asked)
        for policy in others:
            hits = yield from self._replay_small(1.0, policy, first)
            tell(1.0, policy, hits - same, num_asked)

    def _replay_lru(self) -> Generator[None, None, tuple[dict[float, int], int, int]]:
        """Replay LRU at every size.

        Returns:
            Hits by size, the turn from which on they count, and the blocks looked up since.
        """
        log, num_blocks = self._log, self.plan.num_blocks
        stack = LruStack(int(max(SIZES) * num_blocks))
        sizes = {memory: max(1, int(memory * num_blocks)) for memory in (1.0, *SIZES)}
        hits, first, num_asked = dict.fromkeys(sizes, 0), 2 * len(log) // 3, 0
        for number in range(len(log)):
            turn = log.turn(number)
            found = stack.serve(turn)
            if number >= first:
                num_asked += turn.num_asked
                for memory, most in sizes.items():
                    hits[memory] += bisect_right(found, most)
            elif stack.is_full:
                first = number + 1
            yield
        return hits, first, num_asked

    def _replay_small(
        self, memory: float, policy: PolicyName, first: int
    ) -> Generator[None, None, int]:
        """Replay a policy at a size; returns its hits from a turn on."""
        cache, hits = SmallCache(max(1, int(memory * self.plan.num_blocks)), policy), 0
        for number in range(len(self._log)):
            found = cache.serve(self._log.turn(number))
            hits += found if number >= first else 0
            yield
        return hits
