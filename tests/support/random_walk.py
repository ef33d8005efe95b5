"""A random walk through worlds of traffic: one seed, any number of events, every one checked.

What a world is, and what can happen in it, is for the caller to say: the scheduler's walk
(``tests.sched.walk``) and the one with everything switched on (``tests.properties.heart_walk``).
"""

import random
import sys
from collections import Counter
from collections.abc import Callable
from typing import Protocol, TypeVar

from tqdm import tqdm

EVENTS_PER_WORLD = 150
"""Until another setting is drawn; a pool of 14 to 20 blocks is long under pressure by then."""


class World(Protocol):
    """Where things happen, and are checked as they happen."""

    met: Counter[str]

    @property
    def setting(self) -> object:
        """What kind of world it is."""

    def finish(self) -> None:
        """Let everybody end."""


WorldT = TypeVar("WorldT", bound=World)


def rarely(rng: random.Random, share: float) -> bool:
    """Whether something happens that happens in so many cases."""
    return rng.random() < share


def random_suffix(rng: random.Random) -> str:
    """Draw what a prompt goes on with behind the beginning of an earlier one."""
    return "".join(rng.choices("AB", k=rng.choice([0, 1, 1, 2, 2, 3, 5, 9])))


def walk_worlds(
    make: Callable[[random.Random], WorldT],
    event: Callable[[WorldT, random.Random], object],
    seed: int,
    num_events: int,
    show_progress: bool = False,
) -> Counter[str]:
    """Walk, checking after every event.

    Args:
        make: Draws a setting and makes its world.
        event: Lets something happen at random.
        seed: Of everything.
        num_events: How many.
        show_progress: Whether to draw a bar.

    Returns:
        How often each thing was met.

    Raises:
        AssertionError: With the seed, the event and the setting.
    """
    rng, met = random.Random(seed), Counter[str]()
    world = make(rng)
    for number in tqdm(range(num_events), disable=not show_progress, unit="events"):
        try:
            event(world, rng)
            if number % EVENTS_PER_WORLD == EVENTS_PER_WORLD - 1:
                world.finish()
                met += world.met
                world = make(rng)
        except (AssertionError, KeyError, IndexError) as error:
            where = f"seed {seed}, event {number}, {world.setting}"
            raise AssertionError(f"{where}: {error}") from error
    world.finish()
    return met + world.met


def walk_by_hand(walk: Callable[[int, int, bool], Counter[str]]) -> None:
    """Walk as many events as the command line says, and print what was met."""
    for thing, times in sorted(walk(20_240, int(sys.argv[1]), True).items()):
        print(f"{times:>9,} {thing}")
