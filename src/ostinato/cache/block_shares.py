"""The port of block shares: who may take whose evictable blocks? By default, all from all.

Shares keep the evictable entries, in one eviction policy or in several, and count blocks.
``ostinato.tenants`` gives tenants guaranteed blocks and quotas; here is the pool that all share.
"""

from collections.abc import Iterable, Sequence

from ostinato.cache.block import CacheEntry
from ostinato.cache.eviction import EvictionPolicy, RequestSummary


class BlockShares:
    """All evictable blocks are everyone's; tenants are named by ``Identity.owner``.

    Attributes:
        num_evictable: Evictable blocks of all.
        are_limited: Whether free blocks alone do not say what a tenant may take.
    """

    are_limited = False

    def __init__(self, policy: EvictionPolicy) -> None:
        """Keep evictable entries in one policy."""
        self._policy = policy
        self.num_evictable = 0

    def policies(self) -> Iterable[EvictionPolicy]:
        """Return every policy."""
        return (self._policy,)

    def policy_of(self, tenant: bytes) -> EvictionPolicy:
        """Return the policy that keeps a tenant's entries."""
        return self._policy

    def add(self, entries: Sequence[CacheEntry], summary: RequestSummary | None) -> None:
        """Take entries of one request that have become evictable, tail first."""
        self._policy.add(entries, summary)
        for entry in entries:
            self.num_evictable += entry.num_blocks

    def remove(self, entries: Sequence[CacheEntry]) -> None:
        """Remove evictable entries that are held again."""
        self._policy.remove(entries)
        for entry in entries:
            self.num_evictable -= entry.num_blocks

    def shrink(self, entry: CacheEntry, num_blocks: int) -> None:
        """Note that an evictable entry is about to lose its last blocks."""
        self.num_evictable -= num_blocks
        self._policy.evict(entry, num_blocks)

    def charge(self, tenant: bytes, num_blocks: int) -> None:
        """Note that a tenant was given blocks, or gave some back if that is negative."""

    def num_takeable(self, tenant: bytes) -> int:
        """Return how many evictable blocks a tenant may take."""
        return self.num_evictable

    def num_over_quota(self, tenant: bytes) -> int:
        """Return how many blocks a tenant has above its quota."""
        return 0

    def quota_victim(self, tenant: bytes) -> CacheEntry | None:
        """Return what a tenant at its quota must evict of its own; None if it may take others'."""
        return None

    def victim(self, tenant: bytes, num_wanted: int) -> CacheEntry | None:
        """Return the entry to evict for a tenant's next blocks."""
        return self._policy.victim(num_wanted)

    def takeable(self, victim: CacheEntry, tenant: bytes) -> int:
        """Return how many of a victim's blocks a tenant may take."""
        return self._policy.takeable(victim)

    def check(self, num_in_use: int) -> None:
        """Assert that policies and counts agree; so many blocks are not free."""
        self._policy.check()
        assert self.num_evictable == sum(entry.num_blocks for entry in self._policy)
        victim = self._policy.victim()
        assert victim is None or victim.is_leaf, "the victim has cached descendants"
