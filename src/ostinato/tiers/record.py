"""How an extent is laid out in a segment of the disk, and in a value on a server.

::

    header                                                            blocks
    ┌──────────────┬─────────┬──────────┬──────────┬──────┬───────────┬─────────┬─────────┬───
    │ subject, 160 │ durable │ checksum │ 2 leases │ body │ checksums │ block 0 │ block 1 │ ...
    └──────────────┴─────────┴──────────┴──────────┴──────┴───────────┴─────────┴─────────┴───
                                                    parent digest, tokens

* The *subject* says what the record is: namespace, names of the tenant, place, sizes, and a random
  salt. It never changes.
* *durable* is the offset up to which the segment was durable when the record was written.
* The *checksum* is xxh3-128 over all of the header but itself and the leases; its seed differs by
  segment, so that no old or injected bytes pass for a header.
* A *lease* is the one field that is written again in place, in two turns: a torn write leaves the
  other. It is 16 bytes: its turn, a checksum, its end and by how much each use moves that, in whole
  seconds. Leases of older folders have their end alone, as a float, under a checksum of seed 0.
* *checksums* are xxh3-128 of each block as it is stored, so that leading blocks can be read alone.

A sealed record has body and blocks encrypted with AES-256-GCM, 16 bytes longer each. Its key is the
tenant's, mixed with the record's salt; the subject is the associated data and the block's index
the nonce, so that no block can stand in for another.
"""

import hashlib
import hmac
import os
import struct
from dataclasses import dataclass
from math import ceil
from typing import NamedTuple

import xxhash
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from ostinato.tiers.port import Buffer, Extent

ALIGNMENT = 512
"""Records begin at multiples: a sector, which disks write whole or not at all."""

MAGIC = b"OSTKVEX1"
EXTENT, ERASED, MARK = 1, 2, 3
"""Kinds: an extent; one that was erased; a mark up to which a segment is durable."""

NAME_BYTES = 16
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

_MOST_SECONDS = 2**32 - 1


class Lease(NamedTuple):
    """How long a record is kept.

    Attributes:
        turn: Leases that it had before.
        keep_until: Wall-clock end; 0 without one.
        refresh_s: How long it is kept from each use on; 0 if uses do not move its end.
    """

    turn: int = 0
    keep_until: float = 0.0
    refresh_s: float = 0.0


Names = tuple[bytes, bytes, bytes]
"""How a record names tenant, tenant without its client's salt, and public prefix; see sealing."""


@dataclass(frozen=True)
class Header:
    """A parsed and checked header of a record.

    Attributes:
        kind: ``EXTENT``, ``ERASED`` or ``MARK``.
        sealed: Whether body and blocks are encrypted.
        header_bytes: Bytes before the first block.
        total_bytes: Bytes of the record in a segment, up to the next.
        num_blocks: Blocks that it stores.
        block_size: Tokens in each.
        block_bytes: Bytes of each before sealing.
        first_block: Index of the first in its sequence.
        namespace: Digest of the namespace.
        names: Of its tenant.
        salt: Random; in the key and in the checksums.
        durable: Offset up to which its segment was durable.
        lease: The newest.
        subject: The bytes of the fields above up to the salt.
        body: Parent digest and tokens, perhaps sealed.
        checksums: One per block.
    """

    kind: int
    sealed: bool
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
    lease: Lease
    subject: bytes
    body: bytes
    checksums: bytes

    @property
    def stored_block_bytes(self) -> int:
        """Bytes of each block as it is stored."""
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
        """Whether stored bytes are those of a block."""
        place = index * CHECKSUM_BYTES
        return _checksum(stored) == self.checksums[place : place + CHECKSUM_BYTES]

    def unseal(self, key: bytes, index: int, stored: memoryview, into: memoryview) -> bool:
        """Decrypt a block into the caller's memory; returns False if it is not authentic."""
        try:
            self._cipher(key).decrypt_into(_nonce(index), stored, self.subject, into)
        except InvalidTag:
            return False
        return True

    def _cipher(self, key: bytes) -> AESGCM:
        return _record_cipher(key, self.salt)

    def bytes_for(self, seed: int, durable: int, lease: Lease) -> bytes:
        """Return the header for another segment, with the lease as it is now."""
        return _assemble(self.subject, durable, lease, self.body + self.checksums, seed)


