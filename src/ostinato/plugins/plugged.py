"""The factories that an engine passes to ``assembly`` in place of built-in ones."""

from collections.abc import Callable
from dataclasses import dataclass

from ostinato.cache.eviction import PolicyFactory
from ostinato.cache.manager import MakeIndex
from ostinato.plugins.arrivals import NotedArrivals
from ostinato.plugins.contracts import check_plugin
from ostinato.plugins.factories import index_factory, order_factory, policy_factory
from ostinato.plugins.loading import is_plugin
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


def plug_in(index: str, eviction_policy: str, order: str, max_overtakes: int) -> Plugged:
    """Check and load the plug-ins that settings name.

    Raises:
        ConfigError: One cannot be loaded, or breaks its contract.
    """
    for setting, value in (
        ("index", index),
        ("eviction_policy", eviction_policy),
        ("order", order),
    ):
        check_plugin(setting, value)
    return Plugged(
        index_factory(index) if is_plugin(index) else None,
        policy_factory(eviction_policy) if is_plugin(eviction_policy) else None,
        order_factory(order, max_overtakes) if is_plugin(order) else None,
        NotedArrivals if any(map(is_plugin, (index, eviction_policy, order))) else None,
    )
