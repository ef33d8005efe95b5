"""What would more memory bring, or another policy, and what may it cost to know?

A ghost watches the traffic by episodes. It saves up, records a sample of what is served for a
while, and replays it on small caches with nothing behind them, a turn at a time::

    saving ──enough──► recording ──log full──► replaying ──► saving ..
    a counter          a few digests           the sizes, then one other policy
    per request        per request             while there is credit

Credit is a share of the time that the cache itself takes (``ghost_share``, a hundredth).
Everything that the ghost does is paid from it in processor time, and what is not paid for is not
done: estimates come late rather than dear. Two things go on credit, and are paid back before
more is begun: the end of a recording that takes longer than was reckoned, at most twice, and
what is replayed while the engine has nothing else to do.

A cache of half, double or four times the size differs from a small one of this size as the large
ones would differ, so an estimate is the hit ratio that was measured, plus what the small caches
differ by.

Source: many small caches: Waldspurger, Saemundsson, Ahmad, Park, Cache modeling and optimization
using miniature simulations, ATC 2017; the sample: ``sample``.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import inf
from typing import get_args

from ostinato.cache.block_table import BlockTable
from ostinato.cache.episode import Episode, EpisodePlan
from ostinato.cache.stats import GhostEstimate, LookupCounts
from ostinato.core.config import CacheConfig, PolicyName

_ADMISSIONS = 1.6
"""A request takes the cache at least so many times as long as its admission: 2 where every
request evicts (traces in ``benchmarks/ghost.py``), 3 to 6 in ``benchmarks/heart.py``."""

_LOOK_S = 1e-7
"""What a request costs that nothing is done about."""

_REST = 64
"""Requests between two of which the admission is timed; and those that come before the first
episode, which is planned by what they hit."""

_LEAST_PRICE_S = 1e-3
"""No episode costs less."""

_SLICE_S = 5e-4
"""The most that one request is held up by replaying."""

_REPLAY_S = 1.5e-6
"""What a sampled block costs that is replayed for the sizes."""

_OVER = object()


@dataclass(slots=True)
class _Tally:
    """What small caches of a size and policy found more than those of the cache's own."""

    difference: int = 0
    num_asked: int = 0

    def add(self, difference: int, num_asked: int) -> None:
        self.difference += difference
        self.num_asked += num_asked


