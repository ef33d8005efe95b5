"""Limits on leases: how much they may hold, and why no more.

The longest sequence must still fit beside all leases, and so must the guarantees of tenants::

    all blocks = the longest sequence + guarantees of tenants + leases
                 └─ reserved_blocks ─┘     └─ max_guaranteed_blocks ─┘

A tenant with a quota leases no more than that, and each window has the same limits for its own
blocks.
"""

from ostinato.cache.manager import CacheManager
from ostinato.cache.pool import BlockPool
from ostinato.cache.prefix_index import PrefixMatch
from ostinato.core.identity import PrefixKey
from ostinato.settings import PrefixCacheConfig, window_blocks
from ostinato.tenants.lease_book import LeaseBook
from ostinato.tenants.shares import TenantShares

MIN_STATE_SLOTS = 2
"""Slots of states that one sequence needs: to run, and to hold the checkpoint that it hit."""


class LeaseLimits:
    """What may be leased besides all that is leased already."""

    def __init__(self, config: PrefixCacheConfig, manager: CacheManager, leases: LeaseBook) -> None:
        """Limit the leases of one cache."""
        self._config = config
        self._manager = manager
        self._leases = leases

    def num_leasable(self, key: PrefixKey, match: PrefixMatch) -> int:
        """Return how many blocks of a match may be held besides all other leases and guarantees.

        A tenant's leases stay within its quota.
        """
        config, tenant = self._config, key.identity.owner
        guarantees = sum(share.guaranteed for share in config.tenant_shares.values())
        leased = self.leased(0)
        left = config.max_guaranteed_blocks - guarantees - len(leased)
        quota = config.quota_of(tenant)
        if quota is not None:
            left = min(left, quota - len(self.leased(0, tenant)))
        count = 0
        for block in match.blocks:
            left -= block not in leased
            if left < 0:
                break
            count += 1
        if count < len(match.blocks):  # windows and states end where fewer do
            count = len(self._manager.match(key, count * self._manager.block_size).blocks)
        return count if self._windows_fit(count) and self._state_fits() else 0

    def _windows_fit(self, num_blocks: int) -> bool:
        """Whether the windows before a boundary may be held besides those of all other leases."""
        size = self._manager.block_size
        for group, window in enumerate(self._config.windows, 1):
            pool = self._manager.pools[group]
            needed = num_blocks - max(0, num_blocks * size - window.window + 1) // size
            left = pool.num_blocks - _guaranteed(pool) - len(self.leased(group)) - needed
            if left < window_blocks(window.window, size):
                return False
        return True

    def _state_fits(self) -> bool:
        """Whether a checkpoint may be held besides those of all other leases.

        A sequence needs two slots: a running one, and that of the checkpoint that hit.
        """
        if self._config.states is None:
            return True
        pool = self._manager.pools[-1]
        leased = {id(lease.table.held[-1].source) for lease in self._leases}
        return pool.num_blocks - _guaranteed(pool) - len(leased) - 1 >= MIN_STATE_SLOTS

    def leased(self, group: int, tenant: bytes | None = None) -> set[int]:
        """List the blocks that leases hold in a group; those of one tenant, if it is named.

        A public prefix that a tenant's leases begin with is not the tenant's.
        """
        size, held = self._manager.block_size, set[int]()
        null = self._manager.pools[group].num_blocks if group else None
        for table in [lease.table for lease in self._leases]:
            if tenant in (None, table.tenant):
                num_public = 0 if tenant is None else table.key.identity.num_public_tokens
                held.update(table.groups[group][num_public // size :])
        return held - {null} if null is not None else held

    def nothing_to_hold(self, key: PrefixKey) -> str:
        """Say why nothing of a prefix can be held."""
        size = self._manager.block_size
        if len(key) < size:
            return f"its {len(key)} tokens do not fill a block of {size}: lease a longer prefix"
        return "no whole block of it is cached: send it as a prompt first"

    def reason(self, key: PrefixKey) -> str:
        """Say which limit keeps more of a prefix from being held, and how to move it."""
        config = self._config
        quota = config.quota_of(key.identity.owner)
        if quota is not None and len(self.leased(0, key.identity.owner)) >= quota:
            return (
                f"leases of its tenant may hold its quota of {quota} blocks: raise the quota, or "
                "end another lease"
            )
        return (
            f"leases and guarantees may bind {config.max_guaranteed_blocks} of {config.num_blocks} "
            "blocks, so that the longest sequence can always run; raise num_blocks, lower "
            "max_model_len, or end another lease"
        )


def _guaranteed(pool: BlockPool) -> int:
    """Return the blocks of a pool that are guaranteed to tenants."""
    shares = pool.shares
    accounts = list(shares) if isinstance(shares, TenantShares) else []
    return sum(account.share.guaranteed for account in accounts)
