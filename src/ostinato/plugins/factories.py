"""Makes the parts that settings name: each a class with the whole port, or with the small one."""

from functools import partial
from typing import Any

from ostinato.cache.eviction import EvictionPolicy, PolicyFactory
from ostinato.cache.manager import MakeIndex
from ostinato.plugins.evictor import EvictorPolicy
from ostinato.plugins.loading import load_plugin
from ostinato.plugins.prefix_map import MapIndex
from ostinato.plugins.ranking import RankingOrder
from ostinato.sched.waiting_queue import MakeOrder, WaitingOrder


def index_factory(value: str) -> MakeIndex:
    """Return what makes an index of a class with the whole port, or with the small one."""
    cls: Any = load_plugin("index", value)
    return cls if hasattr(cls, "acquire") else partial(MapIndex, make_map=cls, name=value)


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
    return partial(RankingOrder, max_overtakes, make_ranking=cls, name=value)