class Ghost:
    """Estimates for other sizes and policies.

    Attributes:
        num_seen: Requests that were admitted; the cache counts.
        due: How many of them to admit before one is timed, and wakes the ghost.
        is_recording: Whether requests that are admitted now are to be noted when they end.
        timer: Seconds of processor time.
        spent_s: What it has taken so far.
    """

    def __init__(
        self,
        config: CacheConfig,
        clock: Callable[[], float],
        counts: LookupCounts,
        timer: Callable[[], float] = time.thread_time,
    ) -> None:
        """Watch a cache.

        Args:
            config: Of the cache.
            clock: The cache's.
            counts: What the cache has found.
            timer: Seconds of processor time.
        """
        self.num_seen, self.due, self.is_recording, self.timer = 0, 0, False, timer
        self._config, self._clock, self._counts = config, clock, counts
        self.spent_s = 0.0
        self._earned_s = 0.0 if config.ghost_share < 1 else inf
        self._num_paid = 0  # requests of whose time the share is in the credit
        self._num_noted, self._note_s = 0, 4e-6  # and what noting one takes, on average
        self._price_s = 0.0  # of the episode, as it was reckoned
        self._num_episodes = 0
        self._tallies: dict[tuple[float, PolicyName], _Tally] = {}
        policies: tuple[PolicyName, ...] = get_args(PolicyName)
        self._others = [policy for policy in policies if policy not in ("lru", config.policy)]
        self._episode: Episode | None = None
        self._work: Iterator[None] | None = None  # the replay of what was recorded

    @property
    def credit_s(self) -> float:
        """What it may still take."""
        return self._earned_s - self.spent_s

    def wake(self, began_s: float) -> None:
        """Take the share of the time since the last call, and do what it is enough for.

        Args:
            began_s: When the admission began that has just come to its end, by ``timer``.
        """
        started = self.timer()
        num_requests, self._num_paid = self.num_seen - self._num_paid, self.num_seen
        request_s = _ADMISSIONS * (started - began_s)
        self._earned_s += num_requests * self._config.ghost_share * request_s
        self.spent_s += num_requests * _LOOK_S
        if self._episode is None and self.num_seen >= _REST:
            self._begin()
        self._work_until(started + min(self.credit_s, _SLICE_S))
        self.spent_s += self.timer() - started
        is_busy = self._work is not None and self.credit_s > 0
        self.due = self.num_seen + (0 if is_busy else _REST)

    def rest(self) -> bool:
        """Replay a little in a spare moment, on credit: it is paid back before more is recorded.

        Returns:
            Whether there is more to replay.
        """
        if self._work is None:
            return False
        started = self.timer()
        self._work_until(started + _SLICE_S)
        self.spent_s += self.timer() - started
        return self._work is not None

    def left(self, table: BlockTable, num_tokens: int) -> None:
        """Note a request that ends.

        Args:
            table: Its tokens, how many of them were looked up, and how many were generated.
            num_tokens: How many of them are computed.
        """
        if not self.is_recording or self._episode is None:
            return
        is_timed = self._num_noted % 8 == 0
        self._num_noted += 1
        started = self.timer() if is_timed else 0.0
        self._episode.note(table, num_tokens)
        if is_timed:
            self._note_s += 0.1 * (self.timer() - started - self._note_s)
        self.spent_s += self._note_s
        if self._episode.is_full or self.credit_s < -self._price_s:  # it was reckoned badly
            self._end_recording()

    def clear(self) -> None:
        """Drop what was sampled; estimates stay, for they tell of nobody."""
        self.is_recording, self._episode, self._work = False, None, None

    def catch_up(self) -> None:
        """Replay at once all that was recorded, whatever it costs."""
        if self.is_recording:
            self._end_recording()
        while self._work is not None:
            self._step()

    def estimates(self) -> tuple[GhostEstimate, ...]:
        """Return what others would have found, by what was replayed so far."""
        measured = self._counts.hit_ratio
        found = []
        for (memory, policy), tally in list(self._tallies.items()):
            ratio = min(1.0, max(0.0, measured + tally.difference / tally.num_asked))
            num_blocks = int(memory * self._config.num_blocks)
            found.append(GhostEstimate(num_blocks, policy, ratio, tally.num_asked, memory))
        return tuple(found)

    def _begin(self) -> None:
        """Record from now on, if there is credit for that and for replaying the sizes."""
        if self.credit_s < _LEAST_PRICE_S:
            return
        plan = EpisodePlan.of(self._num_episodes, self._config, self._counts)
        self._price_s = plan.num_requests * self._note_s + plan.most_logged * _REPLAY_S
        if self.credit_s >= self._price_s:
            self._episode = Episode(self._num_episodes, plan, self._config, self._clock)
            self.is_recording = True
            self._num_episodes += 1

    def _end_recording(self) -> None:
        """Replay from now on, if it is enough to tell anything."""
        self.is_recording, episode = False, self._episode
        if episode is None or not episode.tells_something:
            self._episode = None
            return
        turn = self._num_episodes % len(self._others)
        others = self._others if self.credit_s == inf else self._others[turn : turn + 1]
        self._work, self.due = episode.replay(others, self._tally), self.num_seen

    def _work_until(self, moment_s: float) -> None:
        """Replay turns while there are some, and time."""
        while self._work is not None and self.timer() < moment_s:
            self._step()

    def _step(self) -> None:
        """Replay one more turn."""
        if self._work is not None and next(self._work, _OVER) is _OVER:
            self._episode, self._work = None, None

    def _tally(self, memory: float, policy: PolicyName, difference: int, num_asked: int) -> None:
        self._tallies.setdefault((memory, policy), _Tally()).add(difference, num_asked)
