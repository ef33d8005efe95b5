"""What the remote tier needs of a server: values by key. Servers and object stores provide it."""

from collections.abc import Iterator, Sequence
from typing import Protocol

import xxhash

from ostinato.tiers.sealing import WRAPPED_BYTES, WrappedKey


class StoreError(OSError):
    """A server failed, refused a command or did not answer in time."""


class CommandRefused(StoreError):
    """A server answered that it does not do this: it is full, or it is a replica."""


class ByteStore(Protocol):
    """Values by key. Thread-safe; every call may raise ``StoreError``."""

    @property
    def where(self) -> str:
        """Address, without a password."""
        ...

    def starts(self, keys: Sequence[str], size: int) -> list[bytes]:
        """Return the first bytes of each value; empty where there is none."""
        ...

    def get(self, key: str, start: int, size: int) -> bytes:
        """Return bytes of a value; fewer where it ends, none if it is missing."""
        ...

    def put(self, key: str, value: bytes, ttl_s: float, only_new: bool = False) -> bool:
        """Set a value as a whole; returns False if one was there and only a new one is wanted.

        Args:
            key: Where.
            value: The bytes.
            ttl_s: Seconds after which the server may remove it; 0 for never.
            only_new: Whether to leave a value that is there.
        """
        ...

    def expire(self, keys: Sequence[str], ttl_s: float) -> None:
        """Let values live for so many seconds from now, where the server can."""
        ...

    def keys(self, beginning: str) -> Iterator[str]:
        """List the keys that begin so."""
        ...

    def delete(self, keys: Sequence[str]) -> None:
        """Delete values; missing ones are no error."""
        ...

    def abort(self) -> None:
        """Break off the calls that run."""
        ...

    def close(self) -> None:
        """Close all connections."""
        ...


class StoredKeys:
    """Wrapped keys of tenants as values of a server, so that several engines use the same.

    Where a key is destroyed by one engine, the others find none with their next call.
    """

    def __init__(self, store: ByteStore, beginning: str) -> None:
        self._store, self._beginning = store, beginning

    def find(self, name: bytes) -> WrappedKey | None:
        """Return the key of a tenant's name."""
        return self._read(self._beginning + name.hex())

    def add(self, key: WrappedKey) -> WrappedKey:
        """Keep a key; returns the one that is kept, if another engine was faster."""
        place, content = self._beginning + key.names[0].hex(), b"".join(key.names) + key.wrapped
        value = content + xxhash.xxh3_128_digest(content)
        if self._store.put(place, value, 0, only_new=True):
            return key
        if (kept := self._read(place)) is not None:
            return kept
        self._store.put(place, value, 0)  # instead of a damaged one
        return key

    def destroy(self, name: bytes) -> int:
        """Delete all keys that answer to a name; returns how many."""
        found = [place for place in self._store.keys(self._beginning) if self._is_of(place, name)]
        self._store.delete(found)
        return len(found)

    def _is_of(self, place: str, name: bytes) -> bool:
        kept = self._read(place)
        return kept is not None and name in kept.names

    def _read(self, place: str) -> WrappedKey | None:
        value = self._store.get(place, 0, 48 + WRAPPED_BYTES + 16)
        content, checksum = value[:-16], value[-16:]
        names = content[:16], content[16:32], content[32:48]
        is_intact = len(content) == 48 + WRAPPED_BYTES and place.endswith(names[0].hex())
        if not is_intact or xxhash.xxh3_128_digest(content) != checksum:
            return None
        return WrappedKey(names, content[48:])
