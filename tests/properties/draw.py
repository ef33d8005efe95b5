"""Scenarios drawn from lists of choices, by a random walk or by Hypothesis.

A scenario is settings and then events. Both are described as lists to choose from, so that a walk
of any length (seeded, fast, does not shrink) and Hypothesis (shrinks to the shortest scenario
that fails) draw the same ones. By hand, with a progress bar::

    python -m tests.properties.draw scheduler 200000
    python -m tests.properties.draw indexes 200000 7       # with another seed
"""

import random
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from hypothesis import strategies as st
from tqdm import tqdm

EVENTS_PER_SCENARIO = 130
"""Events until other settings are drawn; by then a small pool has long been under pressure."""

NIGHTLY_SEEDS = (20_240, 20_241)
"""Seeds of the long walks, 200,000 events each."""


T = TypeVar("T")


class Draw(Protocol):
    """Chooses one of a list; repeats make a choice likelier, and simple ones stand first."""

    def __call__(self, choices: Sequence[T]) -> T:
        """Return one of the choices."""


Choices = Sequence[Any] | Callable[[Draw], Any]
"""What an argument is drawn from."""

Event = tuple[str, dict[str, Any]]
"""Name of a scenario's method, and its arguments."""


class AnyScenario(Protocol):
    """Something that events happen to, and that checks itself after each of them."""

    @property
    def settings(self) -> object:
        """What it was made from."""

    @property
    def counts(self) -> Counter[str]:
        """What has happened so far, and how often."""

    def finish(self) -> None:
        """Let everything end, and check that nothing is left."""


ScenarioT = TypeVar("ScenarioT", bound=AnyScenario)


def weighted(weights: Mapping[str, int]) -> Sequence[str]:
    """Return choices in which each name stands as often as its weight says."""
    return tuple(name for name, weight in weights.items() for _ in range(weight))


def draw_event(
    draw: Draw, names: Sequence[str], arguments: Mapping[str, Mapping[str, Choices]]
) -> Event:
    """Draw what happens next, and its arguments."""
    name = draw(names)
    return name, {
        argument: choices(draw) if callable(choices) else draw(choices)
        for argument, choices in arguments.get(name, {}).items()
    }


def rarely(share: float) -> Sequence[bool]:
    """Return choices of which so large a share is True."""
    return (False,) * round(1 / share - 1) + (True,)


def random_walk(
    start: Callable[[Draw], ScenarioT],
    next_event: Callable[[ScenarioT, Draw], Event],
    seed: int,
    num_events: int,
    show_progress: bool = False,
) -> Counter[str]:
    """Run one scenario after another, checked after every event.

    Returns:
        How often each thing has happened.

    Raises:
        AssertionError: With the seed, the event's number, the settings and the last events.
    """
    rng, counts = random.Random(seed), Counter[str]()

    def draw(choices: Sequence[T]) -> T:
        return rng.choice(choices)

    scenario, events = start(draw), list[Event]()
    for number in tqdm(range(num_events), disable=not show_progress, unit="events"):
        try:
            if len(events) == EVENTS_PER_SCENARIO or number == num_events - 1:
                scenario.finish()
                counts += scenario.counts
                scenario, events = start(draw), []
            else:
                events.append(next_event(scenario, draw))
                _apply(scenario, events[-1])
        except Exception as error:
            where = f"seed {seed}, event {number}, {scenario.settings}, ... {events[-3:]}"
            raise AssertionError(f"{where}: {error!r}") from error
    return counts


def run_drawn_by_hypothesis(
    start: Callable[[Draw], ScenarioT],
    next_event: Callable[[ScenarioT, Draw], Event],
    data: st.DataObject,
) -> None:
    """Run one scenario of up to 40 events; on failure its events are shown, ready to be pasted."""

    def draw(choices: Sequence[T]) -> T:
        return data.draw(st.sampled_from(choices))

    scenario, events = start(draw), list[Event]()
    try:
        for _ in range(data.draw(st.integers(0, 40))):
            events.append(next_event(scenario, draw))
            _apply(scenario, events[-1])
        scenario.finish()
    except Exception as error:
        error.add_note("\n".join([f"{scenario.settings}", *map(_as_call, events)]))
        raise


def _apply(scenario: AnyScenario, event: Event) -> None:
    name, arguments = event
    getattr(scenario, name)(**arguments)


def _as_call(event: Event) -> str:
    name, arguments = event
    return f"scenario.{name}({', '.join(f'{k}={v!r}' for k, v in arguments.items())})"


def _main(kind: str, num_events: str, seed: str = str(NIGHTLY_SEEDS[0])) -> None:
    from tests.properties import test_indexes, test_scenarios

    walk = {"scheduler": test_scenarios.walk, "indexes": test_indexes.walk}[kind]
    for thing, times in sorted(walk(int(seed), int(num_events), show_progress=True).items()):
        print(f"{times:>9,} {thing}")


if __name__ == "__main__":
    _main(*sys.argv[1:])
