"""The price list of a step: what tokens, keys and pairs cost.

::

    seconds = fixed                               the weights are read, the kernels started
            + token * tokens above free_tokens    the matrices are multiplied
            + key   per key read, by sequence     the cache is read
            + pair  per query and key             attention

While the weights are read, a few tokens are computed for nothing: ``free_tokens`` is the bend of
the roofline (Williams, Waterman and Patterson, Communications of the ACM 52, 2009).
"""

from dataclasses import dataclass, replace
from math import inf
from typing import Any

from ostinato.core.errors import ConfigError
from ostinato.core.plan import StepPlan

_PRICES = ("fixed_s", "token_s", "pair_s", "key_s")


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
        prices = {name: getattr(self, name) for name in _PRICES}
        if not all(0 <= price < inf for price in prices.values()) or not any(prices.values()):
            given = ", ".join(f"{name}={price}" for name, price in prices.items())
            raise ConfigError(f"{given}: must be at least 0, and not all 0")

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

    def max_prompt_tokens(self, start: int, limit: int, seconds: float, num_free: int = 0) -> int:
        """Return how many tokens, at most ``limit``, take no more than ``seconds``.

        These are tokens after ``start`` others, as in ``prompt_s``, which grows with each token.
        """
        low, high = 0, max(0, limit)
        while low < high:
            number = (low + high + 1) // 2
            if (
                max(0, number - num_free) * self.token_s
                + (number * start + number * (number + 1) // 2) * self.pair_s
                + (start + number) * self.key_s
            ) <= seconds:
                low = number
            else:
                high = number - 1
        return low

    def times(self, factor: float) -> "StepPrices":
        """Return the prices of a machine that is slower by ``factor``."""
        prices: dict[str, Any] = {name: getattr(self, name) * factor for name in _PRICES}
        return replace(self, **prices)

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


def prompt_pairs(start: int, num_tokens: int) -> int:
    """Return the pairs of a query and a key of tokens after ``start`` others."""
    return num_tokens * start + num_tokens * (num_tokens + 1) // 2


def plan_work(plan: StepPlan) -> Work:
    """Return the work of one planned step."""
    num_tokens = pairs = keys = 0
    for sequence in plan.sequences:
        number = len(sequence.tokens)
        num_tokens += number
        pairs += prompt_pairs(sequence.start, number)
        keys += sequence.start + number
    return Work(1, num_tokens, pairs, keys)
