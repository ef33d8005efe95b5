"""The port of block shares: who may take whose evictable blocks? By default, all from all.

Shares keep the evictable entries, in one eviction policy or in several, and count blocks. A room
of its own gives tenants guaranteed blocks and quotas (``ostinato.tenants``).
"""

from collections.abc import Iterable, Sequence
from typing import Protocol

from ostinato.cache.block import CacheEntry
from ostinato.cache.eviction import EvictionPolicy, RequestSummary


class BlockShares(Protocol):
    """Who may take whose evictable blocks; tenants are named by ``Identity.owner``.

    Attributes:
        num_evictable: Evictable blocks of all.
        are_limited: Whether free blocks alone do not say what a tenant may take.
    """

    num_evictable: int
    are_limited: bool

    def policies(self) -> Iterable[EvictionPolicy]:
        """Return every policy."""

    def policy_of(self, tenant: bytes) -> EvictionPolicy:
        """Return the policy that keeps a tenant's entries."""

    def add(self, entries: Sequence[CacheEntry], summary: RequestSummary | None) -> None:
        """Take entries of one request that have become evictable, tail first."""

    def remove(self, entries: Sequence[CacheEntry]) -> int:
        """Remove evictable entries that are held again; returns their number of blocks."""

    def shrink(self, entry: CacheEntry, num_blocks: int) -> None:
        """Note that an evictable entry is about to lose its last blocks."""

    def charge(self, tenant: bytes, num_blocks: int) -> None:
        """Note that a tenant was given blocks, or gave some back if that is negative."""
        return None

    def num_takeable(self, tenant: bytes) -> int:
        """Return how many evictable blocks a tenant may take."""

    def num_over_quota(self, tenant: bytes) -> int:
        """Return how many blocks a tenant has above its quota."""
        return 0

    def quota_victim(self, tenant: bytes) -> CacheEntry | None:
        """Return what a tenant at its quota must evict of its own; None if it may take others'."""
        return None

    def victim(self, tenant: bytes, num_wanted: int) -> CacheEntry | None:
        """Return the entry to evict for a tenant's next blocks."""

    def takeable(self, victim: CacheEntry, tenant: bytes) -> int:
        """Return how many of a victim's blocks a tenant may take."""

    def check(self, num_in_use: int) -> None:
        """Assert that policies and counts agree; so many blocks are not free."""


class SharedPool(BlockShares):
    """All evictable blocks are everyone's."""

    are_limited = False

    def __init__(self, policy: EvictionPolicy) -> None:
        """Keep evictable entries in one policy."""
        self._policy = policy
        self.num_evictable = 0

    def policies(self) -> Iterable[EvictionPolicy]:
        """Return the one policy."""
        return (self._policy,)

    def policy_of(self, tenant: bytes) -> EvictionPolicy:
        """Return the one policy."""
        return self._policy

    def add(self, entries: Sequence[CacheEntry], summary: RequestSummary | None) -> None:
        """Hand entries to the policy."""
        self._policy.add(entries, summary)
        for entry in entries:
            self.num_evictable += entry.num_blocks

    def remove(self, entries: Sequence[CacheEntry]) -> int:
        """Take entries from the policy."""
        self._policy.remove(entries)
        count = 0
        for entry in entries:
            count += entry.num_blocks
        self.num_evictable -= count
        return count

    def shrink(self, entry: CacheEntry, num_blocks: int) -> None:
        """Tell the policy."""
        self.num_evictable -= num_blocks
        self._policy.evict(entry, num_blocks)

    def num_takeable(self, tenant: bytes) -> int:
        """Return all that are evictable."""
        return self.num_evictable

    def victim(self, tenant: bytes, num_wanted: int) -> CacheEntry | None:
        """Return the policy's victim."""
        return self._policy.victim(num_wanted)

    def takeable(self, victim: CacheEntry, tenant: bytes) -> int:
        """Return what the policy allows."""
        return self._policy.takeable(victim)

    def check(self, num_in_use: int) -> None:
        """Assert the policy's invariants and the count."""
        self._policy.check()
        assert self.num_evictable == sum(entry.num_blocks for entry in self._policy)
        victim = self._policy.victim()
        assert victim is None or victim.is_leaf, "the victim has cached descendants"
