"""What has really been found, by the cache and by LRU in its place?

An estimate is a difference that was sampled, beside what has been counted. Under LRU that is what
the cache has found. ``ReuseHazard`` keeps an account of its hits against those that LRU would
have had, so under it is known exactly what LRU would have found, and LRU is what a sample tells
most of for the least.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from ostinato.cache.eviction import EvictionPolicy
from ostinato.cache.policies.reuse_hazard import ReuseHazard
from ostinato.core.config import CacheConfig, PolicyName
from ostinato.observe.counters import LookupCounts

BESIDE_LRU: tuple[PolicyName, ...] = ("lru", "reuse_hazard")
"""Policies of a cache of which is known what LRU finds in its place."""


class Counted(Protocol):
    """Look-ups of some traffic."""

    @property
    def num_requests(self) -> int:
        """Requests."""

    @property
    def query_tokens(self) -> int:
        """Their tokens."""

    @property
    def hit_tokens(self) -> float:
        """Tokens that need not be computed."""

    @property
    def hit_ratio(self) -> float:
        """Share of looked-up tokens that hit, from 0 to 1."""


class LruInItsPlace:
    """What LRU would have found of a cache's traffic, by the accounts of policies that learn.

    Where requests come one by one this is exact; of those that run at once, to a few blocks.
    """

    def __init__(
        self, counts: LookupCounts, policies: Sequence[EvictionPolicy], block_size: int
    ) -> None:
        """Stand beside what the cache has counted."""
        self._counts, self._block_size = counts, block_size
        self._shadows = [p.shadow for p in policies if isinstance(p, ReuseHazard)]

    @property
    def num_requests(self) -> int:
        """Requests of the cache."""
        return self._counts.num_requests

    @property
    def query_tokens(self) -> int:
        """Tokens that were looked up."""
        return self._counts.query_tokens

    @property
    def hit_tokens(self) -> float:
        """Tokens that LRU would have found, beginnings of blocks as the cache has."""
        lead = sum(shadow.lead for shadow in self._shadows)
        return max(0, self._counts.hit_tokens - lead * self._block_size)

    @property
    def hit_ratio(self) -> float:
        """Share of looked-up tokens that LRU would have found."""
        return self.hit_tokens / self.query_tokens if self.query_tokens else 0.0


class AtRatio:
    """The same traffic, if so much of it had hit."""

    def __init__(self, counts: Counted, hit_ratio: float) -> None:
        """Take requests and tokens as they are now."""
        self.num_requests, self.query_tokens = counts.num_requests, counts.query_tokens
        self.hit_ratio, self.hit_tokens = hit_ratio, hit_ratio * counts.query_tokens


@dataclass(frozen=True, slots=True)
class Watched:
    """What an episode is about.

    Attributes:
        config: Of the cache.
        counts: What has been found by the policy that all are set beside: LRU where that is
            known, else the cache's own.
        experience: The cache's own policy, if it learns.
    """

    config: CacheConfig
    counts: Counted
    experience: ReuseHazard | None = None
