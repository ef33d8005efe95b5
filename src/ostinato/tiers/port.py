"""``KVTier``, the port between an engine and storage where KV outlives the pool.

A tier stores *extents*: runs of whole blocks of one sequence, over all layers, with the tokens that
they were computed from. It knows nothing of models, and the engine nothing of files or servers::

    prefix = Prefix(namespace, tenant, tokens)
    for ref in tier.look_up(prefix, start):           # stored blocks from `start` on
        result = tier.load(ref, into, ref.num_blocks, deadline)
        if result.fault: break                        # compute from here

    tier.store([(prefix.extent(first_block, num_blocks), payload)])
    tier.lease(prefix, keep_until, refresh_s)
    tier.use(prefix, reuse)                           # released by a request, for eviction
    tier.erase(salt)

All calls are thread-safe and block; an engine makes them from worker threads. A fault of the medium
is a result, counted in ``stats``, and never an exception.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from ostinato.tiers.prefix import Extent, Namespace, Prefix
from ostinato.tiers.retention import ReuseClass

__all__ = [
    "Buffer", "Extent", "ExtentRef", "KVTier", "LoadFault", "LoadResult", "Namespace", "Prefix",
    "StoreResult", "TierListener", "TierReceipt", "TierStats",
]  # fmt: skip

Buffer = bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True)
class ExtentRef:
    """Consecutive stored blocks that a look-up found.

    Attributes:
        tier: Name of their tier.
        start: Position of their first token.
        num_blocks: How many match the prefix.
        block_bytes: Size of each.
        locator: Where they are, for the tier itself.
        keep_until: Wall-clock end of their lease; 0 without one.
        refresh_s: How long each use extends the lease; 0 if uses do not.
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
    """The medium does not have it any more."""
    CHECKSUM = "checksum"
    """The bytes are not those that were stored."""
    SHORT = "short"
    """The medium returned fewer bytes than were stored."""
    DEADLINE = "deadline"
    """The deadline has passed."""
    STALE = "stale"
    """It was erased, evicted or replaced since the look-up."""
    IO = "io"
    """The medium raised an error."""
    OFF = "off"
    """The tier is off, or its circuit breaker is open."""


@dataclass(frozen=True, slots=True)
class LoadResult:
    """Result of a load.

    Attributes:
        num_blocks: Number of verified leading blocks; the rest of the buffer is undefined.
        fault: Why there are no more; None if all were loaded.
    """

    num_blocks: int
    fault: LoadFault | None = None


class StoreResult(StrEnum):
    """Result of storing an extent."""

    STORED = "stored"
    """It is durable, and look-ups find it."""
    PRESENT = "present"
    """All its blocks were stored already; the lease was updated."""
    FULL = "full"
    """Leased extents leave no room."""
    BUDGET = "budget"
    """The bytes that may be written in a day are spent."""
    TOO_LARGE = "too large"
    """It exceeds the largest extent of the tier."""
    BUSY = "busy"
    """Too many bytes are in flight."""
    READ_ONLY = "read-only"
    """The medium takes no writes at present."""
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
        complete: Whether nothing is left; False after a fault of the medium: repeat the erasure.
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
        num_extents: Extents that look-ups can find; 0 if only the server knows.
        num_blocks: Blocks of these extents.
        num_bytes: Bytes that the tier occupies.
        limit_bytes: Maximum bytes; 0 if the medium decides.
        leased_bytes: Bytes of extents under a lease.
        written_bytes: Bytes written, copies of kept extents included.
        loaded_bytes: Verified bytes of KV loaded.
        stores: Number of stores by result.
        loads: Number of loads by fault, ``ok`` without one.
        num_evicted: Extents removed to make room.
        num_damaged: Durable parts that were damaged when it was opened, or could not be read.
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
    """Callbacks of a tier, in the thread that stores; subclasses override what they need.

    An erasure is not reported block by block.
    """

    def on_stored(self, tier: str, extent: Extent) -> None:
        """Handle that look-ups find all blocks of an extent."""

    def on_removed(self, tier: str, digests: Sequence[bytes]) -> None:
        """Handle that look-ups do not find blocks any more, by the digests of their prefixes."""


class KVTier(Protocol):
    """Storage for KV outside the pool. Thread-safe."""

    @property
    def name(self) -> str:
        """A short name: ``disk``, ``remote``."""

    def look_up(self, prefix: Prefix, start: int) -> list[ExtentRef]:
        """Find stored blocks that continue a prefix.

        Args:
            prefix: The wanted tokens; all of them are compared.
            start: Position to continue from, a multiple of the block size.

        Returns:
            Consecutive runs of blocks from ``start`` on; empty if there are none. In a sparse
            namespace all runs from there on, in order and with the gaps between them.
        """

    def load(
        self, ref: ExtentRef, into: memoryview, num_blocks: int, deadline: float
    ) -> LoadResult:
        """Read and verify the leading blocks of a reference.

        Args:
            ref: From ``look_up``.
            into: At least ``num_blocks * ref.block_bytes`` writable bytes, shape (num_bytes,).
            num_blocks: How many, at most ``ref.num_blocks``.
            deadline: Time by ``time.monotonic()`` after which the caller does not wait.
        """

    def store(self, extents: Sequence[tuple[Extent, Buffer]]) -> list[StoreResult]:
        """Store extents as one group, durable together.

        Args:
            extents: Each with its payload, the bytes of its blocks in order. Not changed during
                the call.

        Returns:
            One result each; nothing is visible before it is durable.
        """

    def lease(self, prefix: Prefix, keep_until: float, refresh_s: float = 0.0) -> int:
        """Set the lease of the stored blocks of a prefix, without rewriting them.

        Args:
            prefix: The tokens.
            keep_until: Wall-clock end; 0 ends the lease.
            refresh_s: How long each use extends the lease; 0 if uses do not. The engine sets the
                end with each use, and reads this value after a restart.

        Returns:
            Number of leading tokens that are stored, and now leased; in a sparse namespace those
            of the last run of blocks without a gap.
        """

    def use(self, prefix: Prefix, reuse: ReuseClass) -> None:
        """Record that a request has released a prefix, a hint for eviction.

        Args:
            prefix: The prefix, stored or not.
            reuse: Its rank for eviction; see ``tiers.retention``.
        """

    def erase(self, salt: bytes) -> list[TierReceipt]:
        """Remove everything of a tenant, of one of its clients, or of a public prefix.

        Args:
            salt: Salt of a tenant, with or without its client's part, or of a public prefix, which
                includes everything that continues it.

        Returns:
            One receipt per medium.
        """

    def stats(self) -> list[TierStats]:
        """State and counts, one per medium."""

    def close(self) -> None:
        """Finish running writes and close the medium. May be called twice."""
