"""What policies that learn observe of the traffic, and what they tell the ghost."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol, cast, runtime_checkable

from ostinato.cache.block_table import BlockTable
from ostinato.cache.eviction import BlockShares, RequestSummary
from ostinato.cache.observer import CacheObserver
from ostinato.core.identity import PrefixKey
from ostinato.core.request import RequestContext
from ostinato.eviction.ghost_list import EvictedRun

_MANY_USES = 20
"""Content that was used more often is shared: it says nothing of one conversation's pace."""


@dataclass(slots=True)
class RequestFeatures:
    """What a policy that learns notes of a request."""

    # Seconds since what it found was last released, which is the time since its conversation's
    # previous turn; None if it found nothing, or what many share.
    gap_s: float | None = None
    num_new_blocks: int = 0  # blocks it published that were never cached before
    recalled: list[EvictedRun[Any]] = field(default_factory=list)  # evicted blocks it asked for


def features_of(summary: RequestSummary) -> RequestFeatures:
    """Return what is noted of a request."""
    if summary.policy_state is None:
        summary.policy_state = RequestFeatures()
    features: RequestFeatures = summary.policy_state
    return features


def note_gap(summary: RequestSummary, gap_s: float, uses: int) -> None:
    """Note how long ago what a request found was released, unless many share it."""
    features_of(summary).gap_s = gap_s if uses < _MANY_USES else None


@runtime_checkable
class LearnedPolicy(Protocol):
    """A policy that learns from the whole traffic, and what it can tell of it."""

    @property
    def lru_lead(self) -> int:
        """Blocks that hit and would have missed under LRU, less the opposite."""

    def look_up(
        self, key: PrefixKey, first: int, last: int, block_size: int, summary: RequestSummary
    ) -> None:
        """Note that a request asks for ``last`` blocks, and those from ``first`` on are missing.

        Called once per request, when it holds what it found and before anything is evicted.
        """

    def request_class(self, summary: RequestSummary) -> int:
        """Return the class of what a request releases, uses left out."""

    def row_of(self, request_class: int, uses: int) -> int:
        """Return where the index of a block's class begins."""

    def worth(self, row: int, age_s: float) -> float:
        """Return what a block is worth that was released so long ago."""


class MissObserver(CacheObserver):
    """Tells policies that learn which blocks a request asks for and does not find."""

    def __init__(self, shares: BlockShares, block_size: int, clock: Callable[[], float]) -> None:
        """Observe for the policies of a pool, all of which learn."""
        self._shares, self._block_size, self._clock = shares, block_size, clock

    def on_admit(self, table: BlockTable, context: RequestContext) -> None:
        """Tell the policy of the request's tenant, once per request that publishes."""
        entry = table.hit_entry
        if entry is not None and entry.idle_tick:
            note_gap(table.summary, self._clock() - entry.idle_since_s, entry.uses)
        num_requested = (len(table.key.tokens) - 1) // self._block_size
        if num_requested and table.writes and not context.is_readmission:
            policy = cast(LearnedPolicy, self._shares.policy_of(table.tenant))
            policy.look_up(
                table.key, table.num_published, num_requested, self._block_size, table.summary
            )
