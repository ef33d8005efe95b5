"""The format of an extent, in a segment on disk and in a value on a server.

::

    header                                                            blocks
    ┌──────────────┬─────────┬──────────┬──────────┬──────┬───────────┬─────────┬─────────┬───
    │ subject, 160 │ durable │ checksum │ 2 leases │ body │ checksums │ block 0 │ block 1 │ ...
    └──────────────┴─────────┴──────────┴──────────┴──────┴───────────┴─────────┴─────────┴───
                                                    parent digest, tokens

* The *subject* never changes: namespace, names of the tenant, position, sizes, and a random salt.
* *durable* is the offset up to which the segment was durable when the record was written.
* The *checksum* is xxh3-128 of all of the header except itself and the leases; its seed differs by
  segment, so that neither old nor injected bytes pass for a header.
* A *lease* is the one field that is rewritten in place, in two slots by turns: a torn write leaves
  the other. Its 16 bytes are a turn, a checksum, the end, and how far each use moves the end, in
  whole seconds. In older folders it has only the end, as a float, under a checksum of seed 0.
* *checksums* are xxh3-128 of each stored block, so that leading blocks can be read alone.

In a sealed record body and blocks are encrypted with AES-256-GCM and 16 bytes longer each. The key
is derived from the tenant's and the record's salt, the subject is the associated data, and the
block's index the nonce, so that no block can replace another.
"""

import hashlib
import hmac
import os
import struct
from dataclasses import dataclass
from math import ceil
from typing import NamedTuple

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from xxhash import xxh3_128_digest, xxh32_intdigest

from ostinato.tiers.port import Buffer, Extent

ALIGNMENT = 512
"""Records begin at multiples: a sector, which disks write whole or not at all."""

MAGIC = b"OSTKVEX1"
EXTENT, ERASED, MARK = 1, 2, 3
"""Kinds of records; a mark declares all before it durable."""

SEALED, SPARSE = 1, 2
"""Flags: encrypted; of a sparse namespace, whose records follow gaps. Folders of versions before
windows and states have only the first, and their records are read as before."""

NAME_BYTES = 16
NO_NAME = bytes(NAME_BYTES)
TAG_BYTES = 16
CHECKSUM_BYTES = 16

_SUBJECT = struct.Struct("<8sHHIQIIQQ32s16s16s16s16s16x")
_DURABLE = struct.Struct("<Q8x")
_LEASE = struct.Struct("<II8s")
_TERMS = struct.Struct("<II")
_CHECKED = _SUBJECT.size + _DURABLE.size
LEASES_AT = _CHECKED + CHECKSUM_BYTES
FIXED_BYTES = LEASES_AT + 2 * _LEASE.size
_BODY_NONCE = b"\xff" * 12

_MAX_SECONDS = 2**32 - 1


class RecordLease(NamedTuple):
    """How long a record is kept.

    Attributes:
        turn: Number of earlier leases.
        keep_until: Wall-clock end; 0 without a lease.
        refresh_s: How long each use extends it; 0 if uses do not.
    """

    turn: int = 0
    keep_until: float = 0.0
    refresh_s: float = 0.0


Names = tuple[bytes, bytes, bytes]
"""Names of tenant, tenant without its client's salt, and public prefix; see ``sealing``."""


