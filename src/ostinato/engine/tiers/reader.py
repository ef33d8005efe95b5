"""Threads that look prefixes up in a tier, and read them into blocks of the pool.

Blocks that are being filled are in no other table, so steps run meanwhile. Threads put results into
a ``LookUp`` or a ``Read``, which the engine's thread reads between steps.
"""

import logging
import threading
from collections import abc, deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field

from ostinato.cache.block_table import BlockTable
from ostinato.core.ids import RequestId
from ostinato.engine.tiers.groups import TierGroup, TierGroups
from ostinato.engine.tiers.load_note import LoadNote
from ostinato.engine.tiers.look_up import LookUp, TierHit, find
from ostinato.engine.tiers.threads import TierThreads
from ostinato.sched.sequence import Sequence
from ostinato.tiers.port import ExtentRef, KVTier, LoadFault

logger = logging.getLogger("ostinato")

NUM_READERS = 2
"""Threads that read: one alone copies at half of the memory's bandwidth."""


@dataclass(slots=True, eq=False)
class Piece:
    """What one thread reads at a time: an extent, or the needed part of it."""

    group: TierGroup  # whose blocks they are
    ref: ExtentRef  # the extent
    blocks: abc.Sequence[int]  # of the pool, to be filled
    num_skipped: int = 0  # leading blocks of the extent that the pool has
    num_loaded: int = 0  # leading blocks of ``blocks`` that were filled
    fault: LoadFault | None = None  # why not all of them

    @property
    def num_bytes(self) -> int:
        """Bytes to be read."""
        return len(self.blocks) * self.ref.block_bytes


@dataclass(slots=True, eq=False)
class Read:
    """Pieces that are being read into the pool."""

    pieces: list[Piece]  # in token order
    deadline: float  # by ``time.monotonic()``
    num_running: int = NUM_READERS  # threads that have not finished with it
    is_stopped: bool = False  # whether the rest is not needed, or useless after a fault
    waiting: deque[Piece] = field(init=False)  # pieces that no thread has begun

    def __post_init__(self) -> None:
        self.waiting = deque(self.pieces)

    def next_piece(self) -> Piece | None:
        """Take the next piece, in any thread; None if there is none left."""
        with suppress(IndexError):
            return self.waiting.popleft()
        return None


@dataclass(slots=True, eq=False)
class TierLoad:
    """The load of one request's prefix."""

    sequence: Sequence  # the request's
    look_up: LookUp  # its look-up in the tiers
    queued_s: float  # when that began, by ``time.monotonic()``
    after: "TierLoad | None" = None  # another request's load of the same prefix, which it waits for
    table: BlockTable | None = None  # blocks to be filled, once they are allocated
    read: Read | None = None  # fills them
    began_s: float = 0.0  # when that began
    note: LoadNote | None = None  # the result; None if no tier had anything

    @property
    def name(self) -> RequestId:
        """The id of its request."""
        return self.sequence.request.request_id

    @property
    def is_obsolete(self) -> bool:
        """Whether its request has ended, or was admitted before there was room to load."""
        return self.sequence.finish_reason is not None or self.sequence.table is not None

    @property
    def is_ready(self) -> bool:
        """Whether the threads have finished with what it waits for."""
        if self.read is not None:
            return not self.read.num_running
        if self.after is not None:
            return self.after.is_ready
        return self.look_up.hit is not None

    @property
    def pieces(self) -> list[Piece]:
        """What is read for it, in token order."""
        return [] if self.read is None else self.read.pieces

    def belongs_to(self, salt: bytes) -> bool:
        """Whether it reads for a tenant, or what continues a public prefix."""
        return self.sequence.key.identity.belongs_to(salt)

    def set_known_tokens(self, num_tokens: int) -> None:
        """Count tokens as cached before its request is first admitted."""
        if self.sequence.first_planned_s is None:
            known = max(self.sequence.num_known_tokens, num_tokens)
            self.sequence.num_known_tokens = known

    def stop(self) -> None:
        """Cancel the work for it that threads have not begun."""
        self.look_up.is_cancelled = True
        if self.read is not None:
            self.read.is_stopped = True


