"""Eviction policies and what they are compared with: no engine runs those that are here.

* ``leaf_heap``: evicts the leaf with the least rank
* ``classics``: LFU, SLRU and cost-aware
* ``s3_fifo``, ``arc``: adapt to what returns

On the traces of ``docs/eviction.md`` each of them hits less than ``reuse_hazard``, and most less
than LRU in large pools.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, get_args

from benchmarks.policies.arc import AdaptiveReplacement
from benchmarks.policies.classics import CostAware, LeastFrequentlyUsed, SegmentedLru
from benchmarks.policies.s3_fifo import S3Fifo
from ostinato.cache.eviction import EvictionPolicy, PolicyFactory
from ostinato.eviction import make_policy
from ostinato.settings import PolicyName

STUDIED: dict[str, Callable[[int], EvictionPolicy]] = {
    "s3fifo": S3Fifo,
    "arc": AdaptiveReplacement,
    "lfu": lambda num_blocks: LeastFrequentlyUsed(),
    "slru": SegmentedLru,
    "cost_aware": lambda num_blocks: CostAware(),
}
"""By name, from the blocks of a pool."""

POLICIES = (*get_args(PolicyName), *STUDIED)


def policy_factory(name: str) -> PolicyFactory:
    """Return what makes the policy of a name, one of ``POLICIES``."""
    if name in STUDIED:
        return lambda num_blocks, clock: STUDIED[name](num_blocks)
    product: Any = name
    return partial(make_policy, product)
