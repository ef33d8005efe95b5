"""Eviction policies to compare with: the simulation knows them, and no engine runs them.

On the traces of ``docs/eviction.md`` all three find less than LRU in most pools.

Files in reading order:

* ``lfu``: evicts what was in use least often
* ``slru``: evicts what was in use once before what was in use again
* ``cost_aware``: evicts what is cheap to compute again
"""

from collections.abc import Callable
from typing import Literal, get_args

from ostinato.cache.eviction import EvictionPolicy, PolicyFactory
from ostinato.eviction import make_policy
from ostinato.lab.policies.cost_aware import CostAware
from ostinato.lab.policies.lfu import LeastFrequentlyUsed
from ostinato.lab.policies.slru import SegmentedLru
from ostinato.settings import PolicyName

StudiedPolicyName = Literal["lfu", "slru", "cost_aware"]
SimulatedPolicyName = PolicyName | StudiedPolicyName

ENGINE_POLICIES: tuple[PolicyName, ...] = get_args(PolicyName)
SIMULATED_POLICIES: tuple[SimulatedPolicyName, ...] = (
    *ENGINE_POLICIES,
    *get_args(StudiedPolicyName),
)
"""All that ``ostinato simulate`` compares."""


def policy_factory(name: SimulatedPolicyName) -> PolicyFactory:
    """Return what makes the policy of that name."""

    def make(num_blocks: int, clock: Callable[[], float]) -> EvictionPolicy:
        if name == "lfu":
            return LeastFrequentlyUsed()
        if name == "slru":
            return SegmentedLru(num_blocks)
        if name == "cost_aware":
            return CostAware()
        return make_policy(name, num_blocks, clock)

    return make
