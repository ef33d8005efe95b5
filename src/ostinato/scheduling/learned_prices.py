"""Learns the price list of one engine from the steps that it runs, and bounds steps by it.

A busy minute must not spoil the list, and steps should be short during it. So two things are
learned apart:

* *Prices* change with the model and the machine, hence hardly ever. Steps of about the same work
  share a cell, which keeps the newest; its median counts, and cells count alike, whatever runs at
  the moment. Outliers change nothing, nor does an hour in which nothing but decodes is measured.
* *Pace* is the machine's of this minute: the median ratio of the newest steps to earlier ones of
  about the same work. Cells keep times without it, and all prices are multiplied by it. It is 1 at
  least: steps that became faster were measured in a slow minute, and others may not have been.

What was never measured has a predicted price and a bound. A step that is in no kind of work more
than ``n`` times as much as a measured one takes at most ``n`` times as long, and if ``n`` is below
1, the rest of the time of the shortest step besides, in which the weights were read as well. So
much is certain as long as no price is negative, and a key costs at most ``PAIRS_OF_A_KEY`` pairs.

While anything else decodes or waits, a step takes ``max_step_ms``, or longer where less would cost
more than a tenth of the prompt rate, since each step reads all weights; at most ``MAX_DECODES``
times as long as without prompts. Alone, a prompt takes the smallest step that is as fast as any
within ``LOST_ALONE``: a request that arrives meanwhile waits for that step.

Predictions may be wrong where nothing was measured: more tokens, longer prompts, more sequences
than ever before. So a step takes at most ``MAX_LATE`` times its limit by that bound: it grows in
all kinds of work as fast as what was measured allows.
An engine that has measured nothing takes a small step: a second where a large model computes 64
tokens a second.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import isqrt
from statistics import median_low

from ostinato.core.plan import StepPlan
from ostinato.sched.step_planner import PromptRoom, StepCosts
from ostinato.scheduling.price_fit import fit
from ostinato.scheduling.step_prices import StepPrices, Work, plan_work, prompt_pairs

KEPT_STEPS = 15
"""Measured steps of a cell."""

WELL_MEASURED = 3
"""Steps from which on a cell counts in full."""

MIN_MEASURED = 64
"""Tokens of the largest step from which on the time of a prompt can be told."""

FIT_EVERY_S = 0.5
"""Measured seconds after which prices are fitted again, and at step 4, 8, 16 and so on, once three
kinds of steps are measured; a fit takes about half a millisecond."""

PACE_STEPS, STEADY = 9, 1.25
"""Newest steps whose ratios tell the pace, and the factor up to which it counts as 1."""


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Predicted and measured times of steps.

    Attributes:
        num_steps: Steps that were predicted before they ran.
        measured_s: Seconds that those took.
        predicted_s: Seconds that they were predicted to take.
        prices: The price list; None until three kinds of steps are measured.
    """

    num_steps: int = 0
    measured_s: float = 0.0
    predicted_s: float = 0.0
    prices: StepPrices | None = None


