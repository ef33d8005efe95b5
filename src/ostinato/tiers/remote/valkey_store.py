"""Values on a server of the Redis protocol, through the ``valkey`` client."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

from ostinato.core.errors import ConfigError
from ostinato.tiers.byte_store import CommandRefused, StoreError

_BATCH = 256


class ValkeyStore:
    """A Valkey, Redis, KeyDB or Dragonfly server.

    Args:
        url: Such as ``redis://:password@host:6379/0``; ``rediss`` for TLS, ``unix`` for a socket.
        timeout_s: Limit for connecting, and for each read of an answer.

    Raises:
        ConfigError: The client is not installed, or the URL is invalid.
    """

    def __init__(self, url: str, timeout_s: float) -> None:
        try:
            import valkey
        except ImportError as error:
            raise ConfigError(
                f"kv_remote={url!r} needs the client: pip install 'ostinato[remote]'"
            ) from error
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
        """Return the first bytes of each value; empty if there is none."""
        with self._store_errors(), self._client.pipeline(transaction=False) as pipe:
            for key in keys:
                pipe.getrange(key, 0, size - 1)
            return [_bytes_of(answer) for answer in pipe.execute(raise_on_error=False)]

    def get(self, key: str, start: int, size: int) -> bytes:
        """Return bytes of a value; fewer where it ends, none if it is missing."""
        with self._store_errors():
            return bytes(self._client.getrange(key, start, start + size - 1))

    def put(self, key: str, value: bytes, ttl_s: float, only_new: bool = False) -> bool:
        """Set a whole value; ``CommandRefused`` if the server takes no writes."""
        with self._store_errors():
            try:
                return bool(self._client.set(key, value, px=int(ttl_s * 1000) or None, nx=only_new))
            except self._refusal as error:
                raise CommandRefused(str(error)) from error

    def expire(self, keys: Sequence[str], ttl_s: float) -> None:
        """Keep values for this many seconds from now."""
        with self._store_errors(), self._client.pipeline(transaction=False) as pipe:
            for key in keys:
                pipe.pexpire(key, int(ttl_s * 1000))
            pipe.execute()

    def keys(self, prefix: str) -> Iterator[str]:
        """List the keys with a prefix."""
        with self._store_errors():
            keys = list(self._client.scan_iter(match=prefix + "*", count=1000))
        return (key.decode() for key in keys)

    def delete(self, keys: Sequence[str]) -> None:
        """Delete values; missing ones are no error."""
        for first in range(0, len(keys), _BATCH):
            with self._store_errors():
                self._client.delete(*keys[first : first + _BATCH])

    def abort(self) -> None:
        """Abort the running calls by closing their connections."""
        self._client.connection_pool.disconnect(inuse_connections=True)

    def close(self) -> None:
        """Close all connections."""
        self._client.connection_pool.disconnect()

    @contextmanager
    def _store_errors(self) -> Iterator[None]:
        """Raise the client's errors as ``StoreError``.

        On a connection that ``abort`` closed, the client fails with whatever its parser raises.
        """
        try:
            yield
        except StoreError:
            raise
        except Exception as error:
            raise StoreError(str(error)) from error


def _bytes_of(answer: bytes | Exception) -> bytes:
    """Return a value; empty if it has a type that the tier never writes."""
    if isinstance(answer, bytes):
        return answer
    if str(answer).startswith("WRONGTYPE"):
        return b""
    raise answer
