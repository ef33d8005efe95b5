"""Wrapped keys of tenants: in a file of the folder, or as values on a server."""

import logging
import os
from dataclasses import dataclass

from xxhash import xxh3_128_digest

from ostinato.tiers.byte_store import ByteStore
from ostinato.tiers.folder import Folder
from ostinato.tiers.record import CHECKSUM_BYTES, NAME_BYTES, Names

logger = logging.getLogger(__name__)

_KEY_BYTES = 12 + 32 + 16
"""Nonce, key and tag."""
_CONTENT_BYTES = 3 * NAME_BYTES + _KEY_BYTES
_WRAPPED_BYTES = _CONTENT_BYTES + CHECKSUM_BYTES
_SLOT_BYTES = 128
_WINDOW = 1024


@dataclass(frozen=True, slots=True)
class WrappedKey:
    """A tenant's key as it is stored.

    Attributes:
        names: Names of the salts whose erasure destroys it.
        wrapped: Nonce and encrypted key.
    """

    names: Names
    wrapped: bytes

    def to_bytes(self) -> bytes:
        """Return names, key and checksum."""
        content = b"".join(self.names) + self.wrapped
        return content + xxh3_128_digest(content)

    @classmethod
    def from_bytes(cls, stored: bytes) -> "WrappedKey | None":
        """Read what ``to_bytes`` returned; None if it is torn, damaged or destroyed."""
        content, checksum = stored[:_CONTENT_BYTES], stored[_CONTENT_BYTES:_WRAPPED_BYTES]
        if len(content) < _CONTENT_BYTES or xxh3_128_digest(content) != checksum:
            return None
        size = NAME_BYTES
        return cls(
            (content[:size], content[size : 2 * size], content[2 * size : 3 * size]),
            content[3 * size :],
        )


class KeyFile:
    """Keys in one file of fixed slots, which are overwritten in place. May raise OSError."""

    def __init__(self, folder: Folder) -> None:
        """Read the keys; OSError if the file cannot be read or created."""
        is_new = "keys" not in folder.names()
        self._file = folder.create("keys") if is_new else folder.open("keys")
        content = bytearray(self._file.size() // _SLOT_BYTES * _SLOT_BYTES)
        self._file.read(memoryview(content), 0)
        self._slots = [
            WrappedKey.from_bytes(bytes(content[start : start + _SLOT_BYTES]))
            for start in range(0, len(content), _SLOT_BYTES)
        ]

    @property
    def names(self) -> set[bytes]:
        """Names of the tenants that have a key."""
        return {key.names[0] for key in self._slots if key}

    def find(self, name: bytes) -> WrappedKey | None:
        """Return the key of a tenant's name."""
        return next((key for key in self._slots if key and key.names[0] == name), None)

    def add(self, key: WrappedKey) -> WrappedKey:
        """Store a key durably, in the first free slot."""
        slot = self._slots.index(None) if None in self._slots else len(self._slots)
        self._write(slot, key.to_bytes().ljust(_SLOT_BYTES, b"\0"))
        self._slots[slot : slot + 1] = [key]
        return key

    def destroy(self, name: bytes) -> int:
        """Overwrite all keys that have a name; returns how many."""
        slots = [i for i, key in enumerate(self._slots) if key and name in key.names]
        for slot in slots:
            self._write(slot, bytes(_SLOT_BYTES))
            self._slots[slot] = None
        return len(slots)

    def _write(self, slot: int, content: bytes) -> None:
        self._file.write([content], slot * _SLOT_BYTES)
        self._file.sync()


class StoredKeys:
    """Keys on a server, shared by several engines. May raise OSError.

    After one engine has destroyed a key, the others' next look-up finds none.
    """

    def __init__(self, store: ByteStore, prefix: str) -> None:
        self._store, self._prefix = store, prefix

    def find(self, name: bytes) -> WrappedKey | None:
        """Return the key of a tenant's name."""
        return self._read(self._prefix + name.hex())

    def add(self, key: WrappedKey) -> WrappedKey:
        """Store a key; returns the stored one, if another engine was faster."""
        place, value = self._prefix + key.names[0].hex(), key.to_bytes()
        if self._store.put(place, value, 0, only_new=True):
            return key
        if (stored := self._read(place)) is not None:
            return stored
        logger.warning(
            "the key of a tenant on the server is damaged (%s): its sealed records are lost, and "
            "computed again when needed",
            place,
        )
        self._store.put(place, value, 0)
        return key

    def destroy(self, name: bytes) -> int:
        """Delete all keys that have a name; returns how many."""
        places, num_keys = list(self._store.keys(self._prefix)), 0
        for first in range(0, len(places), _WINDOW):
            batch = places[first : first + _WINDOW]
            values = self._store.starts(batch, _WRAPPED_BYTES)
            keys = map(_parsed, batch, values)
            owned = [x for x, key in zip(batch, keys, strict=True) if key and name in key.names]
            self._store.delete(owned)
            num_keys += len(owned)
        return num_keys

    def _read(self, place: str) -> WrappedKey | None:
        return _parsed(place, self._store.get(place, 0, _WRAPPED_BYTES))


def _parsed(place: str, value: bytes) -> WrappedKey | None:
    """Return the key that is stored in a place; None if it is damaged or another's."""
    key = WrappedKey.from_bytes(value)
    return key if key is not None and place.endswith(key.names[0].hex()) else None


KeyStore = KeyFile | StoredKeys


def folder_secret(folder: Folder, *, has_keys: bool) -> bytes:
    """Return the folder's own secret, created if there is none; OSError if that fails.

    Args:
        folder: Of the tier.
        has_keys: Whether the folder has a tenant's key, which is lost with the secret.
    """
    if "secret" not in folder.names():
        folder.create("secret")
    file, secret = folder.open("secret"), bytearray(32)
    if file.read(memoryview(secret), 0) < len(secret) or not any(secret):  # new, or torn
        if has_keys:
            logger.warning(
                "%s/secret is missing or damaged: all sealed records are lost, and computed again "
                "when needed",
                folder.path,
            )
        secret[:] = os.urandom(32)
        file.write([secret], 0)
        file.sync()
    return bytes(secret)
