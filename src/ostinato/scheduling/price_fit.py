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

MAX_KEY_SHARE = 8
"""A key costs at most this part of a token."""

NUM_REFINEMENTS = 3
"""Passes in which steps that do not fit lose weight: about the least absolute errors."""

DAMPING = 1e-12
"""What keeps normal equations solvable where two kinds of work are in proportion in all runs."""

Measured = Sequence[tuple[Work, float]]
"""Work and seconds of each step."""

Floats = npt.NDArray[np.float64]


def fit(measured: Measured, origin: str, weights: Sequence[float] = ()) -> StepPrices:
    """Fit the price list to measured runs.

    Args:
        measured: Work and seconds of each run; at least three that differ in kind.
        origin: What was measured, in a few words.
        weights: How much each run counts; all alike if empty.

    Raises:
        ConfigError: There are too few runs, or they took no time.

    Source: non-negative least squares by dropping negative unknowns (after Lawson and Hanson, 1974;
    with four unknowns that is enough), for all powers of two of free tokens in the same few calls.
    Runs are weighted by their time, so that short ones count.
    """
    seconds = np.array([s for _, s in measured], np.float64)
    if len(measured) < 3 or not (seconds > 0).all():
        raise ConfigError(f"{len(measured)} measured runs: at least 3 are needed, of above 0 s")
    given = np.array(weights or [1.0] * len(measured), np.float64)
    per_step = max(work.tokens // work.steps for work, _ in measured)
    choices = [0, *(1 << bit for bit in range(1, per_step.bit_length() - 1))]
    fits = _fit_bends(measured, seconds, given, choices)
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
        return key_s * MAX_KEY_SHARE <= token_s


def _fit_bends(
    measured: Measured, seconds: Floats, given: Floats, choices: list[int]
) -> list[_Fit]:
    """Fit all numbers of free tokens at once, first without the price of a key, then with it."""
    work = np.array([(w.steps, w.tokens, w.keys, w.pairs) for w, _ in measured], np.float64)
    free = np.array(choices * 2, np.float64)
    has_keys = np.arange(len(free)) >= len(choices)
    rows = np.repeat(work[None], len(free), axis=0)  # (num_fits, num_runs, 4)
    rows[:, :, 1] = np.maximum(work[:, 1], work[:, 0] * free[:, None])
    rows[:, :, 2] *= has_keys[:, None]
    relative = rows / seconds[:, None]
    weights = np.repeat(given[None], len(free), axis=0)
    for _ in range(NUM_REFINEMENTS):
        prices = _non_negative(relative * weights[:, :, None], weights)
        errors = np.abs((relative * prices[:, None]).sum(axis=2) - 1)
        weights = given / np.sqrt(np.maximum(errors, 0.02))
    error = (errors * given).sum(axis=1) / given.sum() * np.where(has_keys, ALIKE, 1.0)
    return list(map(_Fit, error.tolist(), choices * 2, prices.tolist()))


def _non_negative(rows: Floats, target: Floats) -> Floats:
    """Solve all fits by their normal equations; without BLAS, whose threads disturb the step's.

    Args:
        rows: Not negative, shape (num_fits, num_runs, 4).
        target: Shape (num_fits, num_runs).

    Returns:
        Shape (num_fits, 4).
    """
    size = rows.max(axis=1)
    kept = size > 0
    scaled = rows / np.where(kept, size, 1.0)[:, None]
    products = (scaled[:, :, :, None] * scaled[:, :, None]).sum(axis=1)
    sums = (scaled * target[:, :, None]).sum(axis=1)
    while True:
        both = kept[:, :, None] & kept[:, None]
        alone = np.eye(rows.shape[2]) * np.where(kept, DAMPING * rows.shape[1], 1.0)[:, None]
        solution = np.linalg.solve(products * both + alone, (sums * kept)[:, :, None])[:, :, 0]
        drops = (solution.min(axis=1) < 0) & (kept.sum(axis=1) > 1)
        if not drops.any():
            return np.abs(solution) / np.where(kept, size, 1.0)
        kept[drops, solution[drops].argmin(axis=1)] = False
