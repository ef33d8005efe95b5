"""Learns the price list of one engine from the steps that it runs.

A busy minute must not spoil the list, and steps should be short during it. So two things are
learned apart:

* *Prices* change with the model and the machine, hence hardly ever. Steps of about the same work
  share a cell, which keeps the newest; its median counts, and cells count alike, whatever runs at
  the moment. Outliers change nothing, nor does an hour in which nothing but decodes is measured.
* *Pace* is the machine's of this minute: the median ratio of the newest steps to earlier ones of
  about the same work. Cells keep times without it, and all prices are multiplied by it. It is 1 at
  least: steps that became faster were measured in a slow minute, and others may not have been.

What was never measured has a predicted price and a bound. A step that is in no kind of work more
than ``n`` times as much as a measured one, ``n`` at least 1, takes at most ``n`` times as long: so
much is certain as long as no price is negative, whatever the prices are.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from math import isqrt
from statistics import median_low

from ostinato.scheduling.price_fit import fit
from ostinato.scheduling.step_prices import StepPrices, Work

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
        self._note_pace(key, work, seconds)
        cell = self._cells.pop(key) if key in self._cells else _Cell()
        self._cells[key] = cell  # the newest is last
        cell.add(work, seconds / self.pace, self._steady)
        self._unfitted_s += seconds
        is_early = self._steady is None or not self._num_noted & (self._num_noted - 1)
        if is_early or self._unfitted_s >= FIT_EVERY_S:
            self._fit()
        if self._steady is not None:
            self.now = self._steady.times(self.pace)

    def _note_pace(self, key: tuple[int, int], work: Work, seconds: float) -> None:
        """Compare a step with earlier ones of its cell or the next, at prices of the difference."""
        tokens, pairs = key
        for near in (pairs, pairs - 1, pairs + 1):
            cell = self._cells.get((tokens, near))
            if cell is not None and len(cell.steps) >= WELL_MEASURED:
                break
        else:
            return
        if self._steady is None:
            return
        expected_s = cell.seconds * self._steady.seconds(work) / self._steady.seconds(cell.work)
        self._ratios.append(seconds / expected_s)
        pace = median_low(self._ratios)
        self.pace = pace if pace > STEADY else 1.0

    def _fit(self) -> None:
        if len(self._cells) < 3:
            return
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


def max_certain_tokens(
    measured: Iterable[tuple[Work, float]],
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
    certain_tokens = 0
    for work, measured_s in measured:
        num_tokens = _tokens_as(work, seconds / measured_s, planned, start)
        certain_tokens = max(certain_tokens, num_tokens)
        if certain_tokens >= limit_tokens:
            return limit_tokens
    return certain_tokens


def _tokens_as(work: Work, factor: float, planned: Work, start: int) -> int:
    """Return the tokens with which a step is at most so many times as much as a measured one."""
    if factor < 1 or factor * work.keys < planned.keys + start:
        return 0
    tokens = int(factor * work.tokens) - planned.tokens
    keys = int(factor * work.keys) - planned.keys - start
    pairs = max(0, int(factor * work.pairs) - planned.pairs)
    # Of n * start + n * (n + 1) / 2 pairs, the largest n.
    by_pairs = (isqrt((2 * start + 1) ** 2 + 8 * pairs) - (2 * start + 1)) // 2
    return max(0, min(tokens, keys, by_pairs))
