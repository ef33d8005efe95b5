"""Guaranteed blocks and quotas: tenants that have them keep an account of their own.

All others share the common account. An account knows how many blocks are charged to it (private,
held and evictable ones) and keeps its evictable entries in a policy of its own::

    allocation for tenant T takes, in this order
    1. T's own evictable blocks, while T is at its quota
    2. unused blocks
    3. evictable blocks of tenants above their quota
    4. the least valuable evictable block of T and of all who are above their guarantee
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from ostinato.cache.block import CacheEntry
from ostinato.cache.eviction import BlockShares, EvictionPolicy, Victim
from ostinato.settings import TenantShare


@dataclass(slots=True, eq=False)
class Account:
    """One tenant's blocks, or those of all tenants without a share."""

    share: TenantShare
    policy: EvictionPolicy  # its evictable entries
    num_charged: int = 0  # its blocks that are not free, evictable ones included

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
        self._common = Account(TenantShare(), make_policy())
        self._own = {
            tenant: Account(share, make_policy()) for tenant, share in tenant_shares.items()
        }
        self._all = [self._common, *self._own.values()]
        super().__init__(*(account.policy for account in self._all))

    def __iter__(self) -> Iterator[Account]:
        """Iterate over all accounts, the common one first."""
        return iter(self._all)

    def of(self, tenant: bytes) -> Account:
        """Return a tenant's account."""
        return self._own.get(tenant, self._common)

    def policy_of(self, tenant: bytes) -> EvictionPolicy:
        """Return the policy of a tenant's account."""
        return self.of(tenant).policy

    def by_policy(
        self, entries: Sequence[CacheEntry]
    ) -> Iterable[tuple[EvictionPolicy, Sequence[CacheEntry]]]:
        """Group entries of one sequence: those of a public prefix are of another account."""
        groups = groupby(entries, lambda entry: self.policy_of(entry.identity.owner))
        return [(policy, list(some)) for policy, some in groups]

    def charge(self, tenant: bytes, num_blocks: int) -> None:
        """Note that blocks were allocated to a tenant, or freed if that is negative."""
        self.of(tenant).num_charged += num_blocks

    def num_takeable(self, tenant: bytes) -> int:
        """Return all evictable blocks of its own, and others' above their guarantees."""
        own = self.of(tenant)
        return own.policy.num_blocks + sum(a.num_takeable for a in self._all if a is not own)

    def quota_victim(self, tenant: bytes, num_more: int) -> Victim | None:
        """Return what a tenant's quota has it evict to have so many more blocks; None if nothing.

        None as well if nothing of its own is evictable.
        """
        account = self.of(tenant)
        quota = account.share.quota
        is_above = quota is not None and account.num_charged + num_more > quota
        return account.policy.victim() if is_above else None

    def victim(self, tenant: bytes, num_wanted: int) -> Victim | None:
        """Return what to evict: from those above quota, else what was released first."""
        own = self.of(tenant)
        takeable = [a for a in self._all if a is own or a.num_takeable]
        over_quota = [a for a in takeable if a.num_over_quota]
        victims = self._victims(over_quota) or self._victims(takeable)
        if not victims:
            return None
        entry, most = min(victims, key=lambda victim: victim[0].idle_tick)
        owner = self.of(entry.identity.owner)
        return entry, most if owner is own else min(most, owner.num_takeable)

    def check(self, num_in_use: int) -> None:
        """Assert that so many blocks, all that are not free, are charged."""
        for account in self._all:
            assert account.policy.num_blocks <= account.num_charged, "more evictable than charged"
        charged = sum(account.num_charged for account in self._all)
        assert charged == num_in_use, "charged blocks are miscounted"

    def _victims(self, accounts: Iterable[Account]) -> list[Victim]:
        """Return the victim of each account that has one."""
        return [v for account in accounts if (v := account.policy.victim()) is not None]
