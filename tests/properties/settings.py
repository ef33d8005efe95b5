"""Settings of a scheduler scenario, the requests in it, and the events that may happen to it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import get_args

from ostinato.core.config import SchedulerConfig, WaitingOrder
from ostinato.settings import (
    FreeOrder,
    IndexName,
    PolicyName,
    PrefixCacheConfig,
    StateConfig,
    TenantShare,
    WindowConfig,
    window_blocks,
)
from ostinato.tenants.terms import PINNED, LeaseTerms
from tests.properties.draw import Choices, Draw, Event, draw_event, rarely, weighted


@dataclass(frozen=True)
class Settings:
    """Settings of the cache and the scheduler, and what may happen to them.

    Attributes:
        num_blocks: Of the full-attention group.
        reserved: Of them, blocks that neither guarantees nor leases may bind.
        administered: Whether leases, erasures, new epochs and public prefixes are drawn.
        windows: Size of each window, and its pool's blocks beyond the fewest possible.
        states: Of a model that keeps states, slots, blocks per unit and sparse checkpoints.
        tenant_shares: Guarantee and quota by tenant.
        spare_budget: Tokens of a step beyond one per sequence.
        max_model_len: None for the longest sequence that fits the reserved blocks.
    """

    num_blocks: int
    block_size: int
    reserved: int
    administered: bool = False
    windows: tuple[tuple[int, int], ...] = ()
    states: tuple[int, int, int] | None = None
    tenant_shares: Mapping[str, TenantShare] = field(default_factory=dict)
    index: IndexName = "radix"
    free_order: FreeOrder = "unused_first"
    policy: PolicyName = "lru"
    seal_tails: bool = True
    keep_explanations: int = 1000
    enable_prefix_caching: bool = True
    max_num_seqs: int = 4
    spare_budget: int = 4
    max_chunk_tokens: int | None = None
    max_step_ms: int | None = None  # the scenario's clock shows seconds
    max_model_len: int | None = None
    order: WaitingOrder = "fcfs"
    max_overtakes: int = 2

    @property
    def cache(self) -> PrefixCacheConfig:
        """Settings of the cache."""
        size = self.block_size
        return PrefixCacheConfig(
            self.num_blocks,
            size,
            self.enable_prefix_caching,
            self.seal_tails,
            self.free_order,
            self.index,
            self.policy,
            windows=tuple(
                WindowConfig(w, window_blocks(w, size) + more) for w, more in self.windows
            ),
            states=None
            if self.states is None
            else StateConfig(self.states[0], self.unit, self.states[2]),
            tenant_shares={tenant.encode(): a for tenant, a in self.tenant_shares.items()},
            reserved_blocks=self.reserved,
            keep_event_batches=4,
            keep_explanations=self.keep_explanations,
        )

    @property
    def unit(self) -> int:
        """Tokens between two positions at which states may be kept; 1 without states."""
        return 1 if self.states is None else self.states[1] * self.block_size

    @property
    def scheduler(self) -> SchedulerConfig:
        """Settings of the scheduler; its budget has room for every running sequence."""
        return SchedulerConfig(
            max_num_batched_tokens=self.max_num_seqs + max(self.spare_budget, self.unit - 1),
            max_num_seqs=self.max_num_seqs,
            max_chunk_tokens=None
            if self.max_chunk_tokens is None
            else max(self.unit, self.max_chunk_tokens),
            max_step_ms=self.max_step_ms,
            max_model_len=self.max_model_len or self.reserved * self.block_size + 1,
            order=self.order,
            max_overtakes=self.max_overtakes,
        )


def draw_settings(draw: Draw) -> Settings:
    """Draw mostly small settings; half of them know a scheduler and its requests alone."""
    administered = draw((False, True, True))
    num_blocks = draw(
        (2, 3, 4, 6, 8, 12, 16, 20) if administered else (1, 2, 3, 4, 5, 6, 8, 10, 14)
    )
    reserved = num_blocks
    if administered:
        reserved -= draw(range(num_blocks - (num_blocks + 2) // 3 + 1))
    return Settings(
        num_blocks=num_blocks,
        block_size=draw((1, 2, 3, 4)),
        reserved=reserved,
        administered=administered,
        windows=tuple(
            (draw(range(1, 10)), draw((0, 0, 1, 3, 8, 12))) for _ in range(draw((0, 0, 1, 1, 2)))
        ),
        states=draw((None, None, (2, 1, 1), (3, 2, 0), (5, 1, 2), (9, 1, 1), (16, 2, 1))),
        tenant_shares=_draw_tenant_shares(draw, num_blocks - reserved) if administered else {},
        index=draw(get_args(IndexName)),
        free_order=draw(get_args(FreeOrder)),
        policy=draw(get_args(PolicyName)),
        seal_tails=draw((True, True, False)),
        keep_explanations=draw((1000, 3, 1)),
        enable_prefix_caching=not draw(rarely(0.06)),
        max_num_seqs=draw((1, 2, 3, 4, 6, 8)),
        spare_budget=draw((0, 0, 1, 3, 20)),
        max_chunk_tokens=draw((None, None, 1, 2, 2, 3, 5)),
        max_step_ms=draw((None, None, 1, 3_000)),
        max_model_len=None if administered else draw((2**31, 2**31, 12, 20)),
        order=draw(get_args(WaitingOrder)),
        max_overtakes=draw((2, 0, 1, 3, 64)),
    )


def _draw_tenant_shares(draw: Draw, most: int) -> dict[str, TenantShare]:
    """Draw guarantees that sum to at most so many blocks, and quotas above them."""
    tenant_shares = {}
    for tenant in draw(((), ("a",), ("a", "b"))):
        guarantee = draw(range(most + 1))
        most -= guarantee
        more = draw((None, 0, 1, 4))
        tenant_shares[tenant] = TenantShare(
            guarantee, None if more is None else max(1, guarantee + more)
        )
    return tenant_shares


# --- events: methods of ``Scenario``, how likely they are, and what their arguments are drawn from

_SCHEDULING = {"step": 620, "send": 290, "cancel": 30, "stop": 25, "fail": 20, "preempt_all": 10}
_SCHEDULING |= {"misuse": 15}
SCHEDULING = weighted({**_SCHEDULING, "reset": 5})
ADMINISTRATION = weighted(
    {**_SCHEDULING, "send": 260, "lease": 80, "end_lease": 30, "wait": 20, "new_epoch": 6}
    | {"erase": 10, "reset": 3, "publish": 35, "unpublish": 6}
)

NUMBER = range(1000)
CUTS = (*[-1] * 80, *range(40))
"""Tokens kept of a known text; -1 is all of it, as in the next turn of a chat."""


def draw_suffix(draw: Draw) -> str:
    """Draw what a prompt continues a known text with."""
    return "".join(draw("AB") for _ in range(draw((0, 1, 1, 2, 2, 3, 5, 9))))


REQUEST: Mapping[str, Choices] = {
    "n": (1, 1, 1, 1, 2, 3, 6),
    "max_tokens": (1, 2, 3, 6, 12, None),
    "min_tokens": (0, 0, 2),
    "priority": (0, 0, 0, 1, -1),
    "tenant": (None, None, None, "", "a", "b"),  # None: whose text it continues
    "cache_read": [not no for no in rarely(0.07)],
    "cache_write": [not no for no in rarely(0.07)],
    "prompt_logprobs": [0 if wanted else None for wanted in rarely(0.07)],
    "eos": ("", "", "", "", "B"),
    "ignore_eos": rarely(0.2),
    "stop": [*[""] * 9, "A"],
    "image": [*[None] * 20, (1, 3), (0, 2), (5, 4)],
}
"""A request, but for its prompt: arguments of ``make_request``, and an image's start and length."""

ARGUMENTS: Mapping[str, Mapping[str, Choices]] = {
    "send": {"base": NUMBER, "cut": CUTS, "suffix": draw_suffix, **REQUEST},
    "cancel": {"choice": NUMBER},
    "stop": {"choice": NUMBER},
    "misuse": {"choice": NUMBER},
    "lease": {
        "base": NUMBER,
        "cut": CUTS,
        "terms": (LeaseTerms(8.0, refresh_on_hit=True), LeaseTerms(3.0), PINNED),
        "image": rarely(0.15),
    },
    "end_lease": {"choice": NUMBER},
    "wait": {"seconds": (1, 2, 3, 4)},
    "erase": {"tenant": ("", "a", "b"), "waits": (False, True)},
    "publish": {"base": NUMBER, "cut": CUTS},
}


def draw_scheduler_event(settings: Settings, draw: Draw) -> Event:
    """Draw what happens next."""
    return draw_event(draw, ADMINISTRATION if settings.administered else SCHEDULING, ARGUMENTS)
