"""The factories that an engine passes to ``assembly`` in place of built-in ones.

Each makes a class with the whole port, or with the small one beside it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from ostinato.cache.eviction import EvictionPolicy, PolicyFactory
from ostinato.cache.manager import MakeIndex
from ostinato.plugins.arrivals import NotedArrivals
from ostinato.plugins.child import pass_contract
from ostinato.plugins.evictor import EvictorPolicy
from ostinato.plugins.loading import is_plugin, load_plugin
from ostinato.plugins.prefix_map import MapIndex
from ostinato.plugins.ranking import RankingOrder
from ostinato.sched.waiting_queue import MakeOrder, WaitingOrder

WrapOrder = Callable[[WaitingOrder], WaitingOrder]


@dataclass(frozen=True, slots=True)
class Plugged:
    """What replaces the built-in parts of one engine; None where nothing does."""

    make_index: MakeIndex | None = None
    policy: PolicyFactory | None = None
    make_order: MakeOrder | None = None
    wrap_order: WrapOrder | None = None
    """Notes arrivals, if anything is replaced."""


def check_plugin(setting: str, value: str) -> None:
    """Check a plug-in in a process of its own; does nothing for a built-in name.

    Raises:
        ConfigError: It cannot be loaded or breaks its contract; the message has the counterexample.
    """
    if is_plugin(value):
        pass_contract(setting, "ostinato.plugins.contracts:failure_of", [setting, value])


def plug_in(index: str, eviction_policy: str, order: str, max_overtakes: int) -> Plugged:
    """Check and load the plug-ins that settings name.

    Raises:
        ConfigError: One cannot be loaded, or breaks its contract.
    """
    values = {"index": index, "eviction_policy": eviction_policy, "order": order}
    for setting, value in values.items():
        check_plugin(setting, value)
    return Plugged(
        index_factory(index) if is_plugin(index) else None,
        policy_factory(eviction_policy) if is_plugin(eviction_policy) else None,
        order_factory(order, max_overtakes) if is_plugin(order) else None,
        NotedArrivals if any(map(is_plugin, values.values())) else None,
    )


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
