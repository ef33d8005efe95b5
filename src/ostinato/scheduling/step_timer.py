"""Bounds steps by time, with the price list of this machine.

While anything else decodes or waits, a step takes ``max_step_ms``, or longer where less would cost
more than a tenth of the prompt rate, since each step reads all weights; at most ``MAX_DECODES``
times as long as without prompts. Alone, a prompt takes the smallest step that is as fast as any
within ``LOST_ALONE``: a request that arrives meanwhile waits for that step.

Predictions may be wrong where nothing was measured: more tokens, longer prompts, more sequences
than ever before. So a step takes at most ``MAX_LATE`` times its limit whatever the prices are, by
the bound of ``learned_prices``: it grows in all kinds of work as fast as what was measured allows.
An engine that has measured nothing takes a small step: a second where a large model computes 64
tokens a second.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ostinato.core.plan import StepPlan
from ostinato.sched.step_planner import StepCosts
from ostinato.scheduling.learned_prices import LearnedPrices, max_certain_tokens
from ostinato.scheduling.step_prices import StepPrices, Work, plan_work, prompt_pairs

FIRST_TOKENS = 64
"""Prompt tokens of a step while nothing is known of prices."""

NO_WORK = Work(1, 0, 0)

FIRST_PRICES = StepPrices(0.0, 1.0, 1 / 2048, "a guess, in tokens")
"""What counts as a token of the first steps: a token, or so many pairs of a query and a key."""

LOST_RATE = 0.1
"""Share of the prompt rate that steps may lose to stay within ``max_step_ms``."""

LOST_ALONE = 0.03
"""Share of the prompt rate that is lost where nothing else lives."""

MAX_DECODES = 8
"""A step takes at most so many times what its decodes alone would take, unless within the limit."""

FEW_TOKENS = 8
"""Tokens of a step whose time is about that of reading the weights."""

MAX_LATE = 2
"""A step takes at most so many times its limit, whatever is not measured yet."""


@dataclass(slots=True)
class StepMeter:
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

    def begin(self, decoding: list[int], starts: list[int], is_alone: bool) -> None:
        """Begin a step with sequences that decode, and with prompts that have begun."""
        num_decoding, keys = len(decoding), sum(decoding)
        decodes = Work(1, num_decoding, keys, keys)
        room_tokens, prices = self._max_tokens - num_decoding, self.prices.now
        if prices is None or not self._has_measured_enough:
            self.limit_s = float("inf")
            self._meter = StepMeter(room_tokens, decodes, FIRST_PRICES, FIRST_TOKENS + 1)
            return
        decodes_s = prices.seconds(decodes)
        self.limit_s = self._max_step_s
        if self.prices.fewest_tokens <= max(num_decoding, FEW_TOKENS):  # else its time is a guess
            self.limit_s = self._limit_s(prices, decodes_s, max(starts, default=0), is_alone)
        free_tokens = max(0, prices.free_tokens - num_decoding)
        self._meter = StepMeter(
            room_tokens, decodes, prices, self.limit_s - decodes_s, free_tokens,
            self.prices.measured, MAX_LATE * self.limit_s,
        )  # fmt: skip

    def max_chunk_tokens(self, start: int) -> int:
        """Return how many tokens after ``start`` others still fit into the step."""
        return self._meter.max_chunk_tokens(start)

    def take(self, start: int, num_tokens: int) -> None:
        """Note that a prompt computes so many tokens in this step."""
        self._meter.take(start, num_tokens)

    def note(self, plan: StepPlan, seconds: float) -> None:
        """Learn from a step that has run."""
        self.prices.note(plan_work(plan), seconds)

    def meter(self, num_tokens: int) -> StepMeter:
        """Return what is left of the current step, at most so many tokens."""
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
