"""Guaranteed blocks and quotas: tenants that have them keep an account of their own.

All others share the common account. An account knows how many blocks are charged to it (private,
held and evictable ones) and keeps its evictable entries in a policy of its own::

    allocation for tenant T takes, in this order
    1. T's own evictable blocks, while T is at its quota
    2. unused blocks
    3. evictable blocks of tenants above their quota
    4. the least valuable evictable block of T and of all who are above their guarantee

Accounts that others may take from are in a heap by what they would lose first. An account is
counted and ranked again after it was used, so no operation visits all accounts.
"""

import heapq
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter

from ostinato.cache.block import CacheEntry
from ostinato.cache.eviction import BlockShares, EvictionPolicy, RequestSummary, Victim
from ostinato.settings import TenantShare

_FEW = 64
"""Stale entries that the heap may have, besides one per account."""

_OWNER_OF = attrgetter("identity.owner")


@dataclass(slots=True, eq=False)
class BlockAccount:
    """One tenant's blocks, or those of all tenants without a share."""

    share: TenantShare
    policy: EvictionPolicy  # its evictable entries
    num_charged: int = 0  # its blocks that are not free, evictable ones included
    num_counted: int = 0  # what others may take of it, as in their sum
    place: int = 0  # of its entry in the heap; others of it are stale

    @property
    def num_over_quota(self) -> int:
        """Blocks above its quota."""
        quota = self.share.quota
        return 0 if quota is None else max(0, self.num_charged - quota)

    @property
    def num_takeable(self) -> int:
        """Evictable blocks that others may take without touching its guarantee."""
        return max(0, min(self.policy.num_blocks, self.num_charged - self.share.guaranteed))


class TenantShares(BlockShares):
    """All accounts of one pool."""

    are_limited = True

    def __init__(
        self, tenant_shares: Mapping[bytes, TenantShare], make_policy: Callable[[], EvictionPolicy]
    ) -> None:
        """Open the common account and one per share."""
        self._common = BlockAccount(TenantShare(), make_policy())
        self._own = {
            tenant: BlockAccount(share, make_policy()) for tenant, share in tenant_shares.items()
        }
        self._all = [self._common, *self._own.values()]
        self.policies = [account.policy for account in self._all]
        self._used = set[BlockAccount]()  # since they were counted
        self._unranked = set[BlockAccount]()  # since they were ranked
        self._num_takeable = 0  # of all accounts as counted
        self._heap: list[tuple[bool, int, int, BlockAccount]] = []  # within quota, tick, place
        self._num_places = 0

    def __iter__(self) -> Iterator[BlockAccount]:
        """Iterate over all accounts, the common one first."""
        return iter(self._all)

    def of(self, tenant: bytes) -> BlockAccount:
        """Return a tenant's account, to be counted and ranked again."""
        account = self._own.get(tenant, self._common)
        self._used.add(account)
        return account

    def policy_of(self, tenant: bytes) -> EvictionPolicy:
        """Return the policy of a tenant's account."""
        return self.of(tenant).policy

    def add(self, entries: Sequence[CacheEntry], summary: RequestSummary | None) -> None:
        """Add entries of one sequence; those of a public prefix are of another account."""
        for owner, some in groupby(entries, _OWNER_OF):
            self.policy_of(owner).add(list(some), summary)

    def remove(self, entries: Sequence[CacheEntry]) -> None:
        """Remove entries of one sequence, likewise."""
        for owner, some in groupby(entries, _OWNER_OF):
            self.policy_of(owner).remove(list(some))

    def charge(self, tenant: bytes, num_blocks: int) -> None:
        """Note that blocks were allocated to a tenant, or freed if that is negative."""
        self.of(tenant).num_charged += num_blocks

    def num_takeable(self, tenant: bytes) -> int:
        """Return all evictable blocks of its own, and others' above their guarantees."""
        own = self.of(tenant)
        self._count()
        return own.policy.num_blocks + self._num_takeable - own.num_counted

    def quota_victim(self, tenant: bytes, num_more: int) -> Victim | None:
        """Return the tenant's own victim if ``num_more`` blocks would exceed its quota, else None.

        None as well if nothing of its own is evictable.
        """
        account = self.of(tenant)
        quota = account.share.quota
        is_above = quota is not None and account.num_charged + num_more > quota
        return account.policy.victim() if is_above else None

    def victim(self, tenant: bytes, num_needed: int) -> Victim | None:
        """Return what to evict: from those above quota, else what was released first."""
        own, account = self.of(tenant), self._first()
        victim = None if account is None else account.policy.victim()
        own_victim = own.policy.victim()
        if account is None or victim is None:
            return own_victim
        if own_victim is not None and self._order(own, own_victim) <= self._order(account, victim):
            return own_victim
        return victim[0], min(victim[1], account.num_takeable)

    def check(self, num_in_use: int) -> None:
        """Assert that ``num_in_use`` blocks, all that are not free, are charged."""
        for account in self._all:
            assert account.policy.num_blocks <= account.num_charged, "more evictable than charged"
        charged = sum(account.num_charged for account in self._all)
        assert charged == num_in_use, "charged blocks are miscounted"

    def _count(self) -> None:
        """Count again what others may take of the accounts that were used."""
        for account in self._used:
            self._num_takeable += account.num_takeable - account.num_counted
            account.num_counted = account.num_takeable
        self._unranked |= self._used
        self._used.clear()

    def _first(self) -> BlockAccount | None:
        """Return the account to take from first; O(log n) for each that was used meanwhile."""
        self._count()
        for account in self._unranked:
            self._num_places += 1
            account.place = self._num_places
            if account.num_counted and (victim := account.policy.victim()) is not None:
                entry = (*self._order(account, victim), account.place, account)
                heapq.heappush(self._heap, entry)
        self._unranked.clear()
        if len(self._heap) > 2 * len(self._all) + _FEW:
            self._heap = [entry for entry in self._heap if entry[2] == entry[3].place]
            heapq.heapify(self._heap)
        while self._heap and self._heap[0][2] != self._heap[0][3].place:
            heapq.heappop(self._heap)
        return self._heap[0][3] if self._heap else None

    @staticmethod
    def _order(account: BlockAccount, victim: Victim) -> tuple[bool, int]:
        """Rank what is above a quota first, then what was released first."""
        return not account.num_over_quota, victim[0].idle_tick
