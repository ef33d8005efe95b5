"""What would more memory bring, or another policy, and what may it cost to know?

A ghost watches a sample of the traffic by episodes, and plays it on small caches with nothing
behind them::

    saving ──enough──► watching ──sample full──► playing ──all played──► saving ..
    a counter          digests of some blocks    what is left
    per request        per request               while there is credit

Credit is a share of the processor time that the cache itself takes: of the manager's calls from
the look-up of a request to the release of its blocks (``ghost_share``, a hundredth). All that the
ghost does is paid from it, and what is not paid for is not done. Two things are beside that:

* a start-up allowance of a tenth of a second, once, given out over the first 8,192 requests: it
  pays for the first episode, which begins with the traffic, so that there are estimates soon;
* what is played while the engine has nothing else to do. That is lent, and paid back before
  another episode begins.

What small caches find beside each other is kept in tallies, and ``answers`` are made of these.

Source: many small caches: Waldspurger, Saemundsson, Ahmad, Park, Cache modeling and optimization
using miniature simulations, ATC 2017; the sample: ``sample``; intervals: ``tally``.
"""

import time
from collections.abc import Callable, Sequence
from math import inf

from ostinato.cache.anchor import LruInItsPlace, Watched
from ostinato.cache.answers import Answers
from ostinato.cache.episode import Departure, Episode, EpisodePlan
from ostinato.cache.eviction import EvictionPolicy, RequestSummary
from ostinato.cache.policies.reuse_hazard import ReuseHazard
from ostinato.core.config import CacheConfig
from ostinato.core.identity import PrefixKey
from ostinato.observe.counters import GhostEstimate, LookupCounts

ALLOWANCE_S, ALLOWED_REQUESTS = 0.1, 8192
"""Processor time that is given once, and the requests over which it is given out."""

_ADMISSIONS = 0.8
"""Admissions whose time is the cache's, as credit goes: a request takes 2 where every request
evicts (traces in ``benchmarks/ghost.py``), and 3 to 6 in ``benchmarks/heart.py``. What the clocks
say is twice what is booked, for a request that is watched leaves the processor's caches cold, so
less than half of it is given."""

_LOOK_S, _LEFT_S = 4e-7, 2e-6
"""What a request costs that nothing is done about; and one that is noted, beside what the timer
says: the cache's own code and tables are out of the processor's caches after it."""

_FIRST = 16
"""Requests by whose length the first episode is planned."""

_REST, _BUSY = 64, 8
"""Requests between two of which the admission is timed; and while there is something to play."""

_AT_ONCE = 32
"""Requests that have ended and are noted at once; one of them is timed."""

_SLICE_S = 5e-4
"""The most that one request is held up by playing."""

_LONGEST_S = 5e-3
"""What takes longer is the interpreter's collection of all garbage, which is not the ghost's."""

_WATCHED = 8192
"""Requests whose watching is paid before anything is played, and that another episode is to last
for."""

_NOTE_S = 3e-6
"""What it takes to note a request, until that is known."""