class TierReader:
    """The threads that look up and read."""

    def __init__(self, tier: KVTier, groups: TierGroups) -> None:
        self._tier, self._groups = tier, groups
        self._changed = threading.Condition()
        self._local = threading.local()
        self._buffers: list[tuple[threading.Lock, memoryview]] = []
        self._look_ups = TierThreads("ostinato-tier-look-up")
        self._readers = TierThreads("ostinato-tier-read", NUM_READERS)

    def look_up(self, look_up: LookUp) -> None:
        """Start a look-up."""
        self._look_ups.submit(self._look_up, look_up)

    def read(self, read: Read) -> None:
        """Start to read pieces, with all threads."""
        for _ in range(NUM_READERS):
            self._readers.submit(self._read, read)

    def wait_for(self, is_there: Callable[[], bool], seconds: float | None = None) -> None:
        """Wait for the threads."""
        with self._changed:
            self._changed.wait_for(is_there, seconds)

    def wipe(self) -> None:
        """Overwrite the threads' buffers with zeros, after what they are reading."""
        for lock, buffer in self._buffers:
            with lock:
                buffer[:] = bytes(len(buffer))

    def close(self, seconds: float) -> None:
        """End the threads, unless one hangs for so long."""
        self._look_ups.close(seconds)
        self._readers.close(seconds)

    def _look_up(self, look_up: LookUp) -> None:
        hit = TierHit(look_up.first_token)
        try:
            if not look_up.is_cancelled:
                hit = find(self._tier, self._groups, look_up)
        except Exception:
            logger.exception("a look-up in the tiers failed")
        with self._changed:
            look_up.hit = hit
            self._changed.notify_all()

    def _read(self, read: Read) -> None:
        """Read pieces until none is left."""
        while (piece := read.next_piece()) is not None:
            self._fill(read, piece)
        with self._changed:
            read.num_running -= 1
            self._changed.notify_all()

    def _fill(self, read: Read, piece: Piece) -> None:
        try:
            if read.is_stopped:
                piece.fault = LoadFault.STALE
            else:
                self._load(read, piece)
        except Exception:
            logger.exception("a load from the tiers failed")
            piece.num_loaded, piece.fault = 0, LoadFault.IO
        if piece.fault is not None:
            read.is_stopped = True

    def _load(self, read: Read, piece: Piece) -> None:
        """Read one piece, and write what is verified into its blocks."""
        width, skipped = piece.ref.block_bytes, piece.num_skipped
        num_blocks = skipped + len(piece.blocks)
        lock, buffer = self._buffer(num_blocks * width)
        with lock:
            result = self._tier.load(piece.ref, buffer, num_blocks, read.deadline)
            num_loaded = max(0, result.num_blocks - skipped)
            if num_loaded:
                content = buffer[skipped * width : result.num_blocks * width]
                piece.group.copies.import_blocks(piece.blocks[:num_loaded], content)
        piece.num_loaded, piece.fault = num_loaded, result.fault

    def _new_buffer(self, num_bytes: int) -> memoryview:
        return self._groups.groups[0].copies.new_buffer(num_bytes)

    def _buffer(self, num_bytes: int) -> tuple[threading.Lock, memoryview]:
        """Return a buffer of the running thread, kept for its next piece, and its lock."""
        kept: tuple[threading.Lock, memoryview] | None = getattr(self._local, "buffer", None)
        if kept is None or len(kept[1]) < num_bytes:
            kept = self._local.buffer = threading.Lock(), self._new_buffer(num_bytes)
            self._buffers.append(kept)
        return kept[0], kept[1][:num_bytes]


def pieces_of(
    groups: TierGroups, hit: TierHit, table: BlockTable, num_known: int
) -> Iterator[Piece]:
    """Cut what was found into pieces, windows and states first: without them the rest is useless.

    Args:
        groups: Of the model.
        hit: What a hit at its end needs.
        table: Of the pool, to be filled.
        num_known: Tokens that the pool has, which are not read.
    """
    for group in (*groups.sparse, *(one for one in groups.groups if one.is_full)):
        needed = group.needed(hit.end, num_known)
        for ref in hit.refs[group.name]:
            first = ref.start // group.unit
            part = range(max(needed.start, first), min(needed.stop, first + ref.num_blocks))
            if part:
                needed = range(part.stop, needed.stop)
                blocks = [group.block_of(table, place) for place in part]
                yield Piece(group, ref, blocks, part.start - first)
