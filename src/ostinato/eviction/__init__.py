"""Eviction policies: which cached entry is worth least.

Files in reading order:

* ``ghost_list``: what is remembered of evicted blocks
* ``classic_order``: a pool that allocates what was released longest ago, cached or not
* ``hazard_table``: what a block of a class and an age is worth
* ``lifetimes``: counts how long it takes until blocks are used again, finds those that are worth
  least, and knows what LRU would have cached
* ``reuse_hazard``: evicts what will bring the fewest hits for the memory that it takes

The port that all of them implement, and LRU, are in ``cache.eviction``.

Rules:

1. A victim is an evictable leaf; entries that are held or leased are in no policy.
2. A policy decides what is evicted first, never what hits: it affects speed, not results.
3. What is remembered of evicted content is bounded, and is erased with its tenant.
"""

from collections.abc import Callable

from ostinato.cache.eviction import EvictionPolicy, LeastRecentlyUsed
from ostinato.eviction.reuse_hazard import ReuseHazard
from ostinato.settings import PolicyName


def make_policy(name: PolicyName, num_blocks: int, clock: Callable[[], float]) -> EvictionPolicy:
    """Make the policy of that name.

    Args:
        name: Which.
        num_blocks: Size of its pool.
        clock: Seconds that never fall.
    """
    if name == "lru":
        return LeastRecentlyUsed()
    return ReuseHazard(num_blocks, clock)
