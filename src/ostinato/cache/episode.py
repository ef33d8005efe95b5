"""How much of the traffic is sampled at once, and who finds what in it?

An episode is a stretch of traffic of which a sample is watched. Likenesses of the cache that are
as much smaller as the sample is than the traffic are served the same turns::

    request ──► chosen blocks ──► stack of LRU             at once: all sizes, in microseconds
                        └──► one in four ──► log ──► small caches: other policies
                                                     as credit allows, by turns

Where the cache's own policy has an account against LRU, its sizes are LRU's, and what it finds
more: that is played by learned caches. Under any other policy sizes are played by small caches as
well, and there is no stack.
"""

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import get_args

from ostinato.cache.anchor import BESIDE_LRU, Counted, Watched
from ostinato.cache.likenesses import (
    ALL,
    LEAST_SAMPLED,
    MOST_LOGGED,
    SIZES,
    Baseline,
    LearnedSizes,
    Likeness,
    LruSizes,
    Player,
    Which,
)
from ostinato.cache.sample import Sampler, TrafficLog
from ostinato.cache.small_cache import SampledTurn
from ostinato.cache.tally import SoFar, Tally
from ostinato.core.config import CacheConfig, PolicyName

_LEAST_BLOCKS, _LEAST_LOGGED_BLOCKS = 32, 16
"""A stack and small caches of fewer blocks are no likeness of a large one."""

_SPARSER = 4
"""Small caches cost ten times as much as the stack, so they get a sample of the sample."""

_LOGGED_PER_REQUEST = 0.06
"""Sampled blocks of a request that small caches can be served, by what credit allows."""

_ASKED = 2
"""Blocks of a request of mean length that are asked whether they are chosen."""

_AT_ONCE = 8
"""Turns that a small cache is served before the clock is looked at."""


@dataclass(frozen=True, slots=True)
class EpisodePlan:
    """Sizes of an episode.

    Attributes:
        stride: Blocks of the traffic of which one is sampled.
        sparser: Blocks of the sample of which one is logged for small caches.
        step: Blocks of which one is asked.
    """

    stride: float
    sparser: float
    step: int

    @staticmethod
    def of(config: CacheConfig, counts: Counted) -> "EpisodePlan":
        """Plan an episode by what the cache has seen.

        A request of mean length has one sampled block at most: a second one tells less than
        the first one of another request. No likeness is too small for that.
        """
        mean_blocks = counts.query_tokens / max(1, counts.num_requests) / config.block_size
        most, num_blocks = config.num_ghost_blocks, config.num_blocks
        scarcest = max(1.0, num_blocks / min(most, _LEAST_BLOCKS))
        stride = min(scarcest, max(1.0, mean_blocks, num_blocks / most))
        scarcest = max(1.0, num_blocks / min(most, _LEAST_LOGGED_BLOCKS))
        logged = min(scarcest, max(_SPARSER * stride, mean_blocks / _LOGGED_PER_REQUEST))
        if config.policy not in BESIDE_LRU:  # all is played by small caches, and no stack is paid
            stride = logged = max(1.0, logged / 2)
        return EpisodePlan(stride, logged / stride, max(1, int(mean_blocks / _ASKED)))


Departure = tuple["array[int]", list[tuple[int, int]], int, int, float, int]
"""Of a request that has ended: names of its chosen blocks, where they begin, how many tokens were
looked up and how many generated, when that was by the cache's clock, and the class of what it let
go of."""


