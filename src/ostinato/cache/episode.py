"""How much of the traffic is sampled at once, and who finds what in it?

An episode is a stretch of traffic of which a sample is watched. Likenesses of the cache that are
as much smaller as the sample is than the traffic are served the same turns::

    request ──► chosen blocks ──► stack of LRU             at once: all sizes, in microseconds
                        └──► one in four ──► log ──► small caches: other policies
                                                     as credit allows, by turns

Where the cache's own policy is not LRU, sizes are played by small caches as well.

Likenesses start empty. So does the cache in the first episode; in later ones they count from the
moment on at which four times the size is filled, or from half of the log on.
"""

from array import array
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import get_args

from ostinato.cache.sample import Sampler, TrafficLog
from ostinato.cache.small_cache import LruStack, SampledTurn, SmallCache
from ostinato.cache.stats import LookupCounts
from ostinato.cache.tally import NUM_PARTS, SoFar, Tally
from ostinato.core.config import CacheConfig, PolicyName

SIZES = (0.5, 2.0, 4.0)
"""Multiples of the memory for which estimates are made."""

Which = tuple[float, PolicyName]
"""A multiple of the memory and a policy."""

LEAST_SAMPLED, MOST_LOGGED = 4096, 2048
"""Sampled blocks after which another episode may follow, each as often as it is in use; and the
most that are logged for small caches."""

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
    def of(config: CacheConfig, counts: LookupCounts) -> "EpisodePlan":
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
        if config.policy != "lru":  # all is played by small caches, and no stack is paid
            stride = logged = max(1.0, logged / 2)
        return EpisodePlan(stride, logged / stride, max(1, int(mean_blocks / _ASKED)))


Departure = tuple["array[int]", list[tuple[int, int]], int, int, float]
"""Of a request that has ended: names of its chosen blocks, where they begin, how many tokens were
looked up and how many generated, and when that was by the cache's clock."""


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
        config: CacheConfig,
        counts: LookupCounts,
        tally: Callable[[Which], Tally],
        seed: int = 0,
    ) -> None:
        """Begin; each number and seed has a sample of its own.

        Args:
            number: From 0 on; likenesses in episode 0 are compared from its begin on.
            plan: Its sizes.
            config: Of the cache.
            counts: What the cache has found.
            tally: Keeps what was found by a size and policy.
            seed: Of the sample.
        """
        self.plan, self.num_sampled = plan, 0
        self.sampler = Sampler(config.block_size, plan.stride, plan.step, number + (seed << 16))
        self._block_size, self._counts = config.block_size, counts
        self._limit = self.sampler.limit_of(1 / plan.sparser)
        self._log = TrafficLog()
        own, is_cold = config.policy, number == 0
        self._sizes: _Sizes | None = None
        if own == "lru":
            tallies = {memory: tally((memory, own)) for memory in SIZES}
            small = max(1, round(config.num_blocks / plan.stride))
            self._sizes = _Sizes(small, plan.stride, tallies, is_cold=is_cold)
        unit = plan.stride * plan.sparser
        small = max(1, round(config.num_blocks / unit))
        self._own = _Own(own, small, self._log, is_cold=is_cold)
        self._players = [
            _Player(which, small, unit, self._own, self._log, tally(which))
            for which in _others(own)
        ]

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
        names, chosen, num_looked_up, num_outputs, at_s = left
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
            turn = SampledTurn(names, places, num_asked, at_s, num_outputs)
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