class Ghost:
    """Estimates for other sizes and policies.

    Attributes:
        num_seen: Requests that were admitted; the cache counts.
        due: How many of them to admit before one is timed, and wakes the ghost.
        is_recording: Whether requests that are admitted now are to be noted when they end.
        timer: Seconds of processor time.
        spent_s: What it has taken so far.
        seed: Of the samples; to see how far they differ.
    """

    def __init__(
        self,
        config: CacheConfig,
        clock: Callable[[], float],
        counts: LookupCounts,
        policies: Sequence[EvictionPolicy],
        timer: Callable[[], float] = time.thread_time,
    ) -> None:
        """Watch a cache.

        Args:
            config: Of the cache.
            clock: The cache's.
            counts: What the cache has found.
            policies: Of the cache; some know what LRU would have found.
            timer: Seconds of processor time.
        """
        self.num_seen, self.due, self.is_recording, self.timer = 0, _FIRST, False, timer
        self._config, self._clock, self._counts = config, clock, counts
        own = policies[0]
        self._experience = own if isinstance(own, ReuseHazard) else None
        found = LruInItsPlace(counts, policies, config.block_size) if self._experience else counts
        self._watched = Watched(config, found, self._experience)
        self._answers = Answers(counts, self._watched)
        self.spent_s, self.seed = 0.0, 0
        self._earned_s = 0.0 if config.ghost_share < 1 else inf
        self._num_paid = 0  # requests of whose time the share is in the credit
        self._departed: list[Departure] = []  # of requests that have ended and are not noted
        self._num_left = 0  # such requests, also those of which nothing was chosen
        self._num_noted, self._noting_s = 0, 0.0  # requests that were, and what that took
        self._lent_s = 0.0  # what was played in spare moments while this was recorded
        self._num_episodes = 0
        self._episode: Episode | None = None

    @property
    def credit_s(self) -> float:
        """What it may still take."""
        return self._earned_s + self.allowed_s - self.spent_s

    @property
    def playable_s(self) -> float:
        """What may be taken to play: credit that is not needed to watch on."""
        if not self.is_recording:
            return self.credit_s
        still = max(0, _WATCHED - self._num_noted) * max(0.0, self._note_s - self._earns_s)
        return min(self.credit_s, self._earned_s + ALLOWANCE_S - self.spent_s - still)

    @property
    def _note_s(self) -> float:
        """What it takes to note a request."""
        return self._noting_s / self._num_noted if self._num_noted else _NOTE_S

    @property
    def _earns_s(self) -> float:
        """What a request brings."""
        return self._earned_s / max(1, self._num_paid)

    @property
    def allowed_s(self) -> float:
        """What was given of the allowance so far."""
        return ALLOWANCE_S * min(1.0, self.num_seen / ALLOWED_REQUESTS)

    def wake(self, began_s: float) -> None:
        """Take the share of the time since the last call, and do what it is enough for.

        Args:
            began_s: When the admission began that has just come to its end, by ``timer``.
        """
        started = self.timer()
        num_requests, self._num_paid = self.num_seen - self._num_paid, self.num_seen
        request_s = _ADMISSIONS * (started - began_s)
        self._earned_s += num_requests * self._config.ghost_share * request_s
        self.spent_s += num_requests * (_LEFT_S if self.is_recording else _LOOK_S)
        if self._episode is None:
            self._begin()
        is_behind = self._play_until(started + min(self.playable_s, _SLICE_S))
        self._pay(started)
        self.due = self.num_seen + (_BUSY if is_behind and self.playable_s > 0 else _REST)

    def rest(self) -> bool:
        """Play a little in a spare moment, on credit: it is paid back before the next episode.

        Returns:
            Whether there is more to play.
        """
        if self._episode is None or self._episode.is_played:
            return False
        started = self.timer()
        is_behind = self._play_until(started + _SLICE_S)
        self._lent_s += self._pay(started)
        return is_behind

    def left(self, key: PrefixKey, turn: RequestSummary, asked: int, num_tokens: int) -> None:
        """Note a request that ends.

        Args:
            key: The sequence.
            turn: What is known of the request.
            asked: Tokens that were looked up.
            num_tokens: How many of them are computed.
        """
        episode = self._episode
        if episode is None:
            return
        is_timed = not self._num_left
        started = self.timer() if is_timed else 0.0
        chosen = episode.sampler.choose(key, num_tokens)
        if chosen:
            names, learned = episode.sampler.names(key, chosen), self._experience
            kinds = 0 if learned is None else learned.kinds_of(turn)
            tokens = asked, turn.num_output_tokens
            self._departed.append((names, chosen, *tokens, self._clock(), kinds))
        if is_timed:  # for as many as are noted at once
            self._noting_s += self._pay(started, _AT_ONCE)
        self._num_left += 1
        if self._num_left >= _AT_ONCE:
            started = self.timer()
            self._note()
            self._noting_s += self._pay(started)

    def clear(self) -> None:
        """Drop what was sampled; estimates stay, for they tell of nobody."""
        if self._episode is not None:
            self._episode.seen()
        self.is_recording, self._episode = False, None
        self._departed, self._num_left = [], 0

    def catch_up(self) -> None:
        """Play at once all that was noted, whatever it costs."""
        self._note()
        self._play_until(inf)

    def estimates(self) -> tuple[GhostEstimate, ...]:
        """Return what others would have found, by what was played so far."""
        if self._episode is not None and self.is_recording:
            self._episode.seen()
        return self._answers.estimates()

    def _begin(self) -> None:
        """Watch from now on, if there is credit for that; the first time there is the allowance."""
        if self._num_episodes and self.credit_s < _WATCHED * self._note_s:
            return
        plan = EpisodePlan.of(self._config, self._counts)
        known = self._watched, self._answers.tally
        self._episode = Episode(self._num_episodes, plan, *known, self.seed)
        self._num_episodes += 1
        self._lent_s = 0.0
        self.is_recording = True

    def _note(self) -> None:
        """Take what has ended since the last time; all at once, which takes half of the time."""
        episode, departed, num_left = self._episode, self._departed, self._num_left
        self._departed, self._num_left = [], 0
        if episode is None or not self.is_recording:
            return
        for left in departed:
            episode.note(left)
        self._num_noted += num_left
        is_paid = self._earned_s + ALLOWANCE_S + self._lent_s > self.spent_s
        if episode.is_enough or not is_paid:
            self._end_recording()

    def _pay(self, started_s: float, times: int = 1) -> float:
        """Book the time since then, so many times, and return it."""
        took_s = times * min(self.timer() - started_s, _LONGEST_S / times)
        self.spent_s += took_s
        return took_s

    def _end_recording(self) -> None:
        """Play what is left, and watch no more."""
        if self._episode is not None:
            self._episode.seen()
        self.is_recording = False

    def _play_until(self, moment_s: float) -> bool:
        """Play while there is something, and time; says whether there is more."""
        episode = self._episode
        if episode is None:
            return False
        while self.timer() < moment_s:
            if not episode.play(self.timer):
                break
        if episode.is_played and not self.is_recording:
            self._episode = None
        return not episode.is_played