@dataclass(frozen=True)
class RecordHeader:
    """A parsed and checked header of a record.

    Attributes:
        kind: ``EXTENT``, ``ERASED`` or ``MARK``.
        sealed: Whether body and blocks are encrypted.
        is_sparse: Whether it may follow a gap: a part of a window, or a state.
        header_bytes: Bytes before the first block.
        total_bytes: Bytes of the record in a segment, padding included.
        num_blocks: Number of blocks.
        block_size: Tokens per block.
        block_bytes: Bytes per block before sealing.
        first_block: Index of its first block in the sequence.
        namespace: Digest of the namespace.
        names: Names of its tenant.
        salt: Random; part of the key and of the leases' checksums.
        durable: Offset up to which its segment was durable.
        lease: The newest lease.
        subject: The encoded subject.
        body: Parent digest and tokens, perhaps sealed.
        checksums: One per block, joined.
    """

    kind: int
    sealed: bool
    is_sparse: bool
    header_bytes: int
    total_bytes: int
    num_blocks: int
    block_size: int
    block_bytes: int
    first_block: int
    namespace: bytes
    names: Names
    salt: bytes
    durable: int
    lease: RecordLease
    subject: bytes
    body: bytes
    checksums: bytes

    @property
    def stored_block_bytes(self) -> int:
        """Bytes per stored block."""
        return self.block_bytes + TAG_BYTES * self.sealed

    @property
    def record_bytes(self) -> int:
        """Bytes of header and blocks, without padding."""
        return self.header_bytes + self.num_blocks * self.stored_block_bytes

    def open(self, key: bytes | None) -> tuple[bytes, bytes] | None:
        """Return parent digest and packed tokens; None if the key is not the record's."""
        body = self.body
        if self.sealed:
            if key is None:
                return None
            try:
                body = self._cipher(key).decrypt(_BODY_NONCE, body, self.subject)
            except InvalidTag:
                return None
        return body[:32], body[32:]

    def is_block(self, index: int, stored: Buffer) -> bool:
        """Whether stored bytes have the checksum of a block."""
        start = index * CHECKSUM_BYTES
        return xxh3_128_digest(stored) == self.checksums[start : start + CHECKSUM_BYTES]

    def open_block(self, index: int, key: bytes | None, stored: Buffer, into: memoryview) -> bool:
        """Verify a stored block, and copy or decrypt it into the caller's memory.

        Args:
            index: Its index in the record.
            key: The tenant's; unused in the clear.
            stored: Its bytes; in the clear, may be ``into`` itself.
            into: Memory of ``block_bytes``.

        Returns:
            False if the block is damaged, or was not written with this key.
        """
        if not self.is_block(index, stored):
            return False
        if not self.sealed:
            if stored is not into:
                into[:] = stored
            return True
        try:
            nonce = _nonce(index)
            self._cipher(key or b"").decrypt_into(nonce, stored, self.subject, into)
        except InvalidTag:
            return False
        return True

    def _cipher(self, key: bytes) -> AESGCM:
        return _record_cipher(key, self.salt)

    def copy_for(self, seed: int, durable: int, lease: RecordLease) -> bytes:
        """Return the header for another segment, with its current lease."""
        return _assemble(self.subject, durable, lease, self.body + self.checksums, seed)


def encode(
    extent: Extent, payload: Buffer, names: Names, key: bytes | None, seed: int, durable: int = 0
) -> list[Buffer]:
    """Encode an extent.

    Args:
        extent: Its tokens and position.
        payload: Its blocks' bytes, ``extent.payload_bytes``.
        names: Names of its tenant.
        key: The tenant's key; None leaves the extent in the clear, without copying blocks.
        seed: Seed of the segment.
        durable: Offset up to which the segment is durable.

    Returns:
        Header and blocks, in the order in which they are written.
    """
    view, size = memoryview(payload).cast("B"), extent.prefix.namespace.block_bytes
    salt = os.urandom(16)
    body = extent.parent + extent.packed
    subject = _subject(extent, names, salt, len(body), sealed=key is not None)
    blocks: list[Buffer] = [view[i * size : (i + 1) * size] for i in range(extent.num_blocks)]
    if key is not None:
        cipher = _record_cipher(key, salt)
        body = cipher.encrypt(_BODY_NONCE, body, subject)
        blocks = [cipher.encrypt(_nonce(i), block, subject) for i, block in enumerate(blocks)]
    rest = body + b"".join(xxh3_128_digest(block) for block in blocks)
    lease = RecordLease(1 if extent.keep_until else 0, extent.keep_until, extent.refresh_s)
    return [_assemble(subject, durable, lease, rest, seed), *blocks]


def record_bytes(extent: Extent, sealed: bool) -> int:
    """Return how many bytes an extent takes in a segment."""
    tag, blocks = TAG_BYTES * sealed, extent.num_blocks
    header = FIXED_BYTES + 32 + len(extent.packed) + tag + blocks * CHECKSUM_BYTES
    return aligned(header + extent.payload_bytes + tag * blocks)


def filler(kind: int, total_bytes: int, seed: int, durable: int) -> bytes:
    """Return a record without content: erased, or a mark."""
    zero = bytes(NAME_BYTES)
    fields = (MAGIC, kind, 0, FIXED_BYTES, total_bytes, 0, 0, 0, 0, bytes(32))
    subject = _SUBJECT.pack(*fields, zero, zero, zero, zero)
    return _assemble(subject, durable, RecordLease(), b"", seed)


def header_length(start: Buffer) -> int:
    """Return the length of a header from its first ``FIXED_BYTES``; 0 if they are none."""
    if len(start) < FIXED_BYTES or start[: len(MAGIC)] != MAGIC:
        return 0
    return max(FIXED_BYTES, int.from_bytes(start[12:16], "little"))


