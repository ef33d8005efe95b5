"""Segments: append-only files of records, and how they are recovered at start.

::

    ┌──────────────────────────────────────┬────────┬────────┬─────┬──────┐
    │ magic, sequence, seed, time, durable │ record │ record │ ... │ mark │
    └──────────────────────────────────────┴────────┴────────┴─────┴──────┘
    0                                     512

Headers are read in order; after a damaged one, reading continues at the next intact one. Blocks are
read only in the last group, which no later record declares durable. A torn end of the file is cut
off, and damage in the middle is overwritten.

*durable* is written after each sync and becomes durable with the next one. It tells a group torn by
a crash from damage: nothing before that offset can be torn. Folders of older versions lack it, and
there damage in the last group counts as a torn end.
"""

import os
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import xxhash

from ostinato.core.errors import ConfigError
from ostinato.core.tokens import TOKEN_BYTES, num_common_tokens
from ostinato.tiers.folder import File, Folder
from ostinato.tiers.port import Buffer, LoadFault
from ostinato.tiers.prefix import Prefix, block_digests
from ostinato.tiers.record import (
    ALIGNMENT,
    ERASED,
    EXTENT,
    FIXED_BYTES,
    MAGIC,
    MARK,
    RecordHeader,
    RecordLease,
    aligned,
    filler,
    header_length,
    parse,
)
from ostinato.tiers.retention import Retained

SUFFIX = ".segment"
_HEADER = struct.Struct("<8sQQd16s")
_DURABLE = struct.Struct("<Q16s")
_DURABLE_AT = 256
_MAGIC = b"OSTKVSG1"
_READ_BYTES = 4096
_SEARCH_BYTES = 1 << 20


class UnreadableSegment(Exception):
    """A segment file whose header is torn, damaged or another segment's.

    Attributes:
        damaged_bytes: How much of it was durable; 0 if it may be torn.
    """

    def __init__(self, name: str, file: File) -> None:
        super().__init__(name)
        durable = _noted_durable(file, name)
        self.damaged_bytes = durable if durable > ALIGNMENT else 0


@dataclass(slots=True, eq=False)
class Record(Retained):
    """A stored extent.

    Attributes:
        header: Parsed and checked.
        segment: The segment that contains it; None once that is evicted.
        offset: Its offset there.
        lease: How long it is kept.
        tokens: Packed; empty while it is sealed and its key unknown.
        digests: One per block; empty like ``tokens``.
        parent: Digest of all tokens before it; empty like ``tokens``.
        num_indexed: Blocks that look-ups find here, and not in a newer record.
        erased: Its bytes are overwritten, or about to be.
    """

    header: RecordHeader
    segment: "Segment | None"
    offset: int
    lease: RecordLease = field(default_factory=RecordLease)
    tokens: bytes = b""
    digests: list[bytes] = field(default_factory=list)
    num_indexed: int = 0
    erased: bool = False
    parent: bytes = b""

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
            self.parent, self.tokens = opened
            self.digests = block_digests(self.parent, self.tokens, self.header.block_size)
        return opened is not None

    def num_common_blocks(self, prefix: Prefix, block: int, index: int) -> int:
        """Return how many of its blocks from ``index`` on are the prefix's from ``block`` on."""
        header, width = self.header, prefix.namespace.block_size * TOKEN_BYTES
        if header.namespace != prefix.namespace.digest or header.first_block + index != block:
            return 0
        own, packed = memoryview(self.tokens)[index * width :], memoryview(prefix.packed)
        common = num_common_tokens(own, packed[block * width : prefix.num_blocks * width])
        return common // prefix.namespace.block_size

    def read_block(
        self, file: File, index: int, key: bytes | None, into: memoryview
    ) -> LoadFault | None:
        """Read and verify a block from its segment's file; OSError if the medium fails."""
        header = self.header
        stored = memoryview(bytearray(header.stored_block_bytes)) if header.sealed else into
        start = self.offset + header.header_bytes + index * header.stored_block_bytes
        if file.read(stored, start) < len(stored):
            return LoadFault.SHORT
        return None if header.open_block(index, key, stored, into) else LoadFault.CHECKSUM