class LearnedPrices:
    """The price list of one engine, kept current by the steps that it runs.

    Attributes:
        now: The prices at the present pace; None until three kinds of steps are measured.
        max_measured_tokens: Tokens of the largest measured step.
        fewest_tokens: Tokens of the smallest one.
        pace: How many times as long steps take now as the prices were learned.
    """

    def __init__(self, now: StepPrices | None = None) -> None:
        """Begin unmeasured, or with given prices."""
        self._given = now
        self.reset()

    def reset(self) -> None:
        """Forget all that was measured."""
        self.now = self._steady = self._given
        self.max_measured_tokens = 0 if self.now is None else 2**31
        self.fewest_tokens = 2**31 if self.now is None else 0
        self.pace = 1.0
        self._num_predicted, self._measured_s, self._predicted_s = 0, 0.0, 0.0
        self._cells: dict[tuple[int, int], _Cell] = {}
        self._ratios: deque[float] = deque(maxlen=PACE_STEPS)
        self._num_noted, self._unfitted_s = 0, 0.0

    @property
    def times(self) -> StepTimes:
        """Predictions and measurements so far."""
        return StepTimes(self._num_predicted, self._measured_s, self._predicted_s, self.now)

    def prompt_s(self, start: int, num_tokens: int) -> float | None:
        """Return how long a prompt's tokens take after ``start`` others; None if unknown."""
        if self.now is None or self.max_measured_tokens < MIN_MEASURED:
            return None
        return self.now.fixed_s + self.now.prompt_s(start, num_tokens)

    @property
    def measured(self) -> "list[tuple[Work, float]]":
        """The typical step of each cell, the newest first; none where prices are given."""
        cells = reversed(self._cells.values())
        return [(cell.work, cell.seconds * self.pace) for cell in cells]

    def note(self, work: Work, seconds: float) -> None:
        """Learn from a step; the first is not typical, since memory is touched for the first time.

        Cost: a fit every ``FIT_EVERY_S``.
        """
        if seconds <= 0 or not work.tokens:
            return
        self._num_noted += 1
        self.max_measured_tokens = max(self.max_measured_tokens, work.tokens)
        if self.now is not None:
            self._num_predicted += 1
            self._measured_s += seconds
            self._predicted_s += self.now.seconds(work)
        if self._num_noted == 1 or self._given is not None:
            return
        self.fewest_tokens = min(self.fewest_tokens, work.tokens)
        key = work.tokens.bit_length(), work.pairs.bit_length()
        if self._steady is not None:
            self._note_pace(key, work, seconds, self._steady)
        cell = self._cells.pop(key) if key in self._cells else _Cell()
        self._cells[key] = cell  # the newest is last
        cell.add(work, seconds / self.pace, self._steady)
        self._unfitted_s += seconds
        is_early = self._steady is None or not self._num_noted & (self._num_noted - 1)
        if len(self._cells) >= 3 and (is_early or self._unfitted_s >= FIT_EVERY_S):
            self._fit()
        if self._steady is not None:
            self.now = self._steady.times(self.pace)

    def _note_pace(
        self, key: tuple[int, int], work: Work, seconds: float, steady: StepPrices
    ) -> None:
        """Compare a step with earlier ones of its cell or the next, at prices of the difference."""
        tokens, pairs = key
        for near in (pairs, pairs - 1, pairs + 1):
            cell = self._cells.get((tokens, near))
            if cell is not None and len(cell.steps) >= WELL_MEASURED:
                break
        else:
            return
        expected_s = cell.seconds * steady.seconds(work) / steady.seconds(cell.work)
        self._ratios.append(seconds / expected_s)
        pace = median_low(self._ratios)
        self.pace = pace if pace > STEADY else 1.0

    def _fit(self) -> None:
        self._unfitted_s = 0.0
        cells = self._cells.values()
        weights = [min(1.0, len(cell.steps) / WELL_MEASURED) for cell in cells]
        self._steady = fit([(cell.work, cell.seconds) for cell in cells], "measured", weights)


