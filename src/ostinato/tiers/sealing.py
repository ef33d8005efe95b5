"""Names and keys of tenants.

On a medium a tenant is a *name* of 16 bytes: a digest of its salt. With sealing each salt has a
random key besides. A ``KeyStore`` keeps it, wrapped in a key that is derived from two things: a
secret, and the salt, which no tier stores. Without the wrapped key the records cannot be read.

What a name tells: with a secret, nothing without it; without one, whether a guessed salt was here.
"""

import hashlib
import hmac
import os
import struct
import threading
from dataclasses import dataclass
from typing import Protocol

import xxhash
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from ostinato.core.errors import ConfigError
from ostinato.core.identity import tenant_of
from ostinato.tiers.folder import File, Folder
from ostinato.tiers.port import Prefix
from ostinato.tiers.record import NAME_BYTES, Names

WRAPPED_BYTES = 12 + 32 + 16
NO_NAME = bytes(NAME_BYTES)


@dataclass(frozen=True, slots=True)
class WrappedKey:
    """A tenant's key as it is kept: names that it answers to, and the encrypted key."""

    names: Names
    wrapped: bytes


class KeyStore(Protocol):
    """Keeps wrapped keys. May raise OSError."""

    def find(self, name: bytes) -> WrappedKey | None:
        """Return the key of a tenant's name."""
        ...

    def add(self, key: WrappedKey) -> WrappedKey:
        """Keep a key, durably; returns the one that is kept, if another was faster."""
        ...

    def destroy(self, name: bytes) -> int:
        """Overwrite all keys that answer to a name; returns how many."""
        ...


class Sealing:
    """Names of salts, and the keys of tenants where records are sealed.

    Args:
        secret: 32 random bytes; empty gives names that anyone can compute.
        keys: Where keys are; None leaves records in the clear.
        remember: Whether keys are kept in memory: not where others may destroy them.
    """

    def __init__(
        self, secret: bytes = b"", keys: KeyStore | None = None, remember: bool = True
    ) -> None:
        if keys is not None and len(secret) < 16:
            raise ConfigError(
                f"a secret of {len(secret)} bytes: sealing needs 16 random bytes at least"
            )
        self._secret, self._store, self._remember = secret, keys, remember
        self._keys = dict[bytes, bytes]()
        self._lock = threading.Lock()

    @property
    def on(self) -> bool:
        """Whether records are sealed."""
        return self._store is not None

    def name(self, salt: bytes) -> bytes:
        """Return the name of a salt on the medium."""
        return hmac.digest(b"ostinato name" + self._secret, salt, hashlib.sha256)[:NAME_BYTES]

    def names(self, prefix: Prefix) -> Names:
        """Return names of tenant, tenant without its client's salt, and public prefix."""
        tenant, owner, public = prefix.tenant, tenant_of(prefix.tenant), prefix.public_prefix
        return self.name(tenant), self.name(owner), self.name(public) if public else NO_NAME

    def key(self, prefix: Prefix, create: bool) -> bytes | None:
        """Return the tenant's key; None without sealing, or if it has none and none is wanted.

        Raises:
            OSError: The store of keys failed.
        """
        if self._store is None:
            return None
        with self._lock:
            names = self.names(prefix)
            if (known := self._keys.get(names[0])) is not None:
                return known
            kept = self._store.find(names[0])
            if kept is None and create:
                kept = self._store.add(WrappedKey(names, self._wrap(prefix.tenant, names[0])))
            key = self._unwrap(prefix.tenant, kept) if kept is not None else None
            if key is not None and self._remember:
                self._keys[names[0]] = key
            return key

    def destroy(self, salt: bytes) -> int:
        """Destroy the keys of all that an erasure of a salt reaches; returns how many.

        Raises:
            OSError: The store of keys failed.
        """
        if self._store is None:
            return 0
        with self._lock:
            self._keys.clear()
            return self._store.destroy(self.name(salt))

    def _wrap(self, salt: bytes, name: bytes) -> bytes:
        nonce = os.urandom(12)
        return nonce + self._wrapping(salt).encrypt(nonce, os.urandom(32), name)

    def _unwrap(self, salt: bytes, kept: WrappedKey) -> bytes | None:
        try:
            nonce, sealed = kept.wrapped[:12], kept.wrapped[12:]
            return self._wrapping(salt).decrypt(nonce, sealed, kept.names[0])
        except InvalidTag:
            return None

    def _wrapping(self, salt: bytes) -> AESGCM:
        derive = HKDF(algorithm=SHA256(), length=32, salt=self._secret, info=b"ostinato key")
        return AESGCM(derive.derive(b"salt:" + salt))


class KeyFile:
    """Wrapped keys in one file of fixed slots, which are overwritten in place.

    A slot is the names, the wrapped key and a checksum; one that was torn or destroyed is free.
    """

    def __init__(self, folder: Folder) -> None:
        """Read the keys.

        Raises:
            OSError: The file cannot be read or made.
        """
        is_new = "keys" not in folder.names()
        self._file: File = folder.create("keys") if is_new else folder.open("keys")
        self._slots: list[WrappedKey | None] = self._read()

    def find(self, name: bytes) -> WrappedKey | None:
        """Return the key of a tenant's name."""
        return next((key for key in self._slots if key and key.names[0] == name), None)

    def add(self, key: WrappedKey) -> WrappedKey:
        """Keep a key, durably."""
        place = self._slots.index(None) if None in self._slots else len(self._slots)
        content = b"".join(key.names) + key.wrapped
        self._write(place, content + xxhash.xxh3_128_digest(content) + bytes(4))
        self._slots[place : place + 1] = [key]
        return key

    def destroy(self, name: bytes) -> int:
        """Overwrite all keys that answer to a name; returns how many."""
        places = [i for i, key in enumerate(self._slots) if key and name in key.names]
        for place in places:
            self._write(place, bytes(_SLOT.size))
            self._slots[place] = None
        return len(places)

    def _write(self, place: int, content: bytes) -> None:
        self._file.write([content], place * _SLOT.size)
        self._file.sync()

    def _read(self) -> list[WrappedKey | None]:
        content = bytearray(self._file.size() // _SLOT.size * _SLOT.size)
        self._file.read(memoryview(content), 0)
        slots = list[WrappedKey | None]()
        for *names, wrapped, checksum in _SLOT.iter_unpack(content):
            intact = xxhash.xxh3_128_digest(b"".join(names) + wrapped) == checksum
            slots.append(WrappedKey((names[0], names[1], names[2]), wrapped) if intact else None)
        return slots


def folder_secret(folder: Folder) -> bytes:
    """Return the folder's own secret, made when there is none.

    Raises:
        OSError: It cannot be read or made.
    """
    if "secret" not in folder.names():
        folder.create("secret")
    file, secret = folder.open("secret"), bytearray(32)
    if file.read(memoryview(secret), 0) < len(secret) or not any(secret):  # new, or torn
        secret[:] = os.urandom(32)
        file.write([secret], 0)
        file.sync()
    return bytes(secret)


_SLOT = struct.Struct(f"<16s16s16s{WRAPPED_BYTES}s16s4x")
