"""How long does a step take?

Three prices, each with a cause::

    seconds = step    once per step        the weights are read, the kernels started
            + token   per token computed   the matrices are multiplied
            + pair    per query and key    attention

A prompt of ``n`` tokens behind ``s`` cached ones has ``n * s + n * (n + 1) / 2`` pairs; a decoded
token has as many as its sequence has tokens. The prices are given, or fitted to a few measured
runs: each run is a sum of steps, so its features are sums as well and the fit is linear, with no
price below zero.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from ostinato.core.errors import ConfigError
from ostinato.core.plan import ScheduledSequence, StepPlan


@dataclass(frozen=True, slots=True)
class Work:
    """What one step, or a sum of steps, computes.

    Attributes:
        steps: Forward passes.
        tokens: Tokens that go through the model.
        pairs: Pairs of a query and a key that it sees.
    """

    steps: int
    tokens: int
    pairs: int

    def __add__(self, other: "Work") -> "Work":
        """Do one after the other."""
        return Work(self.steps + other.steps, self.tokens + other.tokens, self.pairs + other.pairs)


@dataclass(frozen=True, slots=True)
class CostModel:
    """Prices of a step.

    Attributes:
        step_s: Seconds per step.
        token_s: Seconds per token.
        pair_s: Seconds per pair of query and key.
        origin: Where the prices come from, in a few words.
    """

    step_s: float
    token_s: float
    pair_s: float
    origin: str = "given"

    def __post_init__(self) -> None:
        """Refuse prices that cannot be.

        Raises:
            ConfigError: One is negative, or all are zero.
        """
        prices = (self.step_s, self.token_s, self.pair_s)
        if not all(0 <= price < float("inf") for price in prices) or not any(prices):
            raise ConfigError(
                f"step_s={self.step_s}, token_s={self.token_s}, pair_s={self.pair_s}: prices are "
                "at least 0, and not all are 0"
            )

    def seconds(self, work: Work) -> float:
        """Return how long work takes."""
        return work.steps * self.step_s + work.tokens * self.token_s + work.pairs * self.pair_s

    def prefill_s(self, num_tokens: int, num_cached: int = 0) -> float:
        """Return what a prompt's prefill costs behind cached tokens, the steps aside."""
        return self.seconds(prefill_work(num_tokens - num_cached, num_cached, num_steps=0))


ASSUMED = CostModel(0.008, 1 / 25_000, 1 / 25_000 / 30_000, "assumed: 8B parameters, one H100")
"""For figures that nobody measured: 16 GB of weights at 2 TB/s, 16 GFLOP a token at 400 TFLOP/s,
and 0.5 MFLOP a pair, so that attention weighs as much as the rest at 30,000 tokens."""


def prefill_work(num_tokens: int, num_cached: int = 0, num_steps: int = 1) -> Work:
    """Return the work of computing so many tokens behind cached ones."""
    pairs = num_tokens * num_cached + num_tokens * (num_tokens + 1) // 2
    return Work(num_steps, num_tokens, pairs)


def plan_work(plan: StepPlan) -> Work:
    """Return the work of one planned step."""
    pairs = sum(map(_pairs, plan.sequences))
    return Work(1, plan.num_tokens, pairs)


def fit(measured: Sequence[tuple[Work, float]], origin: str) -> CostModel:
    """Fit the prices to measured runs.

    Args:
        measured: Work and seconds of each run; at least three that differ in kind.
        origin: What was measured, in a few words.

    Raises:
        ConfigError: There are too few runs, or they took no time.

    Source: non-negative least squares by dropping what comes out negative (Lawson and Hanson,
    1974, has three unknowns in its worst case and needs no more here). Runs are weighed by their
    time, so that short ones count.
    """
    rows = np.array([[w.steps, w.tokens, w.pairs] for w, _ in measured], np.float64)
    seconds = np.array([s for _, s in measured], np.float64)
    if len(measured) < 3 or not (seconds > 0).all():
        raise ConfigError(f"{len(measured)} measured runs: at least 3 are needed, of above 0 s")
    weighed = rows / seconds[:, None]
    kept = [0, 1, 2]
    while True:
        scale = weighed[:, kept].max(axis=0)
        solution, *_ = np.linalg.lstsq(weighed[:, kept] / scale, np.ones(len(rows)), rcond=None)
        prices = solution / scale
        if (prices >= 0).all() or len(kept) == 1:
            break
        del kept[int(np.argmin(solution))]
    named = dict.fromkeys(range(3), 0.0) | dict(zip(kept, np.abs(prices).tolist(), strict=True))
    return CostModel(named[0], named[1], named[2], origin)


def error_of(model: CostModel, measured: Iterable[tuple[Work, float]]) -> float:
    """Return the relative error that half of what was measured stays below."""
    return median(abs(model.seconds(work) - s) / s for work, s in measured)


def _pairs(sequence: ScheduledSequence) -> int:
    count = len(sequence.tokens)
    return count * sequence.start + count * (count + 1) // 2
