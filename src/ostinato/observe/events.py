"""The log of KV events.

A consumer of every event can rebuild which full blocks are cached, and a router can send a
request to the engine that has its prefix. Events of one step form a batch; batches are numbered
from 0 without gaps, and a bounded number of them is kept for consumers that missed some::

    step     publish ─┐
                      ├─► pending ──commit──► batch n ─► sinks
    step     evict ───┘      └───fail: stored events are retracted, removals stay

A block counts as removed with its last copy. Partial blocks have no events: vLLM's format knows
full blocks only.

The log is written by the engine's thread; batches may be replayed from any other.
"""

import hashlib
import logging
import threading
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Set
from dataclasses import dataclass, replace

from ostinato.core.identity import BOUNDARY, IMAGE_PLACE, Identity, ImageSpan
from ostinato.core.ids import BlockDigest

_log = logging.getLogger(__name__)

_SALT_NAME = b"salt-sha256:"


def salt_name(salt: bytes) -> str:
    """Return the name that KV events give a salt, in place of the salt; a name is its own."""
    if salt.startswith(_SALT_NAME):
        return salt.decode()
    return (_SALT_NAME + hashlib.sha256(salt).hexdigest()[:32].encode()).decode()


def images_of(encoded: bytes, start: int) -> list[ImageSpan]:
    """Read the images back from the extra of a block that begins at a token."""
    images, place = list[ImageSpan](), 0
    while place < len(encoded):
        if encoded[place : place + 4] == BOUNDARY:
            place += len(BOUNDARY) + hashlib.sha256().digest_size
            continue
        end = place + 4 + int.from_bytes(encoded[place : place + 4], "little")
        offset, length = IMAGE_PLACE.unpack_from(encoded, end)
        images.append(ImageSpan(encoded[place + 4 : end], start + offset, length))
        place = end + IMAGE_PLACE.size
    return images


@dataclass(frozen=True, slots=True)
class BlockStored:
    """Neighbouring full blocks became findable.

    Attributes:
        digests: One per block, in token order.
        parent: Digest of the block before the first; None at the start of a sequence.
        tokens: Token ids of all blocks, shape (num_blocks * block_size,); four bytes each, since
            many batches are kept.
        block_size: Tokens per block.
        identity: What the sequence must agree on; its adapter and tenant are in the digests.
        extras: What images add, one entry per block; None where no image touches it.
        group: Which layers; 0 for full attention.
        medium: Name of the tier that has them; empty for the pool.
    """

    digests: tuple[BlockDigest, ...]
    parent: BlockDigest | None
    tokens: "array[int]"
    block_size: int
    identity: Identity
    extras: tuple[bytes | None, ...] = ()
    group: int = 0
    medium: str = ""

    def without(self, digests: Set[BlockDigest]) -> "BlockStored":
        """Return the event without its last blocks, from the first of those digests on."""
        kept = next(i for i, digest in enumerate(self.digests) if digest in digests)
        return replace(
            self,
            digests=self.digests[:kept],
            tokens=self.tokens[: kept * self.block_size],
            extras=self.extras[:kept],
        )


@dataclass(frozen=True, slots=True)
class BlockRemoved:
    """The last copy of each of these blocks is gone.

    Attributes:
        digests: One per block.
        identity: Whose they were.
        group: Which layers; 0 for full attention.
        medium: Name of the tier that had them; empty for the pool.
    """

    digests: tuple[BlockDigest, ...]
    identity: Identity
    group: int = 0
    medium: str = ""


@dataclass(frozen=True, slots=True)
class AllCleared:
    """The cache is empty."""


Event = BlockStored | BlockRemoved | AllCleared


@dataclass(frozen=True, slots=True)
class EventBatch:
    """The events between two commits.

    Attributes:
        sequence: Number of the batch, from 0 without gaps.
        time_s: By the cache's clock.
        events: In the order in which they happened.
    """

    sequence: int
    time_s: float
    events: tuple[Event, ...]


