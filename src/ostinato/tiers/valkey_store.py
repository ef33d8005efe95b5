"""Values on a server of the Redis protocol, through the ``valkey`` client."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar
from urllib.parse import urlsplit

from ostinato.core.errors import ConfigError
from ostinato.tiers.byte_store import CommandRefused, StoreError

T = TypeVar("T")
_BATCH = 256


class ValkeyStore:
    """A Valkey, Redis, KeyDB or Dragonfly server.

    Args:
        url: Such as ``redis://:password@host:6379/0``; ``rediss`` for TLS, ``unix`` for a socket.
        timeout_s: For connecting, and for each part of an answer.

    Raises:
        ConfigError: The client is not installed, or the URL is none.
    """

    def __init__(self, url: str, timeout_s: float) -> None:
        try:
            import valkey
        except ImportError as error:
            raise ConfigError(
                f"kv_remote={url!r} needs the client: pip install 'ostinato[remote]'"
            ) from error
        self._error: type[Exception] = valkey.ValkeyError
        self._refusal: type[Exception] = valkey.ResponseError
        try:
            self._client: Any = valkey.Valkey.from_url(
                url,
                socket_timeout=timeout_s,
                socket_connect_timeout=timeout_s,
                retry=None,
                lib_name=None,
                lib_version=None,
            )
        except ValueError as error:
            raise ConfigError(f"kv_remote={url!r}: {error}") from error
        parts = urlsplit(url)
        host = parts.netloc.rpartition("@")[2]
        self.where = f"{parts.scheme}://{host}{parts.path}"

    def starts(self, keys: Sequence[str], size: int) -> list[bytes]:
        """Return the first bytes of each value; empty where there is none."""

        def call() -> list[bytes]:
            with self._client.pipeline(transaction=False) as pipe:
                for key in keys:
                    pipe.getrange(key, 0, size - 1)
                return [_bytes_of(answer) for answer in pipe.execute(raise_on_error=False)]

        return self._call(call)

    def get(self, key: str, start: int, size: int) -> bytes:
        """Return bytes of a value; fewer where it ends, none if it is missing."""
        return self._call(lambda: bytes(self._client.getrange(key, start, start + size - 1)))

    def put(self, key: str, value: bytes, ttl_s: float, only_new: bool = False) -> bool:
        """Set a value as a whole; ``CommandRefused`` if the server takes none."""
        ttl_ms = int(ttl_s * 1000) or None

        def call() -> bool:
            try:
                return bool(self._client.set(key, value, px=ttl_ms, nx=only_new))
            except self._refusal as error:
                raise CommandRefused(str(error)) from error

        return self._call(call)

    def expire(self, keys: Sequence[str], ttl_s: float) -> None:
        """Let values live for so many seconds from now."""

        def call() -> None:
            with self._client.pipeline(transaction=False) as pipe:
                for key in keys:
                    pipe.pexpire(key, int(ttl_s * 1000))
                pipe.execute()

        self._call(call)

    def keys(self, beginning: str) -> Iterator[str]:
        """List the keys that begin so."""
        match = beginning + "*"
        found = self._call(lambda: list(self._client.scan_iter(match=match, count=1000)))
        return (key.decode() for key in found)

    def delete(self, keys: Sequence[str]) -> None:
        """Delete values; missing ones are no error."""
        for first in range(0, len(keys), _BATCH):
            batch = keys[first : first + _BATCH]
            self._call(lambda batch=batch: self._client.delete(*batch))  # type: ignore[misc]

    def abort(self) -> None:
        """Break off the calls that run, by closing their connections."""
        self._client.connection_pool.disconnect(inuse_connections=True)

    def close(self) -> None:
        """Close all connections."""
        self._client.connection_pool.disconnect()

    def _call(self, call: Callable[[], T]) -> T:
        try:
            return call()
        except StoreError:
            raise
        except (self._error, OSError) as error:
            raise StoreError(str(error)) from error


def _bytes_of(answer: bytes | Exception) -> bytes:
    """Return a value; empty if it is of another type than ours are."""
    if isinstance(answer, bytes):
        return answer
    if str(answer).startswith("WRONGTYPE"):
        return b""
    raise answer
