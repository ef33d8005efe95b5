"""Finds the extents on a server that continue a prefix, and verifies their blocks.

A prefix may continue in the middle of an extent, so a search begins as many blocks earlier as an
extent may have.
"""

from collections.abc import Callable
from dataclasses import dataclass

from ostinato.core.tokens import TOKEN_BYTES, num_common_tokens
from ostinato.tiers.byte_store import ByteStore
from ostinato.tiers.port import LoadFault, Prefix
from ostinato.tiers.record import RecordHeader, header_length, parse

MAX_EXTENT_BYTES, MAX_EXTENT_BLOCKS = 8 << 20, 64
"""Larger extents are refused, unless they are one block."""
_FIRST_WINDOW, LONGEST_WINDOW = 64, 1024
_START_BYTES = 1024
_MAX_HEADER_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class RemoteExtent:
    """An extent on the server.

    Attributes:
        place: Its key there.
        header: Parsed and checked.
        first: Its first block that continues the prefix.
        key: The tenant's key; None in the clear.
    """

    place: str
    header: RecordHeader
    first: int
    key: bytes | None

    @property
    def place_of_first(self) -> int:
        """Index in the sequence of the first block that continues the prefix."""
        return self.header.first_block + self.first


class PrefixSearch:
    """Finds the extents of one prefix, window by window.

    Attributes:
        key: The tenant's key; None in the clear.
        place: Returns the key on the server of an extent that begins with a block.
    """

    def __init__(
        self, store: ByteStore, prefix: Prefix, key: bytes | None, place: Callable[[int], str]
    ) -> None:
        self.key, self.place = key, place
        self._store, self._prefix = store, prefix
        self._extents = dict[int, tuple[str, RecordHeader, bytes]]()

    def run(self, block: int) -> list[tuple[RemoteExtent, int]]:
        """Return extents from a block on, each with its number of matching blocks.

        They are consecutive, but in a sparse namespace.
        """
        runs, window = list[tuple[RemoteExtent, int]](), _FIRST_WINDOW
        fetched = max(0, block - look_back(self._prefix) + 1)
        while block < self._prefix.num_blocks:
            if block >= fetched:
                end = min(self._prefix.num_blocks, block + window)
                self._fetch(range(fetched, end))
                fetched, window = end, min(2 * window, LONGEST_WINDOW)
            count, first = self._best(block)
            if not count and self._prefix.namespace.is_sparse:
                block = min((place for place in self._extents if place > block), default=fetched)
                continue
            if not count:
                break
            place, header, _ = self._extents[first]
            runs.append((RemoteExtent(place, header, block - first, self.key), count))
            block += count
        return runs

    def last_run(self) -> list[tuple[RemoteExtent, int]]:
        """Return the extents of ``run`` from the first block that no gap parts from the last."""
        runs = self.run(0)
        for place in range(len(runs) - 1, 0, -1):
            before, count = runs[place - 1]
            if before.place_of_first + count < runs[place][0].place_of_first:
                return runs[place:]
        return runs

    def num_from(self, block: int) -> int:
        """Return the number of matching blocks of the extent that begins with a block."""
        self._fetch(range(block, block + 1))
        return self._num_matching(block, block)

    def _fetch(self, blocks: range) -> None:
        """Fetch the headers of extents that begin with one of these blocks."""
        places = [self.place(block) for block in blocks]
        starts = self._store.starts(places, _START_BYTES)
        for block, place, start in zip(blocks, places, starts, strict=True):
            header = parse(self._whole(place, start), 0) if start else None
            opened = header.open(self.key) if header else None
            if header is None or opened is None or header.first_block != block:
                continue
            is_own = header.namespace == self._prefix.namespace.digest
            if is_own and opened[0] == self._prefix.digest_before(block):
                self._extents[block] = place, header, opened[1]

    def _whole(self, place: str, start: bytes) -> bytes:
        length = header_length(start)
        if len(start) < length <= _MAX_HEADER_BYTES:
            return self._store.get(place, 0, length)
        return start

    def _best(self, block: int) -> tuple[int, int]:
        """Return the most matching blocks of one extent from a block on, and its first block."""
        earliest = max(0, block - look_back(self._prefix) + 1)
        return max(
            (self._num_matching(block, first), first) for first in range(earliest, block + 1)
        )

    def _num_matching(self, block: int, first: int) -> int:
        if first not in self._extents:
            return 0
        size, tokens = self._prefix.namespace.block_size, memoryview(self._extents[first][2])
        width = size * TOKEN_BYTES
        packed = memoryview(self._prefix.packed)[block * width : self._prefix.num_blocks * width]
        return num_common_tokens(tokens[(block - first) * width :], packed) // size


def look_back(prefix: Prefix) -> int:
    """Return how many blocks an extent may have, and so how far back its first block may be."""
    return max(1, min(MAX_EXTENT_BLOCKS, MAX_EXTENT_BYTES // prefix.namespace.block_bytes))


def verify(
    where: RemoteExtent, first: int, answer: bytes, into: memoryview
) -> tuple[int, LoadFault | None]:
    """Verify blocks and put them into the caller's memory; returns how many are good, and why."""
    width, size = where.header.stored_block_bytes, where.header.block_bytes
    for index in range(len(into) // size):
        stored = memoryview(answer)[index * width : (index + 1) * width]
        if len(stored) < width:
            return index, LoadFault.SHORT
        place, block = into[index * size : (index + 1) * size], where.first + first + index
        if not where.header.open_block(block, where.key, stored, place):
            return index, LoadFault.CHECKSUM
    return len(into) // size, None