class EventLog:
    """Collects events into batches, and keeps the newest of them."""

    def __init__(self, clock: Callable[[], float], keep_batches: int) -> None:
        """Start with batch 0.

        Args:
            clock: Stamps batches.
            keep_batches: Batches kept for ``replay``.
        """
        self._clock = clock
        self._pending: list[Event] = []
        self._kept: deque[EventBatch] = deque(maxlen=keep_batches)
        self._sinks: list[Callable[[EventBatch], None]] = []
        self._erasers: list[Callable[[], None]] = []
        self._next = 0
        self._erased_before = 0
        self._lock = threading.Lock()  # of the kept batches

    @property
    def max_kept_batches(self) -> int:
        """Batches that a replay can hold."""
        return self._kept.maxlen or 0

    @property
    def next_sequence(self) -> int:
        """Number of the next batch."""
        return self._next

    def subscribe(
        self, sink: Callable[[EventBatch], None], on_erase: Callable[[], None] | None = None
    ) -> None:
        """Subscribe to all batches from now on.

        Args:
            sink: Is called with each batch; it must be quick. One that raises is unsubscribed.
            on_erase: Is called after a tenant was erased; when it returns, the subscriber holds
                no event that it was given before.
        """
        self._sinks.append(sink)
        if on_erase is not None:
            self._erasers.append(on_erase)

    def add(self, event: Event) -> None:
        """Add an event to the next batch."""
        self._pending.append(event)

    def flush(self) -> None:
        """Close the next batch, unless it is empty."""
        if not self._pending:
            return
        batch = EventBatch(self._next, self._clock(), tuple(self._pending))
        self._pending.clear()
        with self._lock:
            self._next += 1
            self._kept.append(batch)
        for sink in self._sinks[:]:
            try:
                sink(batch)
            except Exception:
                _log.exception("a subscriber to cache events raised and is unsubscribed")
                self._sinks.remove(sink)

    def retract(self, identity: Identity, digests: Iterable[BlockDigest], group: int) -> None:
        """Retract what a failed step stored.

        Contents that the step stored are dropped before they are sent. Others
        were announced before, lost their first copy to the step and a second one with it:
        those are removed.
        """
        gone = set(digests)
        for place in reversed(range(len(self._pending))):  # the newest stored it last
            event = self._pending[place]
            if isinstance(event, BlockStored) and event.group == group:
                announced = gone.intersection(event.digests)
                if announced:
                    self._pending[place] = event.without(announced)
                    gone -= announced
        if gone:
            self._pending.append(BlockRemoved(tuple(gone), identity, group))
        self._pending = [e for e in self._pending if not isinstance(e, BlockStored) or e.digests]

    def replay(self, start: int) -> list[EventBatch] | None:
        """Return the kept batches from a number on; None if some of them are gone.

        A consumer that gets None starts over: it drops all that it knows and asks from 0; if
        that is gone as well, it learns from the next batch on. A gap in which a tenant was erased
        counts as gone, since its removals were erased with it; from 0 on there is nothing to
        remove.
        """
        with self._lock:
            oldest = self._kept[0].sequence if self._kept else self._next
            if start < oldest or 0 < start < self._erased_before:
                return None
            return [batch for batch in self._kept if batch.sequence >= start]

    def erase(self, tenant: bytes) -> int:
        """Erase a tenant's events from the kept batches; returns how many.

        Its batches stay, emptied, so that numbers have no gaps.

        Effects: waits until subscribers hold none of them either.
        """
        with self._lock:
            before = sum(len(batch.events) for batch in self._kept)
            kept = [
                replace(batch, events=tuple(e for e in batch.events if not _belongs(e, tenant)))
                for batch in self._kept
            ]
            self._kept.clear()
            self._kept.extend(kept)
            num_erased = before - sum(len(batch.events) for batch in kept)
            if num_erased:
                self._erased_before = self._next
        for settle in self._erasers:
            settle()
        return num_erased


def _belongs(event: Event, tenant: bytes) -> bool:
    return not isinstance(event, AllCleared) and event.identity.belongs_to(tenant)