def encode(
    extent: Extent, payload: Buffer, names: Names, key: bytes | None, seed: int, durable: int = 0
) -> list[Buffer]:
    """Lay out an extent.

    Args:
        extent: What the payload is.
        payload: Its blocks' bytes, ``extent.payload_bytes``.
        names: Of its tenant.
        key: The tenant's, to seal it; None leaves it in the clear, and copies no block.
        seed: Of the segment.
        durable: Offset up to which the segment is durable.

    Returns:
        Header and blocks, to be written one after the other.
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
    rest = body + b"".join(_checksum(block) for block in blocks)
    lease = Lease(1 if extent.keep_until else 0, extent.keep_until, extent.refresh_s)
    return [_assemble(subject, durable, lease, rest, seed), *blocks]


def record_bytes(extent: Extent, sealed: bool) -> int:
    """Return how many bytes an extent takes in a segment."""
    tag, blocks = TAG_BYTES * sealed, extent.num_blocks
    header = FIXED_BYTES + 32 + len(extent.packed) + tag + blocks * CHECKSUM_BYTES
    return aligned(header + extent.payload_bytes + tag * blocks)


def filler(kind: int, total_bytes: int, seed: int, durable: int) -> bytes:
    """Return the header of a record without content: erased, or a mark."""
    zero = bytes(NAME_BYTES)
    fields = (MAGIC, kind, 0, FIXED_BYTES, total_bytes, 0, 0, 0, 0, bytes(32))
    subject = _SUBJECT.pack(*fields, zero, zero, zero, zero)
    return _assemble(subject, durable, Lease(), b"", seed)


def header_length(start: Buffer) -> int:
    """Return the length of a header from its first ``FIXED_BYTES``; 0 if it is none."""
    if len(start) < FIXED_BYTES or start[: len(MAGIC)] != MAGIC:
        return 0
    return max(FIXED_BYTES, int.from_bytes(start[12:16], "little"))


def names_and_size(start: bytes) -> tuple[Names, int]:
    """Return whose a record says it is, and its size, from its unchecked first bytes."""
    if not header_length(start):
        return (b"", b"", b""), 0
    fields = _SUBJECT.unpack_from(start)
    return fields[10:13], fields[4]


def parse(header: bytes, seed: int) -> Header | None:
    """Parse a header and check it; returns None if it is torn, damaged or of another segment.

    Args:
        header: At least as many bytes as ``header_length`` says.
        seed: Of the segment.
    """
    length = header_length(header)
    if not length or length > len(header):
        return None
    rest = header[FIXED_BYTES:length]
    if _header_checksum(header[:_CHECKED], rest, seed) != header[_CHECKED:LEASES_AT]:
        return None
    fields = _SUBJECT.unpack_from(header)
    _, kind, sealed, header_bytes, total, num_blocks, block_size, block_bytes, first = fields[:9]
    split = len(rest) - num_blocks * CHECKSUM_BYTES
    return Header(
        kind, bool(sealed), header_bytes, total, num_blocks, block_size, block_bytes, first,
        fields[9], fields[10:13], fields[13], _DURABLE.unpack_from(header, _SUBJECT.size)[0],
        _newest_lease(header), header[: _SUBJECT.size], rest[:split], rest[split:],
    )  # fmt: skip


def lease_slot(lease: Lease, salt: bytes) -> tuple[int, bytes]:
    """Return where in a record a lease is written, and its bytes."""
    return LEASES_AT + lease.turn % 2 * _LEASE.size, _lease_bytes(lease, salt)


def aligned(size: int) -> int:
    """Round up to where a next record may begin."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def _subject(extent: Extent, names: Names, salt: bytes, body_bytes: int, sealed: bool) -> bytes:
    namespace = extent.prefix.namespace
    body_bytes += TAG_BYTES * sealed
    header_bytes = FIXED_BYTES + body_bytes + extent.num_blocks * CHECKSUM_BYTES
    return _SUBJECT.pack(
        MAGIC, EXTENT, sealed, header_bytes, record_bytes(extent, sealed), extent.num_blocks,
        namespace.block_size, namespace.block_bytes, extent.first_block, namespace.digest,
        *names, salt,
    )  # fmt: skip


def _assemble(subject: bytes, durable: int, lease: Lease, rest: bytes, seed: int) -> bytes:
    checked = subject + _DURABLE.pack(durable)
    slots = [_lease_bytes(Lease(), _salt_of(subject))] * 2
    slots[lease.turn % 2] = _lease_bytes(lease, _salt_of(subject))
    return b"".join([checked, _header_checksum(checked, rest, seed), *slots, rest])


def _header_checksum(checked: bytes, rest: bytes, seed: int) -> bytes:
    return xxhash.xxh3_128_digest(checked + rest, seed)


def _checksum(stored: Buffer) -> bytes:
    return xxhash.xxh3_128_digest(stored)


def _salt_of(subject: bytes) -> bytes:
    return subject[-32:-16]


def _lease_bytes(lease: Lease, salt: bytes) -> bytes:
    seconds = (min(ceil(x), _MOST_SECONDS) for x in (lease.keep_until, lease.refresh_s))
    terms = _TERMS.pack(*seconds)
    return _LEASE.pack(lease.turn, _lease_checksum(lease.turn, terms, salt, seed=1), terms)


def _lease_checksum(turn: int, terms: bytes, salt: bytes, seed: int) -> int:
    return xxhash.xxh32_intdigest(salt + struct.pack("<I", turn) + terms, seed)


def _newest_lease(header: bytes) -> Lease:
    """Return the newer of two leases; one that is torn does not count."""
    salt, newest = _salt_of(header[: _SUBJECT.size]), Lease()
    for slot in range(2):
        turn, checksum, terms = _LEASE.unpack_from(header, LEASES_AT + slot * _LEASE.size)
        if turn < newest.turn:
            continue
        if checksum == _lease_checksum(turn, terms, salt, seed=1):
            newest = Lease(turn, *map(float, _TERMS.unpack(terms)))
        elif checksum == _lease_checksum(turn, terms, salt, seed=0):
            newest = Lease(turn, struct.unpack("<d", terms)[0])
    return newest


def _record_cipher(key: bytes, salt: bytes) -> AESGCM:
    """A key of its own for each record lets block indices be the nonces."""
    return AESGCM(hmac.digest(key, salt, hashlib.sha256))


def _nonce(index: int) -> bytes:
    return index.to_bytes(12, "little")
