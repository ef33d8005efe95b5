"""Values in an object store, through ``obstore``: S3, Google, Azure, a folder, or memory."""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any

from ostinato.core.errors import ConfigError
from ostinato.tiers.byte_store import CommandRefused, StoreError

_NUM_THREADS = 16


class BucketStore:
    """A bucket, a folder or memory; each key is one call.

    Objects do not expire by themselves: let the bucket's lifecycle rules remove old ones.

    Args:
        url: Such as ``s3://bucket/folder``, ``gs://bucket``, ``memory:///``.
        timeout_s: Limit of each call.

    Raises:
        ConfigError: The client is not installed, or the URL is invalid.
    """

    def __init__(self, url: str, timeout_s: float) -> None:
        try:
            import obstore
            import obstore.store
        except ImportError as error:
            raise ConfigError(
                f"kv_remote={url!r} needs the client: pip install 'ostinato[remote]'"
            ) from error
        wait = f"{timeout_s}s"
        # TLS unless the endpoint says otherwise, such as a local server.
        options: Any = {"timeout": wait, "connect_timeout": wait, "allow_http": True}
        retries: Any = {"max_retries": 0}
        local = url.startswith(("memory:", "file:"))
        try:
            self._store: Any = (
                obstore.store.from_url(url)
                if local
                else obstore.store.from_url(url, client_options=options, retry_config=retries)
            )
        except (obstore.exceptions.BaseError, ValueError) as error:
            raise ConfigError(f"kv_remote={url!r}: {_reason(error)}") from error
        self._api: Any = obstore
        known = obstore.exceptions
        self._failed: Any = (known.BaseError, OSError)
        self._refusal: Any = (known.PermissionDeniedError, known.UnauthenticatedError)
        self.where = url
        self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="kv-bucket")

    def starts(self, keys: Sequence[str], size: int) -> list[bytes]:
        """Return the first bytes of each value; empty if there is none."""
        return list(self._threads.map(lambda key: self.get(key, 0, size), keys))

    def get(self, key: str, start: int, size: int) -> bytes:
        """Return bytes of a value; fewer where it ends, none if it is missing."""
        try:
            part = {"range": (start, start + size)}
            return bytes(self._api.get(self._store, key, options=part).bytes())
        except FileNotFoundError:
            return b""
        except self._failed as error:
            if self._ends_before(key, start):
                return b""
            raise StoreError(_reason(error)) from error

    def _ends_before(self, key: str, start: int) -> bool:
        """Whether a value ends before an offset: servers refuse an empty range."""
        try:
            return bool(self._api.head(self._store, key)["size"] <= start)
        except self._failed:
            return False

    def put(self, key: str, value: bytes, ttl_s: float, only_new: bool = False) -> bool:
        """Set a whole value; ``CommandRefused`` if the bucket takes no writes."""
        mode = "create" if only_new else "overwrite"
        with self._store_errors():
            try:
                self._api.put(self._store, key, value, mode=mode, use_multipart=False)
            except self._api.exceptions.AlreadyExistsError:
                return False
            except self._refusal as error:
                raise CommandRefused(_reason(error)) from error
            except FileNotFoundError as error:
                raise CommandRefused(f"there is no such bucket: {_reason(error)}") from error
        return True

    def expire(self, keys: Sequence[str], ttl_s: float) -> None:
        """Do nothing: objects do not expire by themselves."""

    def keys(self, prefix: str) -> Iterator[str]:
        """List the keys with a prefix, which ends at a slash."""
        with self._store_errors():
            for page in self._api.list(self._store, prefix=prefix):
                yield from (meta["path"] for meta in page)

    def delete(self, keys: Sequence[str]) -> None:
        """Delete values; missing ones are no error."""
        for key in keys:
            with self._store_errors(), suppress(FileNotFoundError):
                self._api.delete(self._store, key)

    def abort(self) -> None:
        """Do nothing: every call ends with its own timeout."""

    def close(self) -> None:
        """End the threads."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    @contextmanager
    def _store_errors(self) -> Iterator[None]:
        """Raise the client's errors as ``StoreError``."""
        try:
            yield
        except StoreError:
            raise
        except self._failed as error:
            raise StoreError(_reason(error)) from error


def _reason(error: Exception) -> str:
    """Return the first line of an error; the client adds its whole state."""
    return str(error).partition("\n")[0]
