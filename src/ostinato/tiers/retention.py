"""What a tier keeps when it needs room: what an eviction policy expects to be used again.

The pool's policy decides for the tier as well. It learns from all requests how long blocks of a
class wait until they are used again, also of blocks that it has evicted, and a tier ranks what it
holds by that (``ReuseForecast``). With a policy that does not learn, and for what was stored before
a restart, it ranks by last use.

A tier of segments frees a whole one at a time: of the older half, the one with the least to copy.
Copied is what is leased, and what is worth more than the least 7 %.

Source: Rosenblum, Ousterhout, The design and implementation of a log-structured file system, 1992;
the index of worth: ``eviction.hazard_table``.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from random import randrange
from typing import Protocol, TypeVar, runtime_checkable

from ostinato.cache.eviction import EvictionPolicy, RequestSummary

LEAST_SHARE = 0.07
"""Of the older half, the share that is worth least and is not copied. With 0.15, half as much is
copied, and the agents of docs/tiers.md lose 0.8 points of their hits."""

MOST_SEGMENTS, MOST_RANKS = 40, 2000
"""Segments that are compared, and ranks that are sorted, of a disk that has more: a terabyte has
140,000 records."""

REMEMBERED = 4
"""Sizes of the tier for which a policy should remember what it evicted: with 2, the conversations
of docs/tiers.md lose 1.3 points, with 8 none come back."""


class ReuseForecast(Protocol):
    """What is expected of blocks."""

    def row_of(self, request_class: int, uses: int) -> int:
        """Return the row of blocks that requests of a class released, used so often."""
        ...

    def worth(self, row: int, age_s: float) -> float:
        """Return what a block of a row is worth that was released so long ago."""
        ...


@runtime_checkable
class LearnsReuse(ReuseForecast, Protocol):
    """An eviction policy that learns, such as ``eviction.ReuseHazard``."""

    def request_class(self, summary: RequestSummary) -> int:
        """Return the class of what a request releases."""
        ...

    def remember(self, num_blocks: int) -> None:
        """Remember at least so many evicted blocks, to notice when they are used again."""
        ...


class LastUse:
    """The forecast of a policy that does not learn: worth falls with age."""

    def row_of(self, request_class: int, uses: int) -> int:
        """Return the one row."""
        return 0

    def worth(self, row: int, age_s: float) -> float:
        """Return what falls with age, as ``HazardTable`` begins."""
        return 1.0 / (1.0 + max(0.0, age_s))


@dataclass(frozen=True, slots=True)
class ReuseClass:
    """What is known of a request that released blocks.

    Attributes:
        forecast: Of the eviction policy that its blocks belong to.
        request_class: Its class of the request.
    """

    forecast: ReuseForecast = field(default_factory=LastUse)
    request_class: int = 0


UNKNOWN = ReuseClass()


def reuse_class(policy: EvictionPolicy, summary: RequestSummary) -> ReuseClass:
    """Return the class of what a request releases, by the policy of its blocks."""
    if isinstance(policy, LearnsReuse):
        return ReuseClass(policy, policy.request_class(summary))
    return UNKNOWN


def remember_for_tier(policies: Iterable[EvictionPolicy], num_blocks: int) -> None:
    """Have policies learn for a tier of so many blocks, too: their own pool is smaller."""
    for policy in policies:
        if isinstance(policy, LearnsReuse):
            policy.remember(REMEMBERED * num_blocks)


Rank = tuple[float, float]
"""What something is worth, and when it was used last."""


@dataclass(slots=True, eq=False, kw_only=True)
class Retained:
    """Stored blocks that are kept or evicted together.

    Attributes:
        reuse: Of the last request that used them.
        num_uses: Requests that used them.
        last_use_s: When the last one did.
    """

    reuse: ReuseClass = UNKNOWN
    num_uses: int = 0
    last_use_s: float = 0.0

    @property
    def size(self) -> int:
        """What they occupy."""
        return 1

    @property
    def keep_until(self) -> float:
        """End of their lease; 0 without one."""
        return 0.0

    def use(self, now_s: float, reuse: ReuseClass | None = None) -> None:
        """Note that they are in use; with a class, that a request of it has released them."""
        self.last_use_s = now_s
        if reuse is not None:
            self.reuse = reuse
            self.num_uses += 1

    def rank(self, now_s: float) -> Rank:
        """Return what they are worth; of equals, the last used rank higher."""
        forecast = self.reuse.forecast
        row = forecast.row_of(self.reuse.request_class, self.num_uses)
        return forecast.worth(row, now_s - self.last_use_s), self.last_use_s


Item = TypeVar("Item", bound=Retained)
Segment = TypeVar("Segment")


def choose_eviction(
    segments: Mapping[Segment, Callable[[], Sequence[Item]]], room: int, most: int, now_s: float
) -> tuple[Segment, list[Item]] | None:
    """Choose the segment to evict, and what to copy out of it.

    Args:
        segments: The oldest first, each with what look-ups can find in it, roots before tails; of
            the newer half none is evicted while there is a choice.
        room: How much may be copied.
        most: How much of it may be without a lease.
        now_s: The time.

    Returns:
        The segment, and what is worth keeping, the most valuable first; None if the leases of no
        segment fit.
    """
    every = list(segments)
    older = every[: -(-len(every) // 2)]
    step = -(-len(older) // MOST_SEGMENTS) or 1
    for candidates in (older[randrange(step) :: step], every):
        choices = _choices({x: segments[x]() for x in candidates}, room, most, now_s)
        if choices:
            return min(choices, key=lambda choice: choice[:2])[2:]
    return None


def _choices(
    segments: Mapping[Segment, Sequence[Item]], room: int, most: int, now_s: float
) -> list[tuple[Rank, int, Segment, list[Item]]]:
    """Return of each segment the best that would be lost, and what to copy: how much, and which."""
    ranks = {item: item.rank(now_s) for items in segments.values() for item in items}
    sample = sorted(list(ranks.values())[:: -(-len(ranks) // MOST_RANKS) or 1])
    least = sample[int(LEAST_SHARE * len(sample))] if sample else (0.0, 0.0)
    choices = list[tuple[Rank, int, Segment, list[Item]]]()
    for segment, items in segments.items():
        leased = [item for item in items if item.keep_until > now_s]
        others = [item for item in items if item.keep_until <= now_s and ranks[item] >= least]
        left = room - sum(item.size for item in leased)
        if left >= 0:
            others.sort(key=ranks.__getitem__, reverse=True)
            kept = leased + _fitting(others, min(left, most))
            lost = max((ranks[item] for item in {*others}.difference(kept)), default=(0.0, 0.0))
            choices.append((lost, sum(item.size for item in kept), segment, kept))
    return choices


def _fitting(items: Sequence[Item], room: int) -> list[Item]:
    kept = list[Item]()
    for item in items:
        if item.size <= room:
            kept.append(item)
            room -= item.size
    return kept
