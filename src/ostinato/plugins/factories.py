"""Makes the parts that settings name: each a class with the whole port, or with the small one."""

from typing import Any

from ostinato.cache.eviction import EvictionPolicy, PolicyFactory
from ostinato.cache.manager import MakeIndex
from ostinato.cache.pool import BlockPool
from ostinato.cache.prefix_index import PrefixIndex
from ostinato.plugins.evictor import EvictorPolicy
from ostinato.plugins.loading import load_plugin
from ostinato.plugins.prefix_map import MapIndex
from ostinato.plugins.ranking import RankingOrder
from ostinato.sched.waiting_queue import MakeOrder, NumCachedTokens, WaitingOrder


def index_factory(value: str) -> MakeIndex:
    """Return what makes an index of a class with the whole port, or with the small one."""
    cls: Any = load_plugin("index", value)
    if hasattr(cls, "acquire"):
        return cls  # type: ignore[no-any-return]

    def make_index(pool: BlockPool, block_size: int) -> PrefixIndex[Any]:
        return MapIndex(pool, block_size, cls, value)

    return make_index


def policy_factory(value: str) -> PolicyFactory:
    """Return what makes a policy of a class with the whole port, or with the small one."""
    cls: Any = load_plugin("eviction_policy", value)
    if EvictionPolicy in getattr(cls, "__mro__", ()):
        return lambda num_blocks, clock: cls()
    return lambda num_blocks, clock: EvictorPolicy(cls, value)


def order_factory(value: str, max_overtakes: int) -> MakeOrder:
    """Return what makes an order of a class with the whole port, or with the small one."""
    cls: Any = load_plugin("order", value)
    if WaitingOrder in getattr(cls, "__mro__", ()):
        return lambda num_cached_tokens: cls()

    def make_order(num_cached_tokens: NumCachedTokens) -> WaitingOrder:
        return RankingOrder(max_overtakes, num_cached_tokens, cls, value)

    return make_order
