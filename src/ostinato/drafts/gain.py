"""How many drafted rows of a step are worth their price.

A step of some decodes brings a token each. A further row brings one more if its draft and all
before it are right, and takes its price in any case, so rows are added, the likeliest first, while
they raise the tokens per second of the step::

    tokens   b + p + p² + ...            b decodes; p: how often a draft of this kind is right
    seconds  t + r + r  + ...            t: the step without drafts; r: one more row

What a row costs depends on the number format and the processor: reading the weights takes a step
of few rows, and unpacking them is paid row by row. It is measured by the steps that ran.
"""

from collections.abc import Sequence
from heapq import heapify, heapreplace

from ostinato.scheduling.learned_prices import LearnedPrices
from ostinato.scheduling.step_prices import StepPrices, Work

FIRST_ROW_SHARE = 0.2
"""Price of a row as a share of the step's, until one was measured: that of 8-bit weights here."""

MIN_ROW_SHARE = 0.01
"""A row never counts for less: where it is lost in the noise it still has to be planned."""

FEW_ROWS = 64
"""Rows of the largest step whose time says what one more row of a small step costs."""

KEPT_STEPS = 16
"""Steps for which the price of a row is kept before it is derived from the measured ones again."""


class RowPrice:
    """Seconds of a step of decodes, and of one more row in it."""

    def __init__(self, prices: LearnedPrices) -> None:
        """Derive them from an engine's price list."""
        self._prices = prices
        self._share, self._age = FIRST_ROW_SHARE, 0

    def of(self, ends: Sequence[int]) -> tuple[float, float]:
        """Return seconds of a step of decodes and of one more row; in steps while unknown.

        Args:
            ends: Tokens of each sequence that decodes.
        """
        prices = self._prices.now
        if prices is None:
            return 1.0, FIRST_ROW_SHARE
        if self._age == 0:
            self._share = row_share(prices, self._prices.measured)
            self._age = KEPT_STEPS
        self._age -= 1
        keys, rows = sum(ends), len(ends)
        step_s = prices.seconds(Work(1, rows, keys, keys)) or 1e-9
        attention_s = keys / rows * prices.pair_s
        return step_s, self._share * prices.seconds(Work(1, 1, 0)) + attention_s


def row_share(prices: StepPrices, measured: Sequence[tuple[Work, float]]) -> float:
    """Return the price of one more row in a small step, as a share of a step of one row.

    It is the slope between the measured steps of the fewest rows and those of more, without what
    attention takes: the list's own price of a token is that of a long prompt, and rows that it
    calls free are not. A list that was given counts as it is.
    """
    if not measured:
        one_s, two_s = (prices.seconds(Work(1, rows, 0)) for rows in (1, 2))
        return max(MIN_ROW_SHARE, two_s / one_s - 1) if one_s else FIRST_ROW_SHARE
    points: dict[int, float] = {}
    for work, seconds in measured:
        if work.tokens <= FEW_ROWS:
            plain_s = seconds - work.pairs * prices.pair_s - work.keys * prices.key_s
            points[work.tokens] = min(plain_s, points.get(work.tokens, plain_s))
    if len(points) < 2:
        return FIRST_ROW_SHARE
    rows, *more = sorted(points)
    one_s = points[rows]
    if one_s <= 0:
        return FIRST_ROW_SHARE
    slopes = sorted((points[n] - one_s) / (n - rows) / one_s for n in more)
    return max(MIN_ROW_SHARE, slopes[len(slopes) // 2])


def rows_worth(
    chances: Sequence[tuple[float, int]], step_s: float, row_s: float, num_decodes: int
) -> list[int]:
    """Return how many drafted rows each sequence gets.

    Args:
        chances: Of each sequence, how often one of its drafts is right, and how many it has.
        step_s: Seconds of the step without drafts.
        row_s: Seconds of one more row.
        num_decodes: Sequences that decode in the step, with and without drafts.
    """
    counts = [0] * len(chances)
    queue = [(-chance, index) for index, (chance, limit) in enumerate(chances) if limit]
    heapify(queue)
    tokens, seconds = float(num_decodes), step_s
    while queue:
        negative, index = queue[0]
        if -negative * seconds <= row_s * tokens:
            break
        counts[index] += 1
        tokens, seconds = tokens - negative, seconds + row_s
        chance, limit = chances[index]
        heapreplace(queue, (negative * chance if counts[index] < limit else 0.0, index))
    return counts
