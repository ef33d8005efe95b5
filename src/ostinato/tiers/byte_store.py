"""What the remote tier needs of a server or an object store: values by key."""

from collections.abc import Iterator, Sequence
from typing import Protocol


class StoreError(OSError):
    """A server failed, refused a command or did not answer in time."""


class CommandRefused(StoreError):
    """A server refused a command: it is full, or it is a replica."""


class ByteStore(Protocol):
    """Values by key. Thread-safe; every call may raise ``StoreError``."""

    @property
    def where(self) -> str:
        """Address, without a password."""

    def starts(self, keys: Sequence[str], size: int) -> list[bytes]:
        """Return the first bytes of each value; empty if there is none."""

    def get(self, key: str, start: int, size: int) -> bytes:
        """Return bytes of a value; fewer where it ends, none if it is missing."""

    def put(self, key: str, value: bytes, ttl_s: float, only_new: bool = False) -> bool:
        """Set a whole value.

        Args:
            key: Its key.
            value: The bytes.
            ttl_s: Seconds after which the server may remove it; 0 for never.
            only_new: Do not replace an existing value.

        Returns:
            False if a value existed and was not replaced.
        """

    def expire(self, keys: Sequence[str], ttl_s: float) -> None:
        """Keep values for this many seconds from now, if the server supports it."""

    def keys(self, prefix: str) -> Iterator[str]:
        """List the keys with a prefix."""

    def delete(self, keys: Sequence[str]) -> None:
        """Delete values; missing ones are no error."""

    def abort(self) -> None:
        """Abort the running calls."""

    def close(self) -> None:
        """Close all connections."""
