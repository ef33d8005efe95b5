"""What a tier keeps when it is full: what the pool's eviction policy expects to be used again.

A policy that learns knows from all requests how long blocks of a class wait until their next use,
also blocks that it has evicted, and tiers rank their blocks by that (``ReuseForecast``). With other
policies, and for blocks stored before a restart, the last use decides.

A disk evicts whole segments: of the older half, the one that loses the least. Leased records are
copied out of it, and those worth more than the least 7 %.

Source: Rosenblum, Ousterhout, The design and implementation of a log-structured file system, 1992;
the index of worth: ``eviction.hazard_table``.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from random import randrange
from typing import Protocol, TypeVar, runtime_checkable

from ostinato.cache.eviction import EvictionPolicy, RequestSummary

MIN_SHARE = 0.07
"""Share of the older half that is worth least and is not copied. With 0.15, half as much is copied,
and the agents of docs/tiers.md lose 0.8 points of their hits."""

MAX_SEGMENTS, MAX_RANKS = 40, 2000
"""Most segments compared, and ranks sorted, at a time: a terabyte has 140,000 records."""

REMEMBERED = 4
"""Evicted blocks that a policy should remember, in sizes of the tier: with 2, the conversations of
docs/tiers.md lose 1.3 points; 8 gains nothing."""


class ReuseForecast(Protocol):
    """Predicts the reuse of blocks."""

    def row_of(self, request_class: int, uses: int) -> int:
        """Return the row of blocks by the class of their last request and their number of uses."""

    def worth(self, row: int, age_s: float) -> float:
        """Return the worth of a block of a row, by the time since its release."""


@runtime_checkable
class LearnsReuse(ReuseForecast, Protocol):
    """An eviction policy that learns, such as ``eviction.ReuseHazard``."""

    def request_class(self, summary: RequestSummary) -> int:
        """Return the class of a request."""

    def remember(self, num_blocks: int) -> None:
        """Remember at least this many evicted blocks, to learn from their next use."""


class LastUse:
    """The forecast of a policy that does not learn: worth falls with age."""

    def row_of(self, request_class: int, uses: int) -> int:
        """Return the one row."""
        return 0

    def worth(self, row: int, age_s: float) -> float:
        """Return a worth that falls with age, as ``HazardTable`` does at first."""
        return 1.0 / (1.0 + max(0.0, age_s))


@dataclass(frozen=True, slots=True)
class ReuseClass:
    """The class of a request that released blocks.

    Attributes:
        forecast: The eviction policy of its blocks.
        request_class: The policy's class of the request.
    """

    forecast: ReuseForecast = field(default_factory=LastUse)
    request_class: int = 0


UNKNOWN = ReuseClass()


def reuse_class(policy: EvictionPolicy, summary: RequestSummary) -> ReuseClass:
    """Return the class of a request, by the eviction policy of its blocks."""
    if isinstance(policy, LearnsReuse):
        return ReuseClass(policy, policy.request_class(summary))
    return UNKNOWN


def remember_for_tier(policies: Iterable[EvictionPolicy], num_blocks: int) -> None:
    """Let policies remember enough evicted blocks for a tier, which is larger than their pool."""
    for policy in policies:
        if isinstance(policy, LearnsReuse):
            policy.remember(REMEMBERED * num_blocks)


Rank = tuple[float, float, int]
"""Worth, time of the last use, and minus the blocks before."""


@dataclass(slots=True, eq=False, kw_only=True)
class Retained:
    """Stored blocks that are kept or evicted together.

    Attributes:
        reuse: Class of the last request that used them.
        num_uses: Number of requests that used them.
        last_use_s: Time of the last use.
    """

    reuse: ReuseClass = UNKNOWN
    num_uses: int = 0
    last_use_s: float = 0.0

    @property
    def size(self) -> int:
        """Blocks or bytes that they occupy."""
        return 1

    @property
    def keep_until(self) -> float:
        """End of their lease; 0 without one."""
        return 0.0

    def use(self, now_s: float, reuse: ReuseClass | None = None) -> None:
        """Record a use; with a class, the release by a request of this class."""
        self.last_use_s = now_s
        if reuse is not None:
            self.reuse = reuse
            self.num_uses += 1

    def rank(self, now_s: float) -> Rank:
        """Return their worth; among equals, the last used rank higher."""
        forecast = self.reuse.forecast
        row = forecast.row_of(self.reuse.request_class, self.num_uses)
        return forecast.worth(row, now_s - self.last_use_s), self.last_use_s, 0


Item = TypeVar("Item", bound=Retained)
Segment = TypeVar("Segment")


def choose_eviction(
    segments: Mapping[Segment, Callable[[], Sequence[Item]]],
    room: int,
    max_copied: int,
    now_s: float,
    rank: Callable[[Item], Rank],
) -> tuple[Segment, list[Item]] | None:
    """Choose the segment to evict, and what to copy out of it.

    Args:
        segments: The oldest first, each with its live items, roots before tails. The newer half is
            evicted only if no older segment fits.
        room: Maximum size of the copies.
        max_copied: Maximum size of copies without a lease.
        now_s: The time.
        rank: The rank of an item; lower ones are lost first.

    Returns:
        The segment and its items to keep, leased ones first, then by worth; None if the leased
        items of no segment fit.
    """
    every = list(segments)
    older = every[: -(-len(every) // 2)]
    step = -(-len(older) // MAX_SEGMENTS) or 1
    for candidates in (older[randrange(step) :: step], every):
        choices = _choices({x: segments[x]() for x in candidates}, room, max_copied, now_s, rank)
        if choices:
            return min(choices, key=lambda choice: choice[:2])[2:]
    return None


def _choices(
    segments: Mapping[Segment, Sequence[Item]],
    room: int,
    max_copied: int,
    now_s: float,
    rank: Callable[[Item], Rank],
) -> list[tuple[Rank, int, Segment, list[Item]]]:
    """Return per segment the best rank that would be lost, and the size and items of the copies."""
    ranks = {item: rank(item) for items in segments.values() for item in items}
    sample = sorted(list(ranks.values())[:: -(-len(ranks) // MAX_RANKS) or 1])
    min_rank = sample[int(MIN_SHARE * len(sample))] if sample else (0.0, 0.0, 0)
    choices = list[tuple[Rank, int, Segment, list[Item]]]()
    for segment, items in segments.items():
        leased = [item for item in items if item.keep_until > now_s]
        others = [item for item in items if item.keep_until <= now_s and ranks[item] >= min_rank]
        left = room - sum(item.size for item in leased)
        if left >= 0:
            others.sort(key=ranks.__getitem__, reverse=True)
            kept = leased + _fitting(others, min(left, max_copied))
            lost = max((ranks[item] for item in {*others}.difference(kept)), default=(0.0, -inf, 0))
            choices.append((lost, sum(item.size for item in kept), segment, kept))
    return choices


def _fitting(items: Sequence[Item], room: int) -> list[Item]:
    kept = list[Item]()
    for item in items:
        if item.size <= room:
            kept.append(item)
            room -= item.size
    return kept
