"""Fits a price list to measured steps."""

from collections.abc import Sequence
from math import log2
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ostinato.core.errors import ConfigError
from ostinato.scheduling.step_prices import StepPrices, Work

ALIKE = 1.15
"""Ratio of mean errors up to which two lists fit alike."""

LIKELY_FREE = 8
"""Free tokens where lists fit alike: on the processors measured so far, eight rows cost what one
does."""

MOST_KEY_SHARE = 8
"""A key costs at most this part of a token."""

NUM_REFINEMENTS = 3
"""Passes in which steps that do not fit lose weight: about the least absolute errors."""

Measured = Sequence[tuple[Work, float]]
"""Work and seconds of each step."""


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
