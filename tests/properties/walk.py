"""A random walk through worlds: one seed, any number of steps, every step checked.

By hand, with a progress bar::

    python -m tests.properties.walk 200000
"""

import random
import sys
from collections import Counter
from typing import get_args

from tqdm import tqdm

from ostinato.core.config import PolicyName
from tests.properties.world import IDENTITIES, Setting, World

STEPS_PER_WORLD = 120
"""Steps until another setting is drawn; a pool of 12 blocks is long under pressure by then."""

WEIGHTS = {
    "arrive": 22,
    "come_back": 5,
    "go_on": 26,
    "commit": 24,
    "fork": 5,
    "preempt": 4,
    "cancel": 13,
    "misuse": 4,
    "fail": 3,
    "reset": 1,
}


def random_setting(rng: random.Random) -> Setting:
    """Draw a world: mostly small, sometimes with caching off or digests that collide."""
    return Setting(
        num_blocks=rng.choice([1, 2, 3, 4, 5, 6, 8, 10, 12, 12]),
        block_size=rng.randint(1, 4),
        free_order=rng.choice(["scratch_first", "classic"]),
        seal_tails=rng.random() < 0.7,
        enable_prefix_caching=rng.random() < 0.95,
        digest_bits=rng.choice([256, 256, 256, 2, 0]),
        policy=rng.choice(["lru"] * 6 + list(get_args(PolicyName)[1:])),
    )


def random_step(world: World, rng: random.Random, picture_share: float) -> str:
    """Do one thing at random, and say what; so many of the prompts show pictures."""
    what = rng.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
    choice, chunk = rng.randrange(1000), rng.choice([1, 2, 3, 5, 100, 100])
    if what == "arrive":
        _arrive(world, rng, chunk, picture_share)
    elif what in ("come_back", "go_on"):
        getattr(world, what)(choice, chunk)
    elif what in ("fork", "preempt", "cancel", "misuse"):
        getattr(world, what)(choice)
    elif what == "commit":
        world.commit(rng.getrandbits(16))
    else:
        getattr(world, what)()
    return what


def _arrive(world: World, rng: random.Random, chunk: int, picture_share: float) -> None:
    suffix = [rng.randrange(2) for _ in range(rng.choice([0, 1, 1, 2, 2, 3, 4, 9]))]
    cut = rng.choice([-1, rng.randrange(1000)])  # -1: all of it, as in the next turn of a chat
    tokens = world.compose(rng.randrange(1000), cut, suffix)
    pictures = []
    if rng.random() < picture_share:
        pictures = [
            (rng.randrange(6), rng.randint(1, 4), rng.choice([b"cat", b"dog"]))
            for _ in range(rng.randint(1, 2))
        ]
    identity = IDENTITIES[0] if rng.random() < 0.8 else rng.choice(IDENTITIES)
    reads, writes = rng.random() < 0.93, rng.random() < 0.93
    world.arrive(world.prompt(tokens, pictures, identity, reads, writes), chunk)


def walk(seed: int, num_steps: int, show_progress: bool = False) -> Counter[str]:
    """Walk, checking after every step.

    Returns:
        How often each thing was done and met.

    Raises:
        AssertionError: With the seed, the step and the setting.
    """
    rng, done = random.Random(seed), Counter[str]()
    world, picture_share = World(random_setting(rng)), 0.0
    for step in tqdm(range(num_steps), disable=not show_progress, unit="steps"):
        try:
            if step % STEPS_PER_WORLD == STEPS_PER_WORLD - 1:
                world.finish()
                done += world.met()
                world, picture_share = World(random_setting(rng)), rng.choice([0.0, 0.0, 0.5])
            else:
                done[random_step(world, rng, picture_share)] += 1
                world.check()
        except AssertionError as error:
            where = f"seed {seed}, step {step}, {world.setting}"
            raise AssertionError(f"{where}: {error}") from error
    return done + world.met()


if __name__ == "__main__":
    for thing, times in sorted(walk(20_240, int(sys.argv[1]), show_progress=True).items()):
        print(f"{times:>9,} {thing}")
