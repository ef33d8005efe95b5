"""Which cached entry is worth least?

Files in reading order:

* ``contract``: what does the pool tell a policy, and what does it ask?
* ``lru``: which entry was released longest ago?
* ``leaf_heap``: how is the leaf with the least rank found?
* ``lfu``, ``slru``, ``cost_aware``: what else can a leaf be ranked by?
* ``memory``: what was evicted lately, so that its return can be noticed?
* ``s3_fifo``, ``arc``: what can be learned from what returns?
* ``lives``: how long do blocks wait until they are used again?
* ``hazard_table``: what is a block of a class and an age worth?
* ``shadow``: what would LRU have cached, and how many blocks may be staked against it?
* ``cells``: which cohort's blocks are worth least?
* ``reuse_hazard``: which leaf will bring the fewest hits for the memory that it takes?

Rules:

1. A victim is an evictable leaf; what is held or leased is in no policy.
2. A policy decides who goes first, never what hits: it can cost time and no truth.
3. What is remembered of evicted content is bounded, and is forgotten with its tenant.
"""

from collections.abc import Callable

from ostinato.cache.eviction import EvictionPolicy, LeastRecentlyUsed
from ostinato.cache.policies.arc import AdaptiveReplacement
from ostinato.cache.policies.cost_aware import CostAware
from ostinato.cache.policies.lfu import LeastFrequentlyUsed
from ostinato.cache.policies.reuse_hazard import ReuseHazard
from ostinato.cache.policies.s3_fifo import S3Fifo
from ostinato.cache.policies.slru import SegmentedLru
from ostinato.core.config import PolicyName


def make_policy(name: PolicyName, num_blocks: int, clock: Callable[[], float]) -> EvictionPolicy:
    """Make the policy of that name.

    Args:
        name: Which.
        num_blocks: Size of its pool.
        clock: Seconds that never fall.
    """
    if name == "lru":
        return LeastRecentlyUsed()
    if name == "lfu":
        return LeastFrequentlyUsed()
    if name == "slru":
        return SegmentedLru(num_blocks)
    if name == "s3fifo":
        return S3Fifo(num_blocks)
    if name == "arc":
        return AdaptiveReplacement(num_blocks)
    if name == "cost_aware":
        return CostAware()
    return ReuseHazard(num_blocks, clock)
