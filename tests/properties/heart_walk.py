"""A random walk through worlds with everything switched on, every step checked.

By hand, with a progress bar::

    python -m tests.properties.heart_walk 200000
"""

import random
from collections import Counter
from typing import get_args

from ostinato.core.config import Allotment, PolicyName, WaitingOrder
from ostinato.tenants.terms import PINNED, LeaseTerms
from tests.properties.heart import Heart
from tests.properties.heart_setting import Setting, Wish
from tests.support.random_walk import random_suffix, rarely, walk_by_hand, walk_worlds

WEIGHTS = {
    "step": 62,
    "arrive": 26,
    "lease": 5,
    "end_lease": 2,
    "wait": 2,
    "cancel": 3,
    "stop": 2,
    "fail": 2,
    "new_epoch": 0.6,
    "erase": 1,
    "preempt_all": 1,
    "reset": 0.3,
    "publish": 2,
    "unpublish": 0.4,
}

TERMS = (PINNED, LeaseTerms(3.0), LeaseTerms(4.0, refresh_on_hit=True))


def random_setting(rng: random.Random) -> Setting:
    """Draw a world: mostly small, with up to two windows and two tenants that have a share."""
    num_blocks, size = rng.choice([2, 3, 4, 6, 8, 12, 16, 20]), rng.randint(1, 4)
    reserved = rng.randint((num_blocks + 2) // 3, num_blocks)
    windows = [rng.randint(1, 9) for _ in range(rng.choice([0, 1, 1, 2]))]
    return Setting(
        num_blocks=num_blocks,
        block_size=size,
        reserved=reserved,
        windows=tuple((window, rng.choice([0, 0, 1, 3, 8])) for window in windows),
        allotments=_allotments(rng, num_blocks - reserved),
        index=rng.choice(["radix", "hash"]),
        free_order=rng.choice(["scratch_first", "classic"]),
        policy=rng.choice(get_args(PolicyName)),
        seal_tails=rng.random() < 0.7,
        enable_prefix_caching=rng.random() < 0.95,
        seats=rng.choice([1, 2, 3, 4, 6]),
        spare_budget=rng.choice([0, 1, 3, 20]),
        max_chunk_tokens=rng.choice([None, None, 1, 2, 3, 5]),
        order=rng.choice(get_args(WaitingOrder)),
    )


def _allotments(rng: random.Random, most: int) -> dict[str, Allotment]:
    """Draw floors that sum to at most so many blocks, and quotas above them."""
    allotments = {}
    for tenant in rng.choice([(), ("a",), ("a", "b")]):
        floor = rng.randint(0, most)
        most -= floor
        more = rng.choice([None, 0, 1, 4])
        allotments[tenant] = Allotment(floor, None if more is None else max(1, floor + more))
    return allotments


def random_event(heart: Heart, rng: random.Random) -> str:
    """Let something happen at random, and say what."""
    what = rng.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
    number, cut = rng.randrange(1000), rng.choice([-1, -1, rng.randrange(1000)])
    if what == "arrive":
        suffix = random_suffix(rng)
        heart.arrive(number, cut, suffix, random_wish(rng))
    elif what == "lease":
        heart.lease(number, cut, rng.choice(TERMS), rng.random() < 0.15)
    elif what == "publish":
        heart.publish(number, cut)
    elif what == "erase":
        heart.erase(number, waits=rng.random() < 0.5)
    elif what == "wait":
        heart.wait(rng.randint(1, 4))
    elif what in ("cancel", "stop", "end_lease"):
        getattr(heart, what)(number)
    else:
        getattr(heart, what)()
    return what


def random_wish(rng: random.Random) -> Wish:
    """Draw what somebody wants; mostly nothing special."""
    return Wish(
        n=rng.choice([1, 1, 1, 1, 2, 3]),
        max_tokens=rng.choice([1, 2, 3, 6, 12, None]),
        priority=rng.choice([0, 0, 0, 1, -1]),
        tenant=rng.choice([None, None, None, 0, 1, 2]),
        reads=not rarely(rng, 0.07),
        writes=not rarely(rng, 0.07),
        prompt_logprobs=rarely(rng, 0.05),
        eos="B" if rarely(rng, 0.2) else "",
        image=(1, 3) if rarely(rng, 0.08) else None,
    )


def walk(seed: int, num_events: int, show_progress: bool = False) -> Counter[str]:
    """Walk as ``walk_worlds`` does."""
    return walk_worlds(
        lambda rng: Heart(random_setting(rng)), random_event, seed, num_events, show_progress
    )


if __name__ == "__main__":
    walk_by_hand(walk)