def names_and_size(start: bytes) -> tuple[Names, int]:
    """Return a record's names and size from its first bytes, unchecked."""
    if not header_length(start):
        return (b"", b"", b""), 0
    fields = _SUBJECT.unpack_from(start)
    return fields[10:13], fields[4]


def parse(header: bytes, seed: int) -> RecordHeader | None:
    """Parse a header and check it; returns None if it is torn, damaged or of another segment.

    Args:
        header: At least as many bytes as ``header_length`` says.
        seed: Seed of the segment.
    """
    length = header_length(header)
    if not length or length > len(header):
        return None
    rest = header[FIXED_BYTES:length]
    if xxh3_128_digest(header[:_CHECKED] + rest, seed) != header[_CHECKED:LEASES_AT]:
        return None
    fields = _SUBJECT.unpack_from(header)
    _, kind, flags, header_bytes, total, num_blocks, block_size, block_bytes, first = fields[:9]
    split = len(rest) - num_blocks * CHECKSUM_BYTES
    return RecordHeader(
        kind, bool(flags & SEALED), bool(flags & SPARSE), header_bytes, total, num_blocks,
        block_size, block_bytes, first, fields[9], fields[10:13], fields[13],
        _DURABLE.unpack_from(header, _SUBJECT.size)[0], _newest_lease(header),
        header[: _SUBJECT.size], rest[:split], rest[split:],
    )  # fmt: skip


def lease_slot(lease: RecordLease, salt: bytes) -> tuple[int, bytes]:
    """Return the offset of a lease in its record, and its bytes."""
    return LEASES_AT + lease.turn % 2 * _LEASE.size, _lease_bytes(lease, salt)


def aligned(size: int) -> int:
    """Round up to where a next record may begin."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def _subject(extent: Extent, names: Names, salt: bytes, body_bytes: int, sealed: bool) -> bytes:
    namespace = extent.prefix.namespace
    body_bytes += TAG_BYTES * sealed
    header_bytes = FIXED_BYTES + body_bytes + extent.num_blocks * CHECKSUM_BYTES
    flags = SEALED * sealed | SPARSE * namespace.is_sparse
    return _SUBJECT.pack(
        MAGIC, EXTENT, flags, header_bytes, record_bytes(extent, sealed), extent.num_blocks,
        namespace.block_size, namespace.block_bytes, extent.first_block, namespace.digest,
        *names, salt,
    )  # fmt: skip


def _assemble(subject: bytes, durable: int, lease: RecordLease, rest: bytes, seed: int) -> bytes:
    checked = subject + _DURABLE.pack(durable)
    slots = [_lease_bytes(RecordLease(), _salt_of(subject))] * 2
    slots[lease.turn % 2] = _lease_bytes(lease, _salt_of(subject))
    return b"".join([checked, xxh3_128_digest(checked + rest, seed), *slots, rest])


def _salt_of(subject: bytes) -> bytes:
    return subject[-32:-16]


def _lease_bytes(lease: RecordLease, salt: bytes) -> bytes:
    seconds = (min(ceil(x), _MAX_SECONDS) for x in (lease.keep_until, lease.refresh_s))
    terms = _TERMS.pack(*seconds)
    return _LEASE.pack(lease.turn, _lease_checksum(lease.turn, terms, salt, seed=1), terms)


def _lease_checksum(turn: int, terms: bytes, salt: bytes, seed: int) -> int:
    return xxh32_intdigest(salt + struct.pack("<I", turn) + terms, seed)


def _newest_lease(header: bytes) -> RecordLease:
    """Return the newer of the two leases that is not torn."""
    salt, newest = _salt_of(header[: _SUBJECT.size]), RecordLease()
    for slot in range(2):
        turn, checksum, terms = _LEASE.unpack_from(header, LEASES_AT + slot * _LEASE.size)
        if turn < newest.turn:
            continue
        if checksum == _lease_checksum(turn, terms, salt, seed=1):
            newest = RecordLease(turn, *map(float, _TERMS.unpack(terms)))
        elif checksum == _lease_checksum(turn, terms, salt, seed=0):
            newest = RecordLease(turn, struct.unpack("<d", terms)[0])
    return newest


def _record_cipher(key: bytes, salt: bytes) -> AESGCM:
    """Return the cipher of one record: with a key per record, block indices can be nonces."""
    return AESGCM(hmac.digest(key, salt, hashlib.sha256))


def _nonce(index: int) -> bytes:
    return index.to_bytes(12, "little")