class _Sizes:
    """LRU at every size, from one stack."""

    def __init__(
        self, num_blocks: int, unit: float, tallies: dict[float, Tally], *, is_cold: bool
    ) -> None:
        self._own = num_blocks
        self._unit = unit
        self._stack = LruStack(max(1, int(max(SIZES) * num_blocks)))
        self._rows = [
            (max(1, round(memory * num_blocks)), tally) for memory, tally in tallies.items()
        ]
        self._counts_from = 0 if is_cold else LEAST_SAMPLED // 2
        self._num_served, self._is_counting = 0, False

    def serve(self, names: "array[int]", num_asked: int, counts: LookupCounts) -> None:
        """Take a turn."""
        found = self._stack.serve(names, num_asked)
        self._num_served += len(names)
        if not self._is_counting:
            if self._num_served < self._counts_from and not self._stack.is_full:
                return
            self._is_counting = True
            for _, tally in self._rows:
                tally.begin(
                    SoFar.of(counts) if self._counts_from else SoFar(), self._own, self._unit
                )
        own, part = bisect_right(found, self._own), names[0] % NUM_PARTS
        for size, tally in self._rows:
            tally.add(part, num_asked, own, bisect_right(found, size), self._unit)

    def seen(self, counts: LookupCounts) -> None:
        """Note how far the traffic has come."""
        if self._is_counting:
            so_far = SoFar.of(counts)
            for _, tally in self._rows:
                tally.reach(so_far)


class _Own:
    """The cache's own policy at its own size; it is as far as the player that is furthest."""

    def __init__(
        self, policy: PolicyName, num_blocks: int, log: TrafficLog, *, is_cold: bool
    ) -> None:
        self._log, self._num_blocks = log, num_blocks
        self._likeness = LruStack(num_blocks) if policy == "lru" else SmallCache(num_blocks, policy)
        self._found = array("I")  # by turn
        self._num_missed = self._num_served = 0
        self.counts_from: int | None = 0 if is_cold else None

    def found(self, number: int, turn: SampledTurn) -> int:
        """Say what it found of a turn."""
        if number < len(self._found):
            return self._found[number]
        names = turn.names
        if isinstance(self._likeness, LruStack):
            hits = len(self._likeness.serve(names, turn.num_asked))
        else:
            hits = self._likeness.serve(turn)
        self._found.append(hits)
        self._num_served += len(names)
        self._num_missed += len(names) - hits
        enough = max(SIZES) * self._num_blocks
        if self.counts_from is None and (
            self._num_missed >= enough or self._num_served >= MOST_LOGGED // 2
        ):
            self.counts_from = number + 1
        return hits


class _Player:
    """Another policy or size.

    Attributes:
        position: Turns that it was served.
        took_s: What they took.
        share: What it may take, beside others.
    """

    def __init__(
        self,
        which: Which,
        num_blocks: int,
        unit: float,
        own: _Own,
        log: TrafficLog,
        tally: Tally,
    ) -> None:
        memory, policy = which
        self.position, self.took_s = 0, 0.0
        self.share = 1 if memory == 1.0 else 4
        self._size = max(1, round(memory * num_blocks))
        self._cache = SmallCache(self._size, policy)
        self._own, self._log, self._tally, self._unit = own, log, tally, unit

    def serve(self, num_turns: int) -> None:
        """Take the next turns from the log."""
        log, tally, unit = self._log, self._tally, self._unit
        first = self._own.counts_from
        for number in range(self.position, self.position + num_turns):
            turn = log.turn(number)
            own, other = self._own.found(number, turn), self._cache.serve(turn)
            first = self._own.counts_from
            if first is None or number < first:
                continue
            if number == first:
                tally.begin(log.so_far(number) if first else SoFar(), self._size, unit)
            tally.add(turn.names[0] % NUM_PARTS, turn.num_asked, own, other, unit)
        self.position += num_turns
        if first is not None and first < self.position:
            tally.reach(log.so_far(self.position - 1))


def _others(own: PolicyName) -> Sequence[Which]:
    """List what small caches play: other policies, and sizes of the cache's own if not LRU."""
    policies: tuple[PolicyName, ...] = get_args(PolicyName)
    others: list[Which] = [(1.0, policy) for policy in policies if policy != own]
    return others if own == "lru" else [*((memory, own) for memory in SIZES), *others]