class Episode:
    """One stretch of traffic.

    Attributes:
        plan: Its sizes.
        sampler: Chooses blocks.
        num_sampled: Blocks that were chosen so far, each as often as it was in use.
    """

    def __init__(
        self,
        number: int,
        plan: EpisodePlan,
        watched: Watched,
        tally: Callable[[Which], Tally],
        seed: int = 0,
    ) -> None:
        """Begin; each number and seed has a sample of its own.

        Args:
            number: From 0 on; likenesses in episode 0 are compared from its begin on.
            plan: Its sizes.
            watched: What it is about.
            tally: Keeps what was found by a size and policy.
            seed: Of the sample.
        """
        config, is_cold = watched.config, number == 0
        self.plan, self.num_sampled = plan, 0
        self.sampler = Sampler(config.block_size, plan.stride, plan.step, number + (seed << 16))
        self._block_size, self._counts = config.block_size, watched.counts
        self._limit = self.sampler.limit_of(1 / plan.sparser)
        self._log = TrafficLog()
        self._sizes: LruSizes | None = None
        if config.policy in BESIDE_LRU:
            sizes = SIZES if config.policy == "lru" else (*SIZES, ALL)
            tallies = {memory: tally((memory, "lru")) for memory in sizes}
            small = max(1, round(config.num_blocks / plan.stride))
            self._sizes = LruSizes(small, plan.stride, tallies, is_cold=is_cold)
        self._players = self._cast(watched, tally, is_cold=is_cold)

    def _cast(
        self, watched: Watched, tally: Callable[[Which], Tally], *, is_cold: bool
    ) -> list[Likeness]:
        """Make those who are served the log."""
        own, unit, log = watched.config.policy, self.plan.stride * self.plan.sparser, self._log
        small = max(1, round(watched.config.num_blocks / unit))
        baseline = Baseline("lru" if self._sizes else own, small, log, is_cold=is_cold)
        players: list[Likeness] = [
            Player(which, small, unit, baseline, log, tally(which)) for which in _others(own)
        ]
        if watched.experience is not None:
            tallies = {memory: tally((memory, own)) for memory in sorted((*SIZES, 1.0))}
            known = watched.experience, log, tallies
            players.append(LearnedSizes(small, unit, *known, is_cold=is_cold))
        return players

    @property
    def is_played(self) -> bool:
        """Whether small caches have been served all that is logged so far."""
        return all(player.position == len(self._log) for player in self._players)

    @property
    def is_enough(self) -> bool:
        """Whether another episode would tell more than the rest of this one."""
        is_full = self._log.num_blocks >= MOST_LOGGED
        return is_full and self.is_played and self.num_sampled >= LEAST_SAMPLED

    def note(self, left: "Departure") -> None:
        """Take a request that has ended."""
        names, chosen, num_looked_up, num_outputs, at_s, kinds = left
        size, counts = self._block_size, self._counts
        last = (num_looked_up - 1) // size * size
        num_asked = len(chosen)
        while num_asked and chosen[num_asked - 1][0] >= last:
            num_asked -= 1
        self.num_sampled += len(names)
        if self._sizes is not None:
            self._sizes.serve(names, num_asked, counts)
        limit, log = self._limit, self._log
        kept = [at for at, name in enumerate(names) if name < limit]
        if kept and log.num_blocks < MOST_LOGGED:
            places = array("I", [chosen[at][0] // size for at in kept])
            names = array("I", [names[at] for at in kept])
            num_asked = sum(at < num_asked for at in kept)
            turn = SampledTurn(names, places, num_asked, at_s, num_outputs, kinds)
            log.add(turn, SoFar.of(counts))

    def seen(self) -> None:
        """Note how far the traffic has come, also where nothing of it was chosen."""
        if self._sizes is not None:
            self._sizes.seen(self._counts)

    def play(self, timer: Callable[[], float]) -> bool:
        """Serve a small cache some turns.

        The one that has taken the least time comes first, so that those that are dear do not
        keep others waiting; other sizes may take four times as much as other policies.

        Returns:
            Whether there was something to play.
        """
        end = len(self._log)
        behind = [player for player in self._players if player.position < end]
        if not behind:
            return False
        player = min(behind, key=lambda player: player.took_s / player.share)
        started = timer()
        player.serve(min(_AT_ONCE, end - player.position))
        player.took_s += timer() - started
        return True


def _others(own: PolicyName) -> Sequence[Which]:
    """List what small caches play: other policies, and sizes where no stack tells of them."""
    policies: tuple[PolicyName, ...] = get_args(PolicyName)
    if own in BESIDE_LRU:
        return [(1.0, policy) for policy in policies if policy not in (own, "lru")]
    others = [(1.0, policy) for policy in policies if policy != own]
    return [*((memory, own) for memory in SIZES), *others]
