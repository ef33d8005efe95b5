"""Calls of a cache manager that are wrong, whatever state it is in.

Drawn scenarios make them among the right ones. Each has to raise ``CacheMisuse``; that nothing has
changed is seen by whatever looks at the cache after every step.
"""

from collections.abc import Callable, Iterable
from functools import partial

import pytest

from ostinato.cache.block_table import BlockTable
from ostinato.cache.manager import CacheManager
from ostinato.core.errors import CacheMisuse
from tests.support.cache.whole_state import whole_state

Call = Callable[[], object]


def make_wrong_call(
    manager: CacheManager, live: Iterable[BlockTable], released: Iterable[BlockTable], choice: int
) -> bool:
    """Make one of the calls that are wrong now, and see it refused; False if there is none."""
    calls = [call for table in released for call in _on_released(manager, table)]
    live = list(live)
    calls += [call for table in live for call in _on_live(manager, table)]
    if len(live) > 1 and manager.config.enable_prefix_caching and live[0].key is not live[1].key:
        calls.append(lambda: manager.admit(live[0].key, manager.match(live[1].key)))
    if calls:
        before = whole_state(manager)
        with pytest.raises(CacheMisuse):
            calls[choice % len(calls)]()
        assert whole_state(manager) == before, "a refusal changed something"
    return bool(calls)


def _on_released(manager: CacheManager, table: BlockTable) -> list[Call]:
    return [
        partial(manager.release, table, 0),
        partial(manager.publish, table, 1),
        partial(manager.grow, table, 1),
        partial(manager.fork, table),
    ]


def _on_live(manager: CacheManager, table: BlockTable) -> list[Call]:
    beyond, unplanned = table.num_slots + 1, table.num_planned + 1
    calls: list[Call] = [
        partial(manager.publish, table, beyond),
        partial(manager.release, table, unplanned),
    ]
    if table.num_planned > table.num_computed:
        calls.append(partial(manager.release, table, 0))
    return calls
