"""The calls of a careless embedder: how likely they are, and what their arguments may be."""

from collections.abc import Callable, Mapping
from typing import get_args

from ostinato.cache.block import CacheEntry
from ostinato.settings import (
    FreeOrder,
    IndexName,
    PolicyName,
    PrefixCacheConfig,
    StateConfig,
    TenantShare,
    WindowConfig,
)
from ostinato.tenants.terms import PINNED, LeaseTerms
from tests.properties.draw import Choices, Draw, Event, draw_event, weighted

Place = tuple[str, int]
"""A number of tokens: how many more than those of a table that this names."""

PUBLIC, TENANTS = b"public", (b"", b"a", b"b")


def draw_careless_settings(draw: Draw) -> PrefixCacheConfig:
    """Draw a small cache: plain, with a window, with states, or with both."""
    size, num_blocks = draw((1, 2, 4)), draw((2, 4, 6, 8, 12))
    narrow, wide = WindowConfig(size + 1, 4), WindowConfig(2 * size, 8)
    quota = draw((None, None, 1, 2))
    shares = {} if quota is None else {b"a": TenantShare(draw((0, 1)), quota)}
    return PrefixCacheConfig(
        num_blocks,
        size,
        index=draw(get_args(IndexName)),
        free_order=draw(get_args(FreeOrder)),
        seal_tails=draw((True, True, False)),
        eviction_policy=draw(("lru", *get_args(PolicyName))),
        windows=draw(((), (), (narrow,), (wide,), (wide, narrow))),
        states=draw((None, None, StateConfig(3, size), StateConfig(6, 2 * size))),
        tenant_shares=shares,
        reserved_blocks=num_blocks - draw((1, 2, num_blocks)),
        keep_event_batches=4,
        keep_explanations=3,
    )


def draw_text(draw: Draw) -> str:
    """Draw what a sequence adds to a known one."""
    return "".join(draw("AB") for _ in range(draw((0, 1, 2, 3, 4, 5, 9))))


CHOICE = (*[0] * 16, 1, 1, 1, 1, 2, 2, 3, 4, 5, 6, 7)
"""Which of the latest: keys, matches, tables or leases."""

PLACE = (*[("tokens", 0)] * 16, *[("planned", 0)] * 6, ("planned", 1), ("tokens", 4), ("zero", -1))
PLACE += (("zero", 0), ("zero", 1), ("computed", -1), ("computed", 0), ("slots", 0), ("slots", 1))
PLACE += (("tokens", -1), ("tokens", 1), ("planned", -1), ("planned", -4), ("zero", 100))

WHICH: Mapping[str, Callable[[CacheEntry], bool]] = {
    "public": lambda entry: entry.identity.tenant == PUBLIC,
    "a": lambda entry: entry.identity.tenant == b"a",
    "even": lambda entry: entry.idle_tick % 2 == 0,
    "used again": lambda entry: entry.uses > 1,
}
"""What is removed: not all of it with all that continues it."""

TABLE: Mapping[str, Choices] = {"choice": CHOICE, "place": PLACE}
ARGUMENTS: Mapping[str, Mapping[str, Choices]] = {
    "new_key": {
        "choice": CHOICE,
        "cut": (*[99] * 3, *range(9)),
        "suffix": draw_text,
        "tenant": (*[b""] * 4, b"a", b"a", b"b", PUBLIC),
        "start": (0, 0, 0, 2, 4),
    },
    "append": {"choice": CHOICE, "letter": "AB"},
    "match": {"choice": CHOICE, "num_tokens": (*[None] * 9, -1, 0, 1, 4, 100)},
    "admit": {
        "choice": CHOICE,
        "match": (*[None] * 12, 0, 0, 1, 2),
        "writes": (*[True] * 9, False),
        "most_new": (*[None] * 5, 1, 3, 0, -1),
    },
    "grow": TABLE,
    "growable": TABLE,
    "publish": TABLE,
    "release": TABLE,
    "fork": {"choice": CHOICE},
    "pin": TABLE,
    "unpin": {"choice": CHOICE},
    "remove": {"what": (*WHICH,)},
    "new_epoch": {"weights": (None, b"new", "new")},
    "rekey": {"choice": CHOICE},
    "lease": {"choice": CHOICE, "terms": (PINNED, LeaseTerms(3.0, refresh_on_hit=True), 3.0)},
    "publish_prefix": {"choice": CHOICE},
    "end_lease": {"choice": CHOICE},
    "erase": {"tenant": (*TENANTS, PUBLIC, "a")},
}
WEIGHTS = {"new_key": 20, "append": 20, "match": 10, "admit": 60, "grow": 20, "publish": 60}
WEIGHTS |= {"commit": 40, "fail": 8, "release": 24, "fork": 16, "growable": 1, "pin": 8, "unpin": 6}
WEIGHTS |= {"begin_step": 6, "lease": 14, "publish_prefix": 8, "end_lease": 6, "remove": 3}
WEIGHTS |= {"new_epoch": 1, "rekey": 2, "erase": 2, "reset": 1}
_NAMES = weighted(WEIGHTS)


def draw_careless_event(draw: Draw) -> Event:
    """Draw the next call."""
    return draw_event(draw, _NAMES, ARGUMENTS)
