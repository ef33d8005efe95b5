"""Terms of leases, and receipts.

The presets are what callers of hosted APIs know: Anthropic's five minutes and one hour, each
refreshed whenever the prefix is used, and OpenAI's extended retention of up to 24 hours.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import NewType

from ostinato.core.errors import ConfigError
from ostinato.tiers.port import TierReceipt

LeaseId = NewType("LeaseId", int)
"""Number of a lease, unique for the life of a cache."""


@dataclass(frozen=True, slots=True)
class LeaseTerms:
    """For how long a prefix is held.

    Attributes:
        ttl_s: Seconds; None pins it until it is released.
        refresh_on_hit: Whether each request that uses all of it restarts the time.
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
    """Whether a lease was granted."""

    ACCEPTED = "accepted"
    CLIPPED = "clipped"
    REJECTED = "rejected"


@dataclass(frozen=True, slots=True)
class LeaseReceipt:
    """The answer to a request for a lease.

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


@dataclass(frozen=True, slots=True)
class EraseReceipt:
    """What was erased of a tenant, by place.

    Attributes:
        num_requests: Requests that were cancelled for it.
        num_blocks: Published blocks, over all groups.
        num_leases: Leases that were released.
        num_events: Events that were taken out of the replay buffer.
        num_zeroed_slots: Slots of the KV store that were overwritten with zeros: the tenant's,
            and every other one without live content.
        num_texts: Texts that were known with their tokens.
        tiers: What was erased from each tier, if the engine has any.
        num_turns: Turns of the ledger.
    """

    num_requests: int = 0
    num_blocks: int = 0
    num_leases: int = 0
    num_events: int = 0
    num_zeroed_slots: int = 0
    num_texts: int = 0
    tiers: tuple[TierReceipt, ...] = ()
    num_turns: int = 0
