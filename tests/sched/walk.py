"""A random walk through worlds of traffic: one seed, any number of steps, every step checked.

By hand, with a progress bar::

    python -m tests.sched.walk 200000
"""

import random
from collections import Counter
from typing import get_args

from ostinato.core.config import WaitingOrder
from tests.sched.world import Setting, Wish, World
from tests.support.random_walk import random_suffix, rarely, walk_by_hand, walk_worlds

WEIGHTS = {
    "step": 60,
    "arrive": 30,
    "cancel": 3,
    "stop": 3,
    "fail": 2,
    "preempt_all": 1,
    "reset": 1,
}


def random_setting(rng: random.Random) -> Setting:
    """Draw a world: mostly small, often with a limit on chunks, sometimes without a cache."""
    seats = rng.choice([1, 2, 3, 4, 6, 8])
    return Setting(
        num_blocks=rng.choice([1, 2, 3, 4, 5, 6, 8, 10, 12, 14]),
        block_size=rng.randint(1, 4),
        index=rng.choice(["radix", "hash"]),
        free_order=rng.choice(["scratch_first", "classic"]),
        seal_tails=rng.random() < 0.7,
        enable_prefix_caching=rng.random() < 0.93,
        max_num_seqs=seats,
        spare_budget=rng.choice([0, 0, 1, 3, 20]),
        max_chunk_tokens=rng.choice([None, 1, 2, 2, 3, 5]),
        max_model_len=rng.choice([2**31, 2**31, 12, 20]),
        order=rng.choice(get_args(WaitingOrder)),
        max_overtakes=rng.choice([0, 1, 3, 64]),
        windows=rng.choice([(), (), ((rng.randint(1, 9), rng.choice([0, 1, 4, 12])),)]),
    )


def random_event(world: World, rng: random.Random) -> str:
    """Let something happen at random, and say what."""
    what = rng.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
    if what == "arrive":
        suffix = random_suffix(rng)
        cut = rng.choice([-1, -1, rng.randrange(1000)])  # -1: all of it, the next turn of a chat
        world.arrive(rng.randrange(1000), cut, suffix, random_wish(rng))
    elif what in ("cancel", "stop"):
        getattr(world, what)(rng.randrange(1000))
    else:
        getattr(world, what)()
    return what


def random_wish(rng: random.Random) -> Wish:
    """Draw what somebody wants; mostly nothing special."""
    return Wish(
        n=rng.choice([1, 1, 1, 1, 2, 3, 6]),
        max_tokens=rng.choice([1, 2, 3, 6, 12, None]),
        min_tokens=rng.choice([0, 0, 2]),
        priority=rng.choice([0, 0, 0, 1, -1]),
        tenant=rng.randrange(4),
        reads=not rarely(rng, 0.07),
        writes=not rarely(rng, 0.07),
        prompt_logprobs=rarely(rng, 0.07),
        eos="B" if rarely(rng, 0.2) else "",
        ignore_eos=rarely(rng, 0.2),
        stop="A" if rarely(rng, 0.1) else "",
        image=(rng.randrange(8), rng.randint(1, 4)) if rarely(rng, 0.04) else None,
    )


def walk(seed: int, num_events: int, show_progress: bool = False) -> Counter[str]:
    """Walk as ``walk_worlds`` does."""
    return walk_worlds(
        lambda rng: World(random_setting(rng)), random_event, seed, num_events, show_progress
    )


if __name__ == "__main__":
    walk_by_hand(walk)
