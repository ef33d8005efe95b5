"""Which blocks of which records continue a prefix: digests find them, tokens decide."""

import threading
from dataclasses import dataclass, field
from math import inf, nextafter
from typing import Protocol

from ostinato.core.tokens import TOKEN_BYTES, num_common_tokens
from ostinato.tiers.folder import File
from ostinato.tiers.prefix import Prefix, block_digests
from ostinato.tiers.record import Header, Lease
from ostinato.tiers.retention import Retained, ReuseClass


class Place(Protocol):
    """The segment that holds a record."""

    @property
    def file(self) -> File:
        """Open, as long as something refers to it."""
        ...


@dataclass(slots=True, eq=False)
class Record(Retained):
    """A stored extent, as the index knows it.

    Attributes:
        header: Parsed and checked.
        segment: The segment that holds it.
        offset: Where in it.
        lease: How long it is kept.
        tokens: Packed; empty while it is sealed and its key was not seen yet.
        digests: One per block; empty like ``tokens``.
        num_indexed: Blocks that look-ups find here, and not in a newer record.
        erased: Its bytes are overwritten, or about to be.
    """

    header: Header
    segment: Place
    offset: int
    lease: Lease = field(default_factory=Lease)
    tokens: bytes = b""
    digests: list[bytes] = field(default_factory=list)
    num_indexed: int = 0
    erased: bool = False

    @property
    def size(self) -> int:
        """Bytes in its segment."""
        return self.header.total_bytes

    @property
    def keep_until(self) -> float:
        """Wall-clock end of its lease; 0 without one."""
        return self.lease.keep_until

    def open(self, key: bytes | None) -> bool:
        """Read its tokens; returns whether the key is the record's."""
        opened = self.header.open(key)
        if opened is not None:
            parent, self.tokens = opened
            self.digests = block_digests(parent, self.tokens, self.header.block_size)
        return opened is not None

    def num_common_blocks(self, prefix: Prefix, block: int, index: int) -> int:
        """Return how many of its blocks from ``index`` on are the prefix's from ``block`` on."""
        header, width = self.header, prefix.namespace.block_size * TOKEN_BYTES
        if header.namespace != prefix.namespace.digest or header.first_block + index != block:
            return 0
        mine, wanted = memoryview(self.tokens)[index * width :], memoryview(prefix.packed)
        common = num_common_tokens(mine, wanted[block * width : prefix.num_blocks * width])
        return common // prefix.namespace.block_size


Match = tuple[Record, int, int]
"""A record, the first of its blocks that matches, and how many do."""


class ExtentIndex:
    """Digest of all tokens up to a block's end -> record, and index of the block in it.

    Thread-safe.
    """

    def __init__(self) -> None:
        self._places = dict[bytes, tuple[Record, int]]()
        self._locked = dict[bytes, list[Record]]()
        self._lock = threading.RLock()
        self._last_use_s = 0.0
        self._gone = set[bytes]()

    def __len__(self) -> int:
        """Blocks that look-ups can find."""
        return len(self._places)

    def num_records(self) -> int:
        """Records that look-ups can find."""
        with self._lock:
            return len({id(record) for record, _ in self._places.values()})

    def add(self, record: Record) -> None:
        """Make a record findable; where two have the same block, the newer is found."""
        with self._lock:
            for index, digest in enumerate(record.digests):
                if (older := self._places.get(digest)) is not None:
                    older[0].num_indexed -= 1
                self._places[digest] = record, index
            self._gone.difference_update(record.digests)
            record.num_indexed = len(record.digests)

    def remove(self, record: Record, first: int = 0) -> None:
        """Make a record, or its blocks from ``first`` on, unfindable."""
        with self._lock:
            for digest in record.digests[first:]:
                if (place := self._places.get(digest)) is not None and place[0] is record:
                    del self._places[digest]
                    self._gone.add(digest)
                    record.num_indexed -= 1
            locked = self._locked.get(record.header.names[0], [])
            if not record.digests and record in locked:
                locked.remove(record)

    def take_gone(self) -> list[bytes]:
        """Return the digests of blocks that became unfindable since this was called last."""
        with self._lock:
            gone, self._gone = self._gone, set()
        return list(gone)

    def add_locked(self, record: Record) -> None:
        """Keep a sealed record until its tenant's key is seen."""
        with self._lock:
            self._locked.setdefault(record.header.names[0], []).append(record)

    def unlock(self, name: bytes, key: bytes) -> None:
        """Open the sealed records of a tenant; those that the key does not open are unfindable."""
        if name not in self._locked:
            return
        with self._lock:
            for record in self._locked.pop(name, ()):
                if record.open(key):
                    self.add(record)

    def is_live(self, record: Record) -> bool:
        """Whether a look-up may find it, now or when its key is seen."""
        with self._lock:
            if record.digests:
                return record.num_indexed > 0
            return record in self._locked.get(record.header.names[0], ())

    def use(self, prefix: Prefix, end: int, now_s: float, reuse: ReuseClass | None = None) -> None:
        """Note that blocks before ``end`` are in use: the root as much as the tail."""
        with self._lock:
            now_s = self.time_of_use(now_s)
            places = [self._places.get(digest) for digest in prefix.digests[:end]]
            for record in dict.fromkeys(place[0] for place in places if place is not None):
                record.use(now_s, reuse)

    def time_of_use(self, now_s: float) -> float:
        """Return the time of a use: later than that of all before it, whatever the clock does."""
        with self._lock:
            self._last_use_s = max(now_s, nextafter(self._last_use_s, inf))
            return self._last_use_s

    def matches(self, prefix: Prefix, block: int, end: int | None = None) -> list[Match]:
        """Return what continues a prefix from a block on, run by run, at least up to ``end``."""
        found, end = list[Match](), prefix.num_blocks if end is None else end
        with self._lock:
            while block < end:
                record, index = self._places.get(prefix.digests[block], (None, 0))
                count = record.num_common_blocks(prefix, block, index) if record else 0
                if record is None or not count:
                    break
                found.append((record, index, count))
                block += count
        return found
