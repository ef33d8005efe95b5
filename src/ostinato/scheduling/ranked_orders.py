"""Orders that rank what waits: longest cached prefix first, and shortest first.

Prefixes are used while they are there (RadixAttention's cache-aware order, arXiv 2312.07104).

Shortest first serves the prompt with the least left to compute, so that hits go before misses.

What is left of a prompt after its hit has a price, its time by the price list. Within a priority
the lowest is next, among the waiting and the running alike, and several prompts advance in a step
(shortest remaining processing time first, Schrage, Operations Research 16, 1968)::

    step of 64 tokens    hit:12 left    hit:40 left    long:5,000 left, the elder
                         12             4              16 = a quarter; 32 are left unused

A step in which a prompt ends, as the first hit does, is filled to ``FILLED_SHARE`` only: its first
token waits for that, and not for the rest of a long step.

Long prompts age by two bounds:

* *The elder's share.* Of the prompts of the best priority, the one that came first may compute
  ``ELDER_SHARE`` of every step, whatever is shorter. So once it is admitted, a prompt before which
  others came that have ``n`` tokens left, with its own, is computed in ``n / (share * step)``
  steps.
* *Overtakes.* A waiting one is overtaken by ``max_overtakes`` later ones at most, and then tried
  first: that bounds how long it waits for blocks or a seat.
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from itertools import islice

from ostinato.core.ids import SequenceId
from ostinato.sched.sequence import Sequence
from ostinato.sched.waiting_queue import NumCachedTokens, StepRoom, WaitingOrder, by_arrival
from ostinato.scheduling.learned_prices import NO_WORK, StepMeter, StepTimer

MAX_RANKED = 512
"""Sequences that a ranked order looks at in one step, by arrival; each costs a look-up."""


class RankedOrder(WaitingOrder):
    """Serve by priority, then by a rank of this step, within the bound on waiting.

    No sequence is overtaken more than ``max_overtakes`` times: after that it goes before all that
    arrived later. Looks at the first ``MAX_RANKED`` by arrival.
    """

    def __init__(self, max_overtakes: int) -> None:
        """Start with no sequence overdue."""
        self._max_overtakes = max_overtakes
        self._has_newly_overdue = False

    def rank(self, waiting: list[Sequence]) -> dict[SequenceId, int]:
        """Rank waiting requests: lower goes first, and equals, here all, keep their order."""
        return {sequence.sequence_id: 0 for sequence in waiting}

    def candidates(self, waiting: list[Sequence]) -> Iterator[Sequence]:
        """Walk the overdue by arrival, then the others by rank.

        A sequence that becomes overdue on the way is next: the bound holds within a step as well.
        """
        left = waiting[:MAX_RANKED]
        return iter(left) if len(left) < 2 else self._by_rank(left)

    def _by_rank(self, left: list[Sequence]) -> Iterator[Sequence]:
        ranks = self.rank(left)

        def place(sequence: Sequence) -> tuple[int, bool, int, int]:
            on_time = sequence.num_overtakes < self._max_overtakes
            rank = ranks[sequence.sequence_id] if on_time else 0
            return sequence.request.priority, on_time, rank, sequence.sequence_id

        self._has_newly_overdue = True
        while left:
            if self._has_newly_overdue:
                left.sort(key=place, reverse=True)
                self._has_newly_overdue = False
            yield left.pop()

    def admitted(self, sequence: Sequence, waiting: list[Sequence]) -> None:
        """Count an overtake for every waiting sequence that arrived before it."""
        before = waiting[: bisect_left(waiting, sequence.rank, key=by_arrival)]
        for other in self.overtaken(before):
            other.num_overtakes += 1
            if other.num_overtakes == self._max_overtakes:
                self._has_newly_overdue = True

    def overtaken(self, before: list[Sequence]) -> Iterable[Sequence]:
        """Return whom an admission counts as an overtake, of those that arrived before it."""
        return before


class LongestPrefixFirst(RankedOrder):
    """Serve by priority, then by cached prefix, within the bound on waiting."""

    def __init__(self, max_overtakes: int, num_cached_tokens: NumCachedTokens) -> None:
        """Rank by a look-up that has no effects."""
        super().__init__(max_overtakes)
        self._num_cached_tokens = num_cached_tokens

    def rank(self, waiting: list[Sequence]) -> dict[SequenceId, int]:
        """Rank by what would hit now; cost: one look-up each."""
        return {s.sequence_id: -self._num_cached_tokens(s) for s in waiting}


MAX_REFRESHED = 32
"""Waiting sequences that a step looks up again; of the others, what an earlier one found ranks."""

ELDER_SHARE = 0.25
"""Share of a step that the elder may compute, whatever is shorter."""

FILLED_SHARE = 0.5
"""Share of a step that is used, at most, by prompts that go on beside one that ends in it."""


class ShortestFirst(RankedOrder):
    """Serve by priority, then by what is left to compute, within the bounds on waiting.

    Cost: in each step in which prompts compete and a seat is free, a look-up of each new one and of
    ``MAX_REFRESHED`` others, and a comparison of packed tokens with each running prompt.
    """

    def __init__(
        self,
        max_overtakes: int,
        num_cached_tokens: NumCachedTokens,
        timer: StepTimer | None = None,
        max_chunk_tokens: int | None = None,
        unit: int = 1,
    ) -> None:
        """Rank by a look-up that has no effects.

        Args:
            max_overtakes: Bound on overtakes.
            num_cached_tokens: The look-up.
            timer: Knows prices and the time of a step; without one, tokens cost the same.
            max_chunk_tokens: Most tokens of a prompt in a step.
            unit: Tokens of which chunks are multiples, but for a prompt's last one.
        """
        super().__init__(max_overtakes)
        self._num_cached_tokens, self._timer = num_cached_tokens, timer
        self._max_chunk, self._unit = max_chunk_tokens, unit
        self._limits: dict[SequenceId, int] = {}
        self._places: dict[SequenceId, int] = {}
        self._tried: set[SequenceId] = set()
        self._starts: dict[SequenceId, int] = {}  # of the waiting, the oldest look-up first

    def divide(
        self, prefilling: list[Sequence], waiting: list[Sequence], room: StepRoom
    ) -> dict[SequenceId, int]:
        """Divide a step: the elder's share first, then prompt by prompt, the shortest first."""
        self._limits, self._places = {}, {}
        refused, self._tried = self._tried, set()
        waiting = waiting[:MAX_RANKED] if room.num_seats > 0 else []
        if len(prefilling) + len(waiting) < 2:
            return self._limits
        meter = self._meter(room.num_tokens)
        starts = self._look_up(waiting) if waiting else {}
        starts |= {s.sequence_id: s.num_computed for s in prefilling}
        ranked = self._sorted([*prefilling, *waiting], starts, meter)
        self._places = {s.sequence_id: place for place, s in enumerate(ranked)}
        guests = [s for s in ranked if s.table is None and self._can_start(s, prefilling, starts)]
        names = {s.sequence_id for s in guests[: room.num_seats]} - refused
        sharers = [s for s in ranked if s.table is not None or s.sequence_id in names]
        self._limits = self._divide(sharers, starts, meter)
        return self._limits

    def rank(self, waiting: list[Sequence]) -> dict[SequenceId, int]:
        """Rank as the step was divided."""
        last = len(self._places)  # for those that were preempted since
        return {s.sequence_id: self._places.get(s.sequence_id, last) for s in waiting}

    def candidates(self, waiting: list[Sequence]) -> Iterator[Sequence]:
        """Walk the overdue, then the others by what is left of them, if there is time for them.

        One for which there is no time is passed over by others of its priority, unless overdue.
        """
        passed: int | None = None  # the priority of one without time
        for sequence in super().candidates(waiting):
            if passed not in (None, sequence.request.priority):
                return
            if self._limits.get(sequence.sequence_id, 1):
                self._tried.add(sequence.sequence_id)
                yield sequence
            elif sequence.num_overtakes >= self._max_overtakes:
                return
            else:
                passed = sequence.request.priority

    def admitted(self, sequence: Sequence, waiting: list[Sequence]) -> None:
        """Count overtakes."""
        if waiting:
            super().admitted(sequence, waiting)
        self._tried.discard(sequence.sequence_id)

    def _look_up(self, waiting: list[Sequence]) -> dict[SequenceId, int]:
        """Return how many tokens of each would hit: of some as of an earlier step."""
        live, known = {s.sequence_id: s for s in waiting}, self._starts
        oldest = dict.fromkeys(islice((name for name in known if name in live), MAX_REFRESHED))
        kept = {n: start for n, start in known.items() if n in live and n not in oldest}
        again = [*oldest, *(name for name in live if name not in known)]
        self._starts = kept | {name: self._num_cached_tokens(live[name]) for name in again}
        return dict(self._starts)

    def _meter(self, num_tokens: int) -> StepMeter:
        if self._timer is None:
            return StepMeter(num_tokens, NO_WORK)
        return self._timer.meter(num_tokens)

    def _sorted(
        self, prompts: list[Sequence], starts: dict[SequenceId, int], meter: StepMeter
    ) -> list[Sequence]:
        """Sort prompts by priority, the overdue first, then by the price of what is left."""

        def place(sequence: Sequence) -> tuple[int, bool, float, int]:
            start, number = starts[sequence.sequence_id], sequence.sequence_id
            is_late = sequence.table is None and sequence.num_overtakes >= self._max_overtakes
            left: float = len(sequence.key.tokens) - start
            if meter.prices is not None:
                left = meter.prices.prompt_s(start, len(sequence.key.tokens) - start)
            return sequence.request.priority, not is_late, 0.0 if is_late else left, number

        return sorted(prompts, key=place)

    def _can_start(
        self, sequence: Sequence, prefilling: list[Sequence], starts: dict[SequenceId, int]
    ) -> bool:
        """Whether no running prompt is about to compute more of a waiting one than is cached."""
        known = starts[sequence.sequence_id]
        return sequence.reading_is_off != "" or all(
            leader.key.num_common_tokens(sequence.key) <= max(known, leader.num_computed)
            for leader in prefilling
        )

    def _divide(
        self, sharers: list[Sequence], starts: dict[SequenceId, int], meter: StepMeter
    ) -> dict[SequenceId, int]:
        """Return the limits of those who share a step, given in their order."""
        limits: dict[SequenceId, int] = {}
        whole, has_end = meter.room, False
        elder = min(sharers, key=lambda s: s.rank, default=None)
        shares = [(elder, ELDER_SHARE)] if elder is not None else []
        for sequence, share in [*shares, *((s, 1.0) for s in sharers)]:
            name = sequence.sequence_id
            given = limits.get(name, 0)
            start = starts[name] + given
            left = len(sequence.key.tokens) - start
            chunk_tokens = min(left, meter.max_chunk_tokens(start, share))
            if 0 < chunk_tokens < left and has_end and meter.room > 0:
                used_share = max(0.0, 1 - (1 - FILLED_SHARE) * whole / meter.room)
                chunk_tokens = meter.max_chunk_tokens(start, used_share)
            if self._max_chunk is not None:
                chunk_tokens = min(chunk_tokens, self._max_chunk - given)
            if chunk_tokens < left:
                chunk_tokens -= chunk_tokens % self._unit
            if share < 1:
                chunk_tokens = max(chunk_tokens, min(left, self._unit))
            meter.take(start, chunk_tokens)
            limits[name] = given + chunk_tokens
            has_end = has_end or chunk_tokens == left
        return limits
