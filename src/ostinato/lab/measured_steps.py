"""How long did the steps of a recorded run take?

The recording has the times of each step, and its replay on the real scheduler what each step
computed; together they are what a cost model is fitted to::

    recorded      begun 0.0 ms, ended 9.1 ms     begun 9.3 ms, ended 10.8 ms
    replayed      155 tokens behind 512          1 token behind 667
    measured      9.3 ms for 155 tokens ...      1.5 ms for 1 token ...

What an engine does between a step and the next one, which it begins at once, counts as part of the
first: whoever waits for a token waits for that as well.
"""

from collections.abc import Sequence
from statistics import median

from ostinato.core.errors import ConfigError
from ostinato.lab.cost_model import CostModel, Work, fit, plan_work
from ostinato.lab.recording import Recording
from ostinato.lab.replay import Replay
from ostinato.traces.format import Steps

LONGEST_PAUSE_S = 0.002
"""Between two steps, above which the engine is taken to have waited for work."""

Measured = list[tuple[Work, float]]
"""Work and seconds of each step."""


def measured_steps(recording: Recording) -> Measured:
    """Return what each step of a recorded run computed, and the seconds that it took.

    Raises:
        ConfigError: The recording is in part, so that its replay plans other steps.

    Cost: a replay.
    """
    if not recording.is_whole:
        raise ConfigError(
            f"{recording.name} is a recording in part: what its steps computed is not known"
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
    pairs = zip(works, taken, strict=True)
    return [(work, seconds) for work, seconds in pairs if work.tokens and seconds > 0]


def cost_of(recording: Recording) -> CostModel:
    """Fit prices to a recorded run's own steps.

    Raises:
        ConfigError: The recording is in part, or has too few steps.
    """
    return fit(measured_steps(recording), "as measured when it was recorded")


def of_repeats(repeats: Sequence[Measured]) -> Measured:
    """Return steps with the median of their times in runs that were done several times.

    Runs in which other steps were planned are left out, but for the first.
    """
    first = [work for work, _ in repeats[0]]
    alike = [steps for steps in repeats if [work for work, _ in steps] == first]
    return [(work, median(steps[place][1] for steps in alike)) for place, work in enumerate(first)]
