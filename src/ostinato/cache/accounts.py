"""Whose blocks are they, and who may evict whose?

Tenants with a floor or a quota have an account of their own; all others share the common
one. An account knows how many blocks are charged to it (private, held and evictable ones)
and keeps its evictable entries in a policy of its own::

    allocation for tenant T takes, in this order
    1. T's own evictable blocks, while T is at its quota
    2. scratch blocks
    3. evictable blocks of whoever is above its quota
    4. the least valuable evictable block of T and of all who are above their floor
"""

from collections.abc import Callable, Iterator, Mapping

from ostinato.cache.block import CacheEntry
from ostinato.cache.policies.contract import EvictionPolicy
from ostinato.core.tenancy import Allotment


class Account:
    """One tenant's blocks, or those of all tenants without an allotment.

    Attributes:
        allotment: Its floor and quota.
        policy: Its evictable entries.
        num_charged: Blocks that are not scratch and are its own.
        num_evictable: Those of them that nobody holds.
    """

    __slots__ = ("allotment", "num_charged", "num_evictable", "policy")

    def __init__(self, allotment: Allotment, policy: EvictionPolicy) -> None:
        """Open an account without blocks."""
        self.allotment = allotment
        self.policy = policy
        self.num_charged = 0
        self.num_evictable = 0

    @property
    def at_quota(self) -> bool:
        """Whether one more block would exceed its quota."""
        quota = self.allotment.quota
        return quota is not None and self.num_charged >= quota

    @property
    def num_over_quota(self) -> int:
        """Blocks above its quota."""
        quota = self.allotment.quota
        return 0 if quota is None else max(0, self.num_charged - quota)

    @property
    def num_takeable(self) -> int:
        """Evictable blocks that others may take without touching its floor."""
        return max(0, min(self.num_evictable, self.num_charged - self.allotment.floor))


class Accounts:
    """All accounts of one pool."""

    def __init__(
        self, allotments: Mapping[bytes, Allotment], make_policy: Callable[[], EvictionPolicy]
    ) -> None:
        """Open the common account and one per allotment."""
        self.common = Account(Allotment(), make_policy())
        self._own = {
            tenant: Account(allotment, make_policy()) for tenant, allotment in allotments.items()
        }
        self._all = [self.common, *self._own.values()]

    def __iter__(self) -> Iterator[Account]:
        """Walk all accounts."""
        return iter(self._all)

    def of(self, tenant: bytes) -> Account:
        """Return a tenant's account."""
        return self._own.get(tenant, self.common)

    @property
    def are_several(self) -> bool:
        """Whether anybody has an account of its own."""
        return bool(self._own)

    @property
    def num_evictable(self) -> int:
        """Evictable blocks of all."""
        return sum(account.num_evictable for account in self._all)

    def num_takeable_by(self, account: Account) -> int:
        """Evictable blocks that an account may take: all its own, and others' above floors."""
        if not self._own:
            return account.num_evictable
        others = sum(other.num_takeable for other in self._all if other is not account)
        return account.num_evictable + others

    def own_victim(self, account: Account) -> CacheEntry | None:
        """Name what an account at its quota has to give first; None if it may go on."""
        return account.policy.victim() if account.at_quota else None

    def victim(self, account: Account, num_wanted: int) -> CacheEntry | None:
        """Name the entry to evict for an account: from those above quota, else the oldest."""
        if not self._own:
            return account.policy.victim(num_wanted)
        takeable = [a for a in self._all if a is account or a.num_takeable]
        greedy = [a for a in takeable if a.num_over_quota] or takeable
        victims = [entry for a in greedy if (entry := a.policy.victim()) is not None]
        if not victims and greedy is not takeable:
            victims = [entry for a in takeable if (entry := a.policy.victim()) is not None]
        return min(victims, key=lambda entry: entry.idle_tick, default=None)
