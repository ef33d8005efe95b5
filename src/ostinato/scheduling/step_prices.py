"""The price list of a step: what tokens, keys and pairs cost here, learned from measured steps.

::

    seconds = fixed                               the weights are read, the kernels started
            + token * tokens above free_tokens    the matrices are multiplied
            + key   per key read, by sequence     the cache is read
            + pair  per query and key             attention

While the weights are read, a few tokens are computed for nothing: ``free_tokens`` is the bend of
the roofline (Williams, Waterman and Patterson, Communications of the ACM 52, 2009).

A busy minute must not spoil the list. Steps of about the same work share a cell, which keeps the
newest; its median counts, by the ratio of measured to predicted time, and each cell counts once,
and for half after each ``HALF_LIFE_STEPS`` without a step of it. So an outlier changes nothing, and
after a slow hour the list is back when half of a cell is new.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from math import exp2, log2
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ostinato.core.errors import ConfigError
from ostinato.core.plan import StepPlan

KEPT_STEPS = 15
"""Measured steps of a cell."""

WELL_MEASURED = 3
"""Steps from which on a cell counts in full."""

HALF_LIFE_STEPS, LEAST_WEIGHT = 16, 0.02
"""How soon a cell without new steps counts for half, and for how much it counts in the end."""

LEAST_MEASURED = 64
"""Tokens of the largest step from which on the time of a prompt can be told."""

FIT_EVERY_S = 0.5
"""Measured seconds after which prices are fitted again, and at step 4, 8, 16 and so on; a fit takes
about 3 ms."""

ALIKE = 1.15
"""Ratio of mean errors up to which two lists fit alike."""

LIKELY_FREE = 8
"""Free tokens where lists fit alike: on the processors measured so far, eight rows cost what one
does."""

MOST_KEY_SHARE = 8
"""A key costs at most this part of a token."""

NUM_REFINEMENTS = 3
"""Passes in which cells that do not fit lose weight: about the least absolute errors."""


@dataclass(frozen=True, slots=True)
class Work:
    """The work of one step, or of several.

    Attributes:
        steps: Forward passes.
        tokens: Tokens that go through the model.
        pairs: Pairs of a query and a key that it sees.
        keys: Keys that are read, once for each sequence of a step.
    """

    steps: int
    tokens: int
    pairs: int
    keys: int = 0


@dataclass(frozen=True, slots=True)
class StepPrices:
    """The price list of a step.

    Attributes:
        fixed_s: Fixed seconds per step.
        token_s: Seconds per token.
        pair_s: Seconds per pair of query and key.
        origin: Source of the prices, in a few words.
        key_s: Seconds per key that a sequence of a step reads.
        free_tokens: Tokens of a step that cost nothing beside ``fixed_s``.
    """

    fixed_s: float
    token_s: float
    pair_s: float
    origin: str = "given"
    key_s: float = 0.0
    free_tokens: int = 0

    def __post_init__(self) -> None:
        """Check the prices.

        Raises:
            ConfigError: One is negative, or all are zero.
        """
        prices = (self.fixed_s, self.token_s, self.pair_s, self.key_s)
        if not all(0 <= price < float("inf") for price in prices) or not any(prices):
            raise ConfigError(
                f"fixed_s={self.fixed_s}, token_s={self.token_s}, pair_s={self.pair_s}, "
                f"key_s={self.key_s}: must be at least 0, and not all 0"
            )

    def seconds(self, work: Work) -> float:
        """Return how long work takes."""
        return (
            work.steps * self.fixed_s
            + max(0, work.tokens - work.steps * self.free_tokens) * self.token_s
            + work.pairs * self.pair_s
            + work.keys * self.key_s
        )

    def prompt_s(self, start: int, num_tokens: int, num_free: int = 0) -> float:
        """Return the time of a prompt's tokens after ``start`` others, beside other work.

        Of the tokens, ``num_free`` cost nothing but their attention.
        """
        return (
            max(0, num_tokens - num_free) * self.token_s
            + prompt_pairs(start, num_tokens) * self.pair_s
            + (start + num_tokens) * self.key_s
        )

    def tokens_for_rate(self, share: float, start: int, limit_tokens: int) -> int:
        """Return the fewest tokens of a step that keep a share of the highest rate of a prompt.

        These are tokens after ``start`` others, whose keys each step reads.
        """
        overhead_s = self.fixed_s - self.token_s * self.free_tokens + start * self.key_s
        each_s = self.token_s + start * self.pair_s
        if overhead_s * share >= limit_tokens * each_s * (1 - share):
            return limit_tokens
        num_tokens = round(overhead_s * share / each_s / (1 - share))
        return min(limit_tokens, max(1, self.free_tokens, num_tokens))


Measured = Sequence[tuple[Work, float]]
"""Work and seconds of each step."""


def prompt_pairs(start: int, num_tokens: int) -> int:
    """Return the pairs of a query and a key of tokens after ``start`` others."""
    return num_tokens * start + num_tokens * (num_tokens + 1) // 2


def plan_work(plan: StepPlan) -> Work:
    """Return the work of one planned step."""
    pairs = sum(prompt_pairs(s.start, len(s.tokens)) for s in plan.sequences)
    return Work(1, plan.num_tokens, pairs, sum(s.end for s in plan.sequences))


def fit(measured: Measured, origin: str, weights: Sequence[float] = ()) -> StepPrices:
    """Fit the price list to measured runs.

    Args:
        measured: Work and seconds of each run; at least three that differ in kind.
        origin: What was measured, in a few words.
        weights: How much each run counts; all alike if empty.

    Raises:
        ConfigError: There are too few runs, or they took no time.

    Source: non-negative least squares by dropping negative unknowns (after Lawson and Hanson, 1974;
    with four unknowns that is enough), once for each power of two of free tokens. Runs are weighted
    by their time, so that short ones count.
    """
    seconds = np.array([s for _, s in measured], np.float64)
    if len(measured) < 3 or not (seconds > 0).all():
        raise ConfigError(f"{len(measured)} measured runs: at least 3 are needed, of above 0 s")
    given = np.array(weights or [1.0] * len(measured), np.float64)
    per_step = max(work.tokens // work.steps for work, _ in measured)
    choices = [0, *(1 << bit for bit in range(1, per_step.bit_length() - 1))]
    fits = [
        _fit_bend(measured, seconds, given, free, has_keys)
        for has_keys in (False, True)
        for free in choices
    ]
    plausible = [one for one in fits if one.is_plausible]
    lowest = min(one.error for one in plausible)
    alike = [one for one in plausible if one.error <= lowest * ALIKE + 1e-9]
    best = min(alike, key=lambda one: abs(log2(max(1, one.free_tokens) / LIKELY_FREE)))
    overhead_s, token_s, key_s, pair_s = best.prices
    free_tokens = best.free_tokens if token_s else 0
    fixed_s = overhead_s + free_tokens * token_s
    return StepPrices(fixed_s, token_s, pair_s, origin, key_s, free_tokens)


class _Fit(NamedTuple):
    """Prices for one number of free tokens, and their weighted relative error."""

    error: float
    free_tokens: int
    prices: list[float]

    @property
    def is_plausible(self) -> bool:
        """Whether a key costs far less than a token.

        In short prompts both are alike in number, so that figures do not tell.
        """
        _, token_s, key_s, _ = self.prices
        return key_s * MOST_KEY_SHARE <= token_s


def _fit_bend(
    measured: Measured,
    seconds: npt.NDArray[np.float64],
    given: npt.NDArray[np.float64],
    free: int,
    has_keys: bool,
) -> _Fit:
    rows = [
        [w.steps, max(w.tokens, w.steps * free), w.keys * has_keys, w.pairs] for w, _ in measured
    ]
    relative = np.array(rows, np.float64) / seconds[:, None]  # (num_runs, 4)
    weights = given
    for _ in range(NUM_REFINEMENTS):
        prices = _non_negative(relative * weights[:, None], weights)
        errors = np.abs(relative @ prices - 1)
        weights = given / np.sqrt(np.maximum(errors, 0.02))
    error = float((errors * given).sum() / given.sum())
    return _Fit(error * ALIKE if has_keys else error, free, prices.tolist())


def _non_negative(
    rows: npt.NDArray[np.float64], target: npt.NDArray[np.float64]
) -> npt.NDArray[np.float64]:
    kept = [column for column in range(rows.shape[1]) if rows[:, column].any()]
    while True:
        scale = rows[:, kept].max(axis=0)
        solution, *_ = np.linalg.lstsq(rows[:, kept] / scale, target, rcond=None)
        if (solution >= 0).all() or len(kept) == 1:
            break
        del kept[int(np.argmin(solution))]
    prices = np.zeros(rows.shape[1])
    prices[kept] = np.abs(solution / scale)
    return prices


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
        now: The prices; None until three kinds of steps are measured.
        most_tokens: Tokens of the largest measured step.
    """

    def __init__(self, now: StepPrices | None = None) -> None:
        """Begin unmeasured, or with given prices."""
        self._given = now
        self.reset()

    def reset(self) -> None:
        """Forget all that was measured."""
        self.now = self._given
        self.most_tokens = 0 if self.now is None else 2**31
        self._num_predicted, self._measured_s, self._predicted_s = 0, 0.0, 0.0
        self._cells: dict[tuple[int, int], _Cell] = {}
        self._num_noted, self._unfitted_s = 0, 0.0

    @property
    def times(self) -> StepTimes:
        """Predictions and measurements so far."""
        return StepTimes(self._num_predicted, self._measured_s, self._predicted_s, self.now)

    def prompt_s(self, start: int, num_tokens: int) -> float | None:
        """Return how long a prompt's tokens take after ``start`` others; None if unknown."""
        if self.now is None or self.most_tokens < LEAST_MEASURED:
            return None
        return self.now.fixed_s + self.now.prompt_s(start, num_tokens)

    def note(self, work: Work, seconds: float) -> None:
        """Learn from a step; the first is not typical, since memory is touched for the first time.

        Cost: a fit every ``FIT_EVERY_S``.
        """
        if seconds <= 0 or not work.tokens:
            return
        self._num_noted += 1
        self.most_tokens = max(self.most_tokens, work.tokens)
        if self.now is not None:
            self._num_predicted += 1
            self._measured_s += seconds
            self._predicted_s += self.now.seconds(work)
        if self._num_noted > 1:
            cell = work.tokens.bit_length(), work.pairs.bit_length()
            self._cells.setdefault(cell, _Cell()).add(work, seconds, self._num_noted)
            self._unfitted_s += seconds
        number = self._num_noted
        if self._unfitted_s >= FIT_EVERY_S or (number > 2 and not number & (number - 1)):
            self._fit()

    def _fit(self) -> None:
        if len(self._cells) < 3:
            return
        self._unfitted_s = 0.0
        cells = self._cells.values()
        weights = [cell.weight(self._num_noted) for cell in cells]
        self.now = fit([cell.median(self.now) for cell in cells], "measured", weights)


class _Cell:
    """The newest steps of about the same work."""

    def __init__(self) -> None:
        self._steps: deque[tuple[Work, float]] = deque(maxlen=KEPT_STEPS)
        self._newest = 0

    def add(self, work: Work, seconds: float, number: int) -> None:
        """Keep a step, by its number among all."""
        self._steps.append((work, seconds))
        self._newest = number

    def weight(self, number: int) -> float:
        """Return how much it counts after so many steps of any work."""
        age = (number - self._newest) / HALF_LIFE_STEPS
        return min(1.0, len(self._steps) / WELL_MEASURED) * max(LEAST_WEIGHT, exp2(-age))

    def median(self, prices: StepPrices | None) -> tuple[Work, float]:
        """Return the step in the middle by measured to predicted time; of two the faster."""

        def ratio(step: tuple[Work, float]) -> float:
            work, seconds = step
            expected = float(work.tokens) if prices is None else prices.seconds(work)
            return float(seconds / expected)

        return sorted(self._steps, key=ratio)[(len(self._steps) - 1) // 2]