@dataclass(eq=False)
class Segment:
    """One file of records.

    Attributes:
        file: The open file.
        name: Name of the file.
        sequence: Its number; newer segments have larger ones.
        seed: Seed of the checksums of its headers.
        created: Wall-clock time of its creation.
        end: Offset after its last record.
        durable: Offset up to which it is durable.
        records: Its extents, also those that look-ups do not find, until they are erased.
        damage: Offset and size of each part that was damaged when it was read.
    """

    file: File
    name: str
    sequence: int
    seed: int
    created: float
    end: int = ALIGNMENT
    durable: int = ALIGNMENT
    records: list[Record] = field(default_factory=list)
    damage: list[tuple[int, int]] = field(default_factory=list)

    @classmethod
    def create(cls, folder: Folder, sequence: int, created: float) -> "Segment":
        """Create an empty segment, durable after the first sync."""
        name, seed = _name(sequence), int.from_bytes(os.urandom(8), "little")
        segment = cls(folder.create(name), name, sequence, seed, created)
        fields = _HEADER.pack(_MAGIC, sequence, seed, created, bytes(16))[:-16]
        header = fields + xxhash.xxh3_128_digest(fields)
        try:
            segment.file.write([header + bytes(ALIGNMENT - len(header))], 0)
        except OSError:
            folder.remove(name)
            raise
        return segment

    @classmethod
    def open(cls, folder: Folder, name: str) -> "Segment":
        """Open a segment without reading its records.

        Raises:
            UnreadableSegment: Its header is torn, damaged or another segment's.
            ConfigError: A newer version wrote it.
        """
        file = folder.open(name)
        header = _read(file, 0, _HEADER.size)
        if file.size() < ALIGNMENT:
            raise UnreadableSegment(name, file)
        if header[:7] == _MAGIC[:7] and header[:8] != _MAGIC:
            raise ConfigError(
                f"{folder.path}/{name}: format {header[7:8]!r}, where this version reads "
                f"{_MAGIC[7:]!r}: give it another folder, or remove this one"
            )
        if xxhash.xxh3_128_digest(header[:-16]) != header[-16:]:
            raise UnreadableSegment(name, file)
        _, sequence, seed, created, _ = _HEADER.unpack(header)
        if name != _name(sequence):
            raise UnreadableSegment(name, file)
        return cls(file, name, sequence, seed, created)

    def close(self) -> None:
        """Detach its records, so that the file is closed with its last reader."""
        for record in self.records:
            record.segment = None
        self.records.clear()

    def append(self, buffers: list[Buffer], size: int) -> int:
        """Append a record, durable after ``sync``; returns its offset."""
        padding = aligned(size) - size
        self.file.write([*buffers, bytes(padding)] if padding else buffers, self.end)
        offset, self.end = self.end, self.end + aligned(size)
        return offset

    def sync(self) -> None:
        """Make all records durable."""
        self.file.sync()
        self.durable = self.end
        self._note_durable()

    def cut(self) -> None:
        """Cut off everything after the last durable record."""
        self.file.truncate(self.durable)
        self.end = self.durable

    def clear(self) -> None:
        """Cut off everything, once all of its records are erased."""
        self.durable = ALIGNMENT
        self._note_durable()  # first: after a crash, a lower note is no damage
        self.file.sync()
        self.cut()

    def void(self, offsets: Iterable[int]) -> None:
        """Overwrite the headers of records: after a crash they are damage, and overwritten."""
        for offset in offsets:
            self.file.write([bytes(FIXED_BYTES)], offset)
        self.file.sync()

    def overwrite(self, places: Sequence[tuple[int, int]]) -> None:
        """Overwrite records, or damage, with zeros, and durably mark them as erased.

        Headers are written last: after a crash before that, they are damage, as before.

        Args:
            places: Offset and size of each.
        """
        for offset, size in places:
            for start in range(offset + FIXED_BYTES, offset + size, _SEARCH_BYTES):
                self.file.write([bytes(min(_SEARCH_BYTES, offset + size - start))], start)
        self.file.sync()
        for offset, size in places:
            self.file.write([filler(ERASED, size, self.seed, self.durable)], offset)
        self.file.sync()

    def mark(self) -> None:
        """Append a mark that all of it is durable, for a faster start."""
        header = filler(MARK, ALIGNMENT, self.seed, self.durable)
        self.append([header], len(header))

    def scan(self) -> None:
        """Read the headers of its records.

        Effects: cuts off or overwrites torn and damaged parts; OSError if that fails.
        """
        headers = list(self.headers())
        self.durable = max([ALIGNMENT, *(header.durable for _, header in headers)])
        committed = max(self.durable, _noted_durable(self.file, self.name))
        intact = [x for x in headers if self._is_durable(*x)]
        self.records = [
            Record(header, self, offset, header.lease, last_use_s=self.created)
            for offset, header in intact
            if header.kind == EXTENT
        ]
        places = [(offset, header.total_bytes) for offset, header in intact]
        self.damage = [
            (start, min(stop, committed) - start)
            for start, stop in _gaps(places, committed)
            if start < committed
        ]
        self._heal(places)

    def headers(self) -> Iterator[tuple[int, RecordHeader]]:
        """Yield the intact headers, in order of their offsets."""
        size, offset = self.file.size(), ALIGNMENT
        while offset + FIXED_BYTES <= size:
            header = self._header(offset)
            if header is not None and offset + header.total_bytes <= size:
                yield offset, header
                offset += header.total_bytes
            else:
                offset = self._next_magic(offset + ALIGNMENT, size)

    def _header(self, offset: int) -> RecordHeader | None:
        start = _read(self.file, offset, _READ_BYTES)
        length = header_length(start)
        if length > len(start):
            start = _read(self.file, offset, min(length, self.file.size() - offset))
        header = parse(start, self.seed)
        whole = header is not None and header.total_bytes >= aligned(header.record_bytes)
        return header if whole else None

    def _next_magic(self, offset: int, size: int) -> int:
        while offset < size:
            chunk, place = _read(self.file, offset, _SEARCH_BYTES), 0
            while (place := chunk.find(MAGIC, place)) >= 0:
                if place % ALIGNMENT == 0:
                    return offset + place
                place += 1
            offset += _SEARCH_BYTES
        return size

    def _is_durable(self, offset: int, header: RecordHeader) -> bool:
        if offset + header.total_bytes <= self.durable or header.kind != EXTENT:
            return True
        start, width = offset + header.header_bytes, header.stored_block_bytes
        return all(
            header.is_block(i, _read(self.file, start + i * width, width))
            for i in range(header.num_blocks)
        )

    def _heal(self, intact: list[tuple[int, int]]) -> None:
        end = sum(intact[-1]) if intact else ALIGNMENT
        if gaps := [(start, stop - start) for start, stop in _gaps(intact, end)]:
            self.overwrite(gaps)
        if end > self.durable:
            self.file.sync()
        self.end = self.durable = end
        if self.damage:
            self._note_durable()  # warn of it only once
        if self.file.size() > end:
            self.cut()

    def _note_durable(self) -> None:
        self.file.write([_durable_note(self.durable, self.name)], _DURABLE_AT)


def _gaps(places: list[tuple[int, int]], end: int) -> Iterator[tuple[int, int]]:
    """Yield start and stop of the gaps between records, and of the last one up to ``end``."""
    last = ALIGNMENT
    for offset, size in [*places, (end, 0)]:
        if offset > last:
            yield last, offset
        last = offset + size


def _durable_note(durable: int, name: str) -> bytes:
    check = xxhash.xxh3_128_digest(name.encode() + durable.to_bytes(8, "little"))
    return _DURABLE.pack(durable, check)


def _noted_durable(file: File, name: str) -> int:
    """Return how much of a file is noted as durable; 0 without a note."""
    note = _read(file, _DURABLE_AT, _DURABLE.size)
    durable = int.from_bytes(note[:8], "little")
    return durable if note == _durable_note(durable, name) else 0


def _name(sequence: int) -> str:
    return f"{sequence:012d}{SUFFIX}"


def _read(file: File, offset: int, size: int) -> bytes:
    into = bytearray(size)
    return bytes(into[: file.read(memoryview(into), offset)])
