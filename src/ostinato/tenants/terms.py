"""How long shall a prefix be kept, and what was promised?

The presets are what callers of hosted APIs know: Anthropic's five minutes and one hour, each
refreshed whenever the prefix is used, and OpenAI's extended retention of up to 24 hours.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import NewType

from ostinato.core.errors import ConfigError

LeaseId = NewType("LeaseId", int)
"""Number of a lease, unique for the life of a cache."""


@dataclass(frozen=True, slots=True)
class LeaseTerms:
    """For how long a prefix is held.

    Attributes:
        ttl_s: Seconds; None pins it until it is released.
        refresh_on_hit: Whether each request that uses all of it starts the time anew.
    """

    ttl_s: float | None = None
    refresh_on_hit: bool = False

    def __post_init__(self) -> None:
        """Refuse a time that is not positive.

        Raises:
            ConfigError: Naming the value.
        """
        if self.ttl_s is not None and not self.ttl_s > 0:
            raise ConfigError(f"ttl_s={self.ttl_s!r}: must be above 0, or None to pin")


PINNED = LeaseTerms()
ANTHROPIC_5M = LeaseTerms(300.0, refresh_on_hit=True)
ANTHROPIC_1H = LeaseTerms(3600.0, refresh_on_hit=True)
OPENAI_24H = LeaseTerms(86400.0)


class LeaseStatus(StrEnum):
    """What became of the wish."""

    ACCEPTED = "accepted"
    CLIPPED = "clipped"
    REJECTED = "rejected"


@dataclass(frozen=True, slots=True)
class LeaseReceipt:
    """The answer to a wish.

    Attributes:
        status: Whether all, a part or nothing of the prefix is held.
        num_tokens: Tokens held, from position 0 on; whole blocks.
        reason: Why not all of it; empty if it is.
        lease_id: To release it by; None if nothing is held.
        expires_s: By the cache's clock; None if pinned or rejected.
    """

    status: LeaseStatus
    num_tokens: int = 0
    reason: str = ""
    lease_id: LeaseId | None = None
    expires_s: float | None = None
