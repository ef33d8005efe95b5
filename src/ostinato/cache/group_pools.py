"""Which pool does each group of layers get?

Group 0 has the configured one. A window's is as much smaller as it keeps less::

    group 0    config.num_blocks          config.policy    allotments as given
    window     its own number of blocks   LRU              the same shares of it
"""

from collections.abc import Callable, Mapping

from ostinato.cache.accounts import Accounts
from ostinato.cache.policies.contract import PolicyFactory
from ostinato.cache.policies.lru import LeastRecentlyUsed
from ostinato.cache.pool import BlockPool
from ostinato.core.config import CacheConfig, WindowConfig, window_blocks
from ostinato.core.tenancy import Allotment


def make_pool(
    config: CacheConfig,
    num_blocks: int,
    allotments: Mapping[bytes, Allotment],
    clock: Callable[[], float],
    make_policy: PolicyFactory,
) -> BlockPool:
    """Make a pool in which every block is scratch.

    Args:
        config: Says in which order blocks are given away.
        num_blocks: Its size.
        allotments: Shares of it, by tenant.
        clock: Seconds that never fall.
        make_policy: Says what is evicted.
    """
    accounts = Accounts(allotments, lambda: make_policy(num_blocks, clock))
    return BlockPool(num_blocks, accounts, config.free_order, clock)


def make_window_pool(
    config: CacheConfig, window: WindowConfig, clock: Callable[[], float]
) -> BlockPool:
    """Make a window's pool; tenants have the same share of it as of group 0's.

    Its policy is LRU whatever the other one is: a block that left a window is of use to a hit
    that ends there and to no other, so it has no past to learn from.

    Floors leave what one sequence needs to go on, as they do in group 0.
    """
    share = window.num_blocks / config.num_blocks
    spare = window.num_blocks - window_blocks(window.window, config.block_size)
    floor_share = min(share, spare / config.num_blocks)
    allotments = {
        tenant: Allotment(
            int(allotment.floor * floor_share),
            None if allotment.quota is None else max(1, int(allotment.quota * share)),
        )
        for tenant, allotment in config.allotments.items()
    }
    return make_pool(
        config, window.num_blocks, allotments, clock, lambda num_blocks, clock: LeastRecentlyUsed()
    )