class _Cell:
    """The newest steps of about the same work.

    Attributes:
        work: Of the step in the middle.
        seconds: That it took, without the pace.
        steps: The newest, with their seconds.
    """

    def __init__(self) -> None:
        self.work, self.seconds = Work(1, 0, 0), 0.0
        self.steps: deque[tuple[Work, float]] = deque(maxlen=KEPT_STEPS)

    def add(self, work: Work, seconds: float, prices: StepPrices | None) -> None:
        """Keep a step; in the middle is one by measured to predicted time, of two the faster."""
        self.steps.append((work, seconds))
        ratios = [
            measured_s / (float(step.tokens) if prices is None else prices.seconds(step))
            for step, measured_s in self.steps
        ]
        order = sorted(range(len(ratios)), key=ratios.__getitem__)
        self.work, self.seconds = self.steps[order[(len(order) - 1) // 2]]


PAIRS_OF_A_KEY = 128
"""Pairs of a query and a key that cost at least as much as reading a key: a processor reads a byte
in the time of some 30 to 300 operations, and a pair takes one to eight for each byte of a key."""


def max_certain_tokens(
    measured: Sequence[tuple[Work, float]],
    seconds: float,
    planned: Work,
    start: int,
    limit_tokens: int,
) -> int:
    """Return how many tokens of a prompt surely fit into a step, beside what is planned.

    Args:
        measured: Work and seconds of steps.
        seconds: Time of the step.
        planned: Work of the step so far.
        start: Tokens before those of the prompt.
        limit_tokens: Enough tokens.
    """
    min_s = min((measured_s for _, measured_s in measured), default=0.0)
    if seconds < min_s:
        return 0
    certain_tokens = 0
    for work, measured_s in measured:
        factor = seconds / measured_s
        if factor < 1:
            factor = (seconds - min_s) / (measured_s - min_s)
        num_tokens = _tokens_as(work, factor, planned, start, limit_tokens)
        certain_tokens = max(certain_tokens, num_tokens)
        if certain_tokens >= limit_tokens:
            return limit_tokens
    return certain_tokens


def _tokens_as(work: Work, factor: float, planned: Work, start: int, limit_tokens: int) -> int:
    """Return the tokens with which a step is at most this many times as much as a measured one.

    Keys beyond those of the measured step take the place of pairs.
    """
    tokens = min(limit_tokens, int(factor * work.tokens) - planned.tokens)
    more_keys = max(0, planned.keys + start + tokens - int(factor * work.keys))
    pairs = int(factor * work.pairs) - planned.pairs - PAIRS_OF_A_KEY * more_keys
    if tokens <= 0 or pairs <= 0:
        return 0
    # Of n * start + n * (n + 1) / 2 pairs, the largest n.
    by_pairs = (isqrt((2 * start + 1) ** 2 + 8 * pairs) - (2 * start + 1)) // 2
    return min(tokens, by_pairs)


FIRST_TOKENS = 64
"""Prompt tokens of a step while nothing is known of prices."""

NO_WORK = Work(1, 0, 0)

FIRST_PRICES = StepPrices(0.0, 1.0, 1 / 2048, "a guess, in tokens")
"""Pairs of a query and a key that count as one token of the first steps."""

LOST_RATE = 0.1
"""Share of the prompt rate that steps may lose to stay within ``max_step_ms``."""

LOST_ALONE = 0.03
"""Share of the prompt rate that is lost where nothing else lives."""

MAX_DECODES = 8
"""A step takes at most this multiple of its decodes' time, unless it is within the limit."""

FEW_TOKENS = 8
"""Tokens of a step whose time is about that of reading the weights."""

MAX_LATE = 2
"""A step takes at most this multiple of its limit, whatever is not measured yet."""


@dataclass(slots=True)
class StepMeter(PromptRoom):
    """What is left of a step for prompts.

    Attributes:
        num_tokens: Tokens left.
        planned: Work of the step so far.
        prices: The price list; None if tokens cost the same.
        seconds: Time left.
        num_free: Tokens left that cost nothing but their attention.
        measured: Typical steps, which bound what a step may take.
        certain_s: That bound.
    """

    num_tokens: int
    planned: Work
    prices: StepPrices | None = None
    seconds: float = float("inf")
    num_free: int = 0
    measured: Sequence[tuple[Work, float]] = ()
    certain_s: float = float("inf")

    @property
    def room(self) -> float:
        """What is left: seconds, or tokens where they cost the same."""
        return self.num_tokens if self.prices is None else self.seconds

    def max_chunk_tokens(self, start: int, share: float = 1.0) -> int:
        """Return how many tokens after ``start`` others fit into a share of what is left."""
        prices, limit_tokens = self.prices, max(0, int(self.num_tokens * share))
        if prices is None:
            return limit_tokens
        likely_tokens = prices.max_prompt_tokens(
            start, limit_tokens, self.seconds * share, self.num_free
        )
        if not self.measured:
            return likely_tokens
        return max_certain_tokens(self.measured, self.certain_s, self.planned, start, likely_tokens)

    def take(self, start: int, num_tokens: int) -> None:
        """Take tokens of a prompt out of what is left; a negative number gives them back."""
        if not num_tokens:
            return
        sign, number = (1, num_tokens) if num_tokens > 0 else (-1, -num_tokens)
        self.num_tokens -= num_tokens
        if self.prices is not None:
            self.seconds -= sign * self.prices.prompt_s(start, number, self.num_free)
        self.num_free = max(0, self.num_free - num_tokens)
        pairs, keys = prompt_pairs(start, number), start + number
        so_far = self.planned
        self.planned = Work(
            1, so_far.tokens + num_tokens, so_far.pairs + sign * pairs, so_far.keys + sign * keys
        )


class StepTimer(StepCosts):
    """Learns what steps cost, and bounds them.

    Attributes:
        prices: The price list.
        limit_s: Predicted time that the current step may take; infinite if unknown.
    """

    def __init__(
        self, max_step_ms: int, max_tokens: int, prices: LearnedPrices | None = None
    ) -> None:
        """Bound steps of at most ``max_tokens``; without prices, they are learned."""
        self.prices = LearnedPrices() if prices is None else prices
        self.limit_s = float("inf")
        self._max_step_s, self._max_tokens = max_step_ms / 1000, max_tokens
        self._meter = StepMeter(max_tokens, NO_WORK)

    def begin(self, decoding: list[int], starts: list[int], is_alone: bool) -> StepMeter:
        """Begin a step with sequences that decode, and with prompts that have begun."""
        num_decoding, keys = len(decoding), sum(decoding)
        decodes = Work(1, num_decoding, keys, keys)
        room_tokens, prices = self._max_tokens - num_decoding, self.prices.now
        if prices is None or not self._has_measured_enough:
            self.limit_s = float("inf")
            self._meter = StepMeter(room_tokens, decodes, FIRST_PRICES, FIRST_TOKENS + 1)
            return self._meter
        decodes_s = prices.seconds(decodes)
        self.limit_s = self._max_step_s
        if self.prices.fewest_tokens <= max(num_decoding, FEW_TOKENS):  # else its time is a guess
            self.limit_s = self._limit_s(prices, decodes_s, max(starts, default=0), is_alone)
        free_tokens = max(0, prices.free_tokens - num_decoding)
        self._meter = StepMeter(
            room_tokens, decodes, prices, self.limit_s - decodes_s, free_tokens,
            self.prices.measured, MAX_LATE * self.limit_s,
        )  # fmt: skip
        return self._meter

    def note(self, plan: StepPlan, seconds: float) -> None:
        """Learn from a step that has run."""
        self.prices.note(plan_work(plan), seconds)

    def meter(self, num_tokens: int) -> StepMeter:
        """Return the tokens left in the current step, at most ``num_tokens``."""
        return replace(self._meter, num_tokens=min(num_tokens, self._meter.num_tokens))

    @property
    def _has_measured_enough(self) -> bool:
        """Whether a step was measured that is half as much as the first ones may be.

        Counted as they are: behind a long hit, few tokens have as many pairs as fit.
        """
        if self.prices.max_measured_tokens >= FIRST_TOKENS:
            return True
        works = (work for work, _ in self.prices.measured)
        return any(2 * FIRST_PRICES.seconds(work) >= FIRST_TOKENS for work in works)

    def _limit_s(self, prices: StepPrices, decodes_s: float, start: int, is_alone: bool) -> float:
        def extra_s(lost: float) -> float:
            """Return what the smallest chunk that loses no more takes, beside its fixed time."""
            num_tokens = prices.tokens_for_rate(1 - lost, start, self._max_tokens)
            return prices.prompt_s(start, num_tokens, prices.free_tokens)

        patient_s = min(decodes_s + extra_s(LOST_RATE), MAX_DECODES * decodes_s)
        limit_s = max(self._max_step_s, patient_s)
        return max(limit_s, decodes_s + extra_s(LOST_ALONE)) if is_alone else limit_s
