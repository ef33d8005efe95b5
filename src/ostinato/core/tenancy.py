"""What is a tenant entitled to, and what is left after it was erased?"""

from dataclasses import dataclass

from ostinato.core.errors import ConfigError

NARROWED_BY = "\x1f"
"""Ends a tenant's salt where a client brought one of its own (ASCII's unit separator)."""


def narrow_salt(salt: str, cache_salt: str) -> str:
    """Return the salt of a tenant's request that brings one of its own.

    The tenant's comes first, so that nothing a client sends reaches another tenant's; an empty
    one stands for the shared name space, in which clients part as they like.
    """
    return f"{salt}{NARROWED_BY}{cache_salt}" if salt and cache_salt else salt or cache_salt


def owner_of(salt: bytes) -> bytes:
    """Return a tenant's salt without what its client narrowed it by.

    Blocks, shares and counts are the owner's: a client gets no more of them by new salts.
    """
    return salt.partition(NARROWED_BY.encode())[0]


def belongs_to(salt: str, erased: str) -> bool:
    """Whether what has one salt goes when another is erased: itself, or its owner's."""
    return salt == erased or owner_of(salt.encode()) == erased.encode()


@dataclass(frozen=True, slots=True)
class Allotment:
    """A tenant's share of the pool, in blocks.

    Attributes:
        floor: Blocks that no other tenant can evict.
        quota: Blocks that it may keep; above that it evicts its own first. None is no bound.
    """

    floor: int = 0
    quota: int | None = None

    def __post_init__(self) -> None:
        """Refuse what cannot be.

        Raises:
            ConfigError: A bound is no integer or negative, or the floor is above the quota.
        """
        for name, bound in (("floor", self.floor), ("quota", self.quota or 0)):
            if not isinstance(bound, int) or isinstance(bound, bool):
                raise ConfigError(f"{name}={bound!r}: must be an integer, in blocks")
        if self.floor < 0 or (self.quota is not None and self.quota < 1):
            raise ConfigError(
                f"floor={self.floor}, quota={self.quota}: a floor is at least 0 and a quota at "
                "least 1 block"
            )
        if self.quota is not None and self.floor > self.quota:
            raise ConfigError(
                f"floor={self.floor} is above quota={self.quota}: lower the one or raise the other"
            )


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
    """

    num_requests: int = 0
    num_blocks: int = 0
    num_leases: int = 0
    num_events: int = 0
    num_zeroed_slots: int = 0
    num_texts: int = 0
