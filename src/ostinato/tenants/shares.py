"""Guaranteed blocks and quotas: tenants that have them keep an account of their own.

All others share the common account. An account knows how many blocks are charged to it (private,
held and evictable ones) and keeps its evictable entries in a policy of its own::

    allocation for tenant T takes, in this order
    1. T's own evictable blocks, while T is at its quota
    2. free blocks
    3. evictable blocks of tenants above their quota
    4. the least valuable evictable block of T and of all who are above their guarantee
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby

from ostinato.cache.block import CacheEntry
from ostinato.cache.eviction import BlockShares, EvictionPolicy, RequestSummary
from ostinato.settings import TenantShare


class Account:
    """One tenant's blocks, or those of all tenants without a share.

    Attributes:
        share: Its guarantee and quota.
        policy: Its evictable entries.
        num_charged: Blocks that are not free and are its own.
        num_evictable: Those of them that no request holds.
    """

    __slots__ = ("num_charged", "num_evictable", "policy", "share")

    def __init__(self, share: TenantShare, policy: EvictionPolicy) -> None:
        """Open an account without blocks."""
        self.share = share
        self.policy = policy
        self.num_charged = 0
        self.num_evictable = 0

    @property
    def num_over_quota(self) -> int:
        """Blocks above its quota."""
        quota = self.share.quota
        return 0 if quota is None else max(0, self.num_charged - quota)

    @property
    def num_takeable(self) -> int:
        """Evictable blocks that others may take without touching its guarantee."""
        return max(0, min(self.num_evictable, self.num_charged - self.share.guaranteed))


class TenantShares(BlockShares):
    """All accounts of one pool."""

    are_limited = True

    def __init__(
        self, tenant_shares: Mapping[bytes, TenantShare], make_policy: Callable[[], EvictionPolicy]
    ) -> None:
        """Open the common account and one per share."""
        self.common = Account(TenantShare(), make_policy())
        self._own = {
            tenant: Account(share, make_policy()) for tenant, share in tenant_shares.items()
        }
        self._all = [self.common, *self._own.values()]
        super().__init__(self.common.policy)

    def __iter__(self) -> Iterator[Account]:
        """Walk all accounts."""
        return iter(self._all)

    def of(self, tenant: bytes) -> Account:
        """Return a tenant's account."""
        return self._own.get(tenant, self.common)

    def policies(self) -> Iterable[EvictionPolicy]:
        """Return every account's policy."""
        return [account.policy for account in self._all]

    def policy_of(self, tenant: bytes) -> EvictionPolicy:
        """Return the policy of a tenant's account."""
        return self.of(tenant).policy

    def add(self, entries: Sequence[CacheEntry], summary: RequestSummary | None) -> None:
        """Take evictable entries: after a public prefix they are of several accounts."""
        for account, some in self._by_account(entries):
            account.policy.add(some, summary)
            self._count(account, sum(entry.num_blocks for entry in some))

    def remove(self, entries: Sequence[CacheEntry]) -> None:
        """Remove entries that are held again."""
        for account, some in self._by_account(entries):
            account.policy.remove(some)
            self._count(account, -sum(entry.num_blocks for entry in some))

    def shrink(self, entry: CacheEntry, num_blocks: int) -> None:
        """Note that an evictable entry is about to lose its last blocks."""
        account = self.of(entry.identity.owner)
        self._count(account, -num_blocks)
        account.policy.evict(entry, num_blocks)

    def charge(self, tenant: bytes, num_blocks: int) -> None:
        """Note that a tenant was given blocks, or gave some back if that is negative."""
        self.of(tenant).num_charged += num_blocks

    def num_takeable(self, tenant: bytes) -> int:
        """Return all evictable blocks of its own, and others' above their guarantees."""
        own = self.of(tenant)
        return own.num_evictable + sum(a.num_takeable for a in self._all if a is not own)

    def quota_victim(self, tenant: bytes, num_more: int) -> CacheEntry | None:
        """Return what a tenant's quota has it evict to have so many more blocks; None if nothing.

        None as well if nothing of its own is evictable.
        """
        account = self.of(tenant)
        quota = account.share.quota
        is_above = quota is not None and account.num_charged + num_more > quota
        return account.policy.victim() if is_above else None

    def victim(self, tenant: bytes, num_wanted: int) -> CacheEntry | None:
        """Return the entry to evict: from those above quota, else the one released first."""
        own = self.of(tenant)
        takeable = [a for a in self._all if a is own or a.num_takeable]
        greedy = [a for a in takeable if a.num_over_quota] or takeable
        victims = [entry for a in greedy if (entry := a.policy.victim()) is not None]
        if not victims and greedy is not takeable:
            victims = [entry for a in takeable if (entry := a.policy.victim()) is not None]
        return min(victims, key=lambda entry: entry.idle_tick, default=None)

    def takeable(self, victim: CacheEntry, tenant: bytes) -> int:
        """Return how many of a victim's blocks a tenant may take."""
        owner = self.of(victim.identity.owner)
        most = owner.policy.takeable(victim)
        return most if owner is self.of(tenant) else min(most, owner.num_takeable)

    def check(self, num_in_use: int) -> None:
        """Assert every account's counts and policy."""
        for account in self._all:
            account.policy.check()
            evictable = sum(entry.num_blocks for entry in account.policy)
            assert evictable == account.num_evictable, "evictable blocks are miscounted"
            assert evictable <= account.num_charged, "more evictable than charged"
            victim = account.policy.victim()
            assert victim is None or victim.is_leaf, "the victim has cached descendants"
        charged = sum(account.num_charged for account in self._all)
        assert charged == num_in_use, "charged blocks are miscounted"
        assert self.num_evictable == sum(account.num_evictable for account in self._all)

    def _by_account(
        self, entries: Sequence[CacheEntry]
    ) -> Iterator[tuple[Account, list[CacheEntry]]]:
        """Cut a row of entries where another account's begin."""
        for account, some in groupby(entries, lambda entry: self.of(entry.identity.owner)):
            yield account, list(some)

    def _count(self, account: Account, num_blocks: int) -> None:
        account.num_evictable += num_blocks
        self.num_evictable += num_blocks
