"""The time of a step, from given or measured costs.

The prices are those that bound the engine's steps, ``scheduling.step_prices``: given, or fitted to
the steps of a recorded run. The recording has the times of each step, its replay on the real
scheduler what each step computed::

    recorded      begun 0.0 ms, ended 9.1 ms     begun 9.3 ms, ended 10.8 ms
    replayed      155 tokens after 512           1 token after 667
    measured      9.3 ms for 155 tokens ...      1.5 ms for 1 token ...

The pause before the next step counts as part of a step, if the next one begins at once.
What a model on a GPU takes is derived from its config instead: see ``roofline``.
"""

from collections.abc import Sequence
from dataclasses import astuple, dataclass
from statistics import median
from typing import Protocol

import numpy as np
import numpy.typing as npt

from ostinato.core.errors import ConfigError
from ostinato.core.plan import StepPlan
from ostinato.lab.replay.replay import Replay
from ostinato.lab.traces.recording import Recording
from ostinato.scheduling.price_fit import Measured, fit
from ostinato.scheduling.step_prices import StepPrices, Work, plan_work
from ostinato.traces.format import Steps

PerRequest = npt.NDArray[np.float64]
"""A figure for each request, shape (num_requests,)."""

LONGEST_PAUSE_S = 0.002
"""Pause between two steps above which the engine is considered idle."""

DECODES_PER_STEP = 8
"""Sequences per decode step, where memory is not modelled."""


class StepCost(Protocol):
    """A model of the time that work takes."""

    @property
    def origin(self) -> str:
        """The source of the costs, in a few words."""

    def step_s(self, plan: StepPlan) -> float:
        """Return how long a planned step takes."""

    def prefill_s(self, num_tokens: PerRequest, num_cached: PerRequest) -> PerRequest:
        """Return the time of prompts after their hits, without the fixed part of steps."""

    def decode_s(self, num_tokens: PerRequest, num_new: PerRequest) -> PerRequest:
        """Return the time of answers after prompts, several at a time."""


@dataclass(frozen=True, slots=True)
class CostModel(StepPrices):
    """The engine's price list of a step, and what whole requests cost by it."""

    def step_s(self, plan: StepPlan) -> float:
        """Return how long a planned step takes."""
        return self.seconds(plan_work(plan))

    def prefill_s(self, num_tokens: PerRequest, num_cached: PerRequest) -> PerRequest:
        """Return the cost of prompts after their hits, without the fixed part of steps."""
        computed = num_tokens - num_cached
        pairs = computed * num_cached + computed * (computed + 1) / 2
        return computed * self.token_s + pairs * self.pair_s + num_tokens * self.key_s

    def decode_s(self, num_tokens: PerRequest, num_new: PerRequest) -> PerRequest:
        """Return the cost of answers, ``DECODES_PER_STEP`` at a time."""
        pairs = num_new * num_tokens + num_new * num_new / 2
        step_s = self.seconds(Work(1, DECODES_PER_STEP, 0))
        return num_new * step_s / DECODES_PER_STEP + pairs * (self.pair_s + self.key_s)


ASSUMED = CostModel(0.008, 1 / 25_000, 1 / 25_000 / 30_000, "assumed: 8B parameters, one H100")
"""Where no model is named: 16 GB of weights at 2 TB/s, 16 GFLOP a token at 400 TFLOP/s, and
0.5 MFLOP a pair, so that attention takes as long as the rest at 30,000 tokens."""


def error_of(model: StepPrices, measured: Measured) -> float:
    """Return the median relative error."""
    return median(abs(model.seconds(work) - s) / s for work, s in measured)


def measured_steps(recording: Recording) -> Measured:
    """Return what each step of a recorded run computed, and the seconds that it took.

    Raises:
        ConfigError: The recording is incomplete, so its replay plans different steps.

    Cost: a replay.
    """
    if not recording.is_whole:
        raise ConfigError(
            f"{recording.name} is an incomplete recording: the work of its steps is unknown"
        )
    times = [at for event in recording.events if isinstance(event, Steps) for at in event.times_us]
    begun, ended = times[::2], times[1::2]
    taken: list[float] = []
    for place, (start, end) in enumerate(zip(begun, ended, strict=True)):
        following = begun[place + 1] if place + 1 < len(begun) else end
        pause_s = (following - end) / 1_000_000
        taken.append((end - start) / 1_000_000 + (pause_s if pause_s < LONGEST_PAUSE_S else 0.0))
    works: list[Work] = []
    Replay(recording).run(watch_plan=lambda plan: works.append(plan_work(plan)))
    return [pair for pair in zip(works, taken, strict=True) if pair[0].tokens and pair[1] > 0]


def cost_of(recording: Recording) -> CostModel:
    """Fit prices to a recorded run's own steps.

    Raises:
        ConfigError: The recording is incomplete, or has too few steps.
    """
    return fit_cost(measured_steps(recording), "as measured when it was recorded")


def fit_cost(measured: Measured, origin: str) -> CostModel:
    """Fit prices to measured runs, as ``price_fit.fit``."""
    return CostModel(*astuple(fit(measured, origin)))


def of_repeats(repeats: Sequence[Measured]) -> Measured:
    """Return steps with the median of their times over repeated runs.

    Runs that planned other steps than the first run are dropped.
    """
    first = [work for work, _ in repeats[0]]
    alike = [steps for steps in repeats if [work for work, _ in steps] == first]
    return [(work, median(steps[place][1] for steps in alike)) for place, work in enumerate(first)]
