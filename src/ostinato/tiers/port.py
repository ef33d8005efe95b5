"""The port between an engine and a place where KV outlives the pool: four calls.

A tier keeps *extents*: a run of whole blocks of one sequence, over all layers, with the tokens
that it was computed from. It knows nothing of models, and the engine nothing of files or servers::

    prefix = Prefix(namespace, tenant, tokens)
    for ref in tier.look_up(prefix, start):           # what continues the prefix at `start`
        result = tier.load(ref, into, ref.num_blocks, deadline)
        if result.fault: break                        # compute from here

    tier.store([(prefix.extent(first_block, num_blocks), payload)])
    tier.lease(prefix, keep_until, refresh_s)
    tier.use(prefix, reuse)                           # what a request released, for eviction
    tier.erase(salt)

All calls are thread-safe and block; an engine makes them from worker threads. None raises for a
fault of its medium: a fault is a result, counted in ``stats``.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from ostinato.tiers.prefix import Extent, Namespace, Prefix
from ostinato.tiers.retention import ReuseClass

__all__ = [
    "Buffer",
    "Extent",
    "ExtentRef",
    "KVTier",
    "LoadFault",
    "LoadResult",
    "Namespace",
    "Prefix",
    "StoreResult",
    "TierListener",
    "TierReceipt",
    "TierStats",
]

Buffer = bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True)
class ExtentRef:
    """Consecutive stored blocks that a look-up found.

    Attributes:
        tier: Name of the tier that has them.
        start: Position of their first token.
        num_blocks: How many agree with the tokens looked up.
        block_bytes: Size of each.
        locator: Where they are; the tier's own.
        keep_until: Wall-clock end of their lease; 0 without one.
        refresh_s: How long each use keeps them from then on; 0 if uses do not move the end.
    """

    tier: str
    start: int
    num_blocks: int
    block_bytes: int
    locator: object = field(repr=False)
    keep_until: float = 0.0
    refresh_s: float = 0.0


class LoadFault(StrEnum):
    """Why a load ended before its last block."""

    MISSING = "missing"
    """The medium no longer has it."""
    CHECKSUM = "checksum"
    """The bytes are not those that were stored."""
    SHORT = "short"
    """The medium returned fewer bytes than were stored."""
    DEADLINE = "deadline"
    """The time was up."""
    STALE = "stale"
    """It was erased, evicted or replaced since the look-up."""
    IO = "io"
    """The medium raised an error."""
    OFF = "off"
    """The tier is off, or its circuit breaker is open."""


@dataclass(frozen=True, slots=True)
class LoadResult:
    """What a load brought.

    Attributes:
        num_blocks: Leading blocks that are verified; what follows them in the buffer is undefined.
        fault: Why there are no more; None when all that was wanted is there.
    """

    num_blocks: int
    fault: LoadFault | None = None


class StoreResult(StrEnum):
    """What became of an extent that was to be stored."""

    STORED = "stored"
    """It is durable, and look-ups find it."""
    PRESENT = "present"
    """All its blocks were stored before; a lease was updated."""
    FULL = "full"
    """What is leased leaves no room."""
    BUDGET = "budget"
    """The bytes that may be written in a day are spent."""
    TOO_LARGE = "too large"
    """It exceeds what the tier keeps in one piece."""
    BUSY = "busy"
    """Too many bytes are on their way."""
    READ_ONLY = "read-only"
    """The medium takes no writes for now."""
    OFF = "off"
    """The tier is off, or its circuit breaker is open."""
    IO = "io"
    """The medium raised an error; nothing of it is visible."""


@dataclass(frozen=True, slots=True)
class TierReceipt:
    """What an erasure removed from one tier.

    Attributes:
        tier: Name of the tier.
        where: Folder or address.
        num_extents: Extents removed.
        num_bytes: Bytes that were overwritten or deleted.
        num_keys: Encryption keys destroyed.
        complete: Whether nothing of it is left; False after a fault of the medium, so that the
            erasure is to be repeated.
    """

    tier: str
    where: str
    num_extents: int
    num_bytes: int
    num_keys: int = 0
    complete: bool = True


@dataclass(frozen=True, slots=True)
class TierStats:
    """State and counts of one tier since it was opened; bytes are those of its medium.

    Attributes:
        tier: Name of the tier.
        where: Folder or address.
        state: ``on``, ``read-only`` or ``off``.
        reason: Why it is not on.
        num_extents: Extents that look-ups can find; 0 where a server would have to be asked.
        num_blocks: Their blocks.
        num_bytes: Bytes that the tier occupies.
        limit_bytes: What it may occupy; 0 if the medium decides.
        leased_bytes: Bytes of extents under a lease.
        written_bytes: Bytes written, copies of kept extents included.
        loaded_bytes: Verified bytes of KV loaded.
        stores: Number of stores by result.
        loads: Number of loads by fault, ``ok`` without one.
        num_evicted: Extents removed to make room.
        num_damaged: Places that were durable and found damaged when it was opened.
    """

    tier: str
    where: str
    state: str
    reason: str = ""
    num_extents: int = 0
    num_blocks: int = 0
    num_bytes: int = 0
    limit_bytes: int = 0
    leased_bytes: int = 0
    written_bytes: int = 0
    loaded_bytes: int = 0
    stores: dict[str, int] = field(default_factory=dict)
    loads: dict[str, int] = field(default_factory=dict)
    num_evicted: int = 0
    num_damaged: int = 0


class TierListener:
    """Is told what a tier stores and evicts, in the thread that does so; overrides what it needs.

    An erasure is not reported block by block: who asks for it knows whose blocks are gone.
    """

    def on_stored(self, tier: str, extent: Extent) -> None:
        """Look-ups find all blocks of an extent."""

    def on_removed(self, tier: str, digests: Sequence[bytes]) -> None:
        """Look-ups no longer find blocks, by the digests of their prefix."""


class KVTier(Protocol):
    """A place for KV outside the pool. Thread-safe."""

    @property
    def name(self) -> str:
        """A short name: ``disk``, ``remote``."""
        ...

    def look_up(self, prefix: Prefix, start: int) -> list[ExtentRef]:
        """Find what continues a prefix.

        Args:
            prefix: The tokens that are wanted, compared one by one.
            start: Position to continue from, a multiple of the block size.

        Returns:
            Consecutive runs of blocks from ``start`` on; empty if there are none.
        """
        ...

    def load(
        self, ref: ExtentRef, into: memoryview, num_blocks: int, deadline: float
    ) -> LoadResult:
        """Read and verify leading blocks of what a look-up found.

        Args:
            ref: From ``look_up``.
            into: At least ``num_blocks * ref.block_bytes`` writable bytes, shape (num_bytes,).
            num_blocks: How many, at most ``ref.num_blocks``.
            deadline: ``time.monotonic()`` after which the caller no longer waits.
        """
        ...

    def store(self, extents: Sequence[tuple[Extent, Buffer]]) -> list[StoreResult]:
        """Store extents as one group, durable together.

        Args:
            extents: Each with its payload: the bytes of its blocks in order,
                ``extent.payload_bytes`` of them. Not changed during the call.

        Returns:
            One result each; nothing is visible before it is durable.
        """
        ...

    def lease(self, prefix: Prefix, keep_until: float, refresh_s: float = 0.0) -> int:
        """Set the end of the lease of what is stored of a prefix, without rewriting it.

        Args:
            prefix: The tokens.
            keep_until: Wall-clock time; 0 ends the lease.
            refresh_s: How long each use keeps it from then on: the engine sets the end with each
                use, and reads this after a restart. 0 if uses do not move the end.

        Returns:
            Leading tokens of the prefix that are stored, and now leased.
        """
        ...

    def use(self, prefix: Prefix, reuse: ReuseClass) -> None:
        """Note that a request has released a prefix; a hint for what to keep.

        Args:
            prefix: What it used, stored or not.
            reuse: Ranks what is to be evicted; see ``tiers.retention``.
        """
        ...

    def erase(self, salt: bytes) -> list[TierReceipt]:
        """Remove everything of a tenant, of one of its clients, or of a public prefix.

        Args:
            salt: That of the tenant; with all that its client added; or of a public prefix, with
                which goes what continues it.

        Returns:
            One receipt per medium.
        """
        ...

    def stats(self) -> list[TierStats]:
        """State and counts, one per medium."""
        ...

    def close(self) -> None:
        """Finish what is being written and release the medium. May be called twice."""
        ...
