"""``RemoteTier``: extents as values of a server that several engines share.

An extent's key names tenant, namespace, and all tokens up to the end of its *first* block, so that
one command finds every extent that continues a prefix. All answers are checked as on disk: header,
tenant, namespace, position, tokens, then every block.

Every call has a deadline, so that a slow or faulty server never delays a request beyond it.
"""

import hashlib
import hmac
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from ostinato.tiers import port
from ostinato.tiers.byte_store import ByteStore, CommandRefused, StoreError
from ostinato.tiers.encryption.sealing import Sealing
from ostinato.tiers.encryption.tenant_keys import StoredKeys
from ostinato.tiers.record import encode, record_bytes
from ostinato.tiers.remote.breaker import CallThreads, CircuitBreaker
from ostinato.tiers.remote.places import RECORDS, delete_all, with_marks
from ostinato.tiers.remote.search import PrefixSearch, RemoteExtent, look_back, verify
from ostinato.tiers.retention import ReuseClass

logger = logging.getLogger(__name__)

T = TypeVar("T")
KEYS = "ostinato/1/keys/"
_READ_BYTES = 4 << 20
_RETRY_S = 60.0
"""How long the tier stays read-only after the server has refused a write."""


class TierOff(StoreError):
    """The tier is closed, or its circuit breaker is open."""


@dataclass(frozen=True, slots=True)
class RemoteOptions:
    """Settings of a remote tier.

    Attributes:
        ttl_s: Seconds after which the server removes an extent without a lease.
        timeout_s: Limit of every call except a load, which has its own deadline.
        max_in_flight_bytes: Maximum bytes of all running stores and loads.
        sealed: Encrypt each tenant's records with a key of its own.
        secret: At least 16 random bytes, the same for all engines; required for sealing.
        num_threads: Maximum concurrent calls.
    """

    ttl_s: float = 86_400.0
    timeout_s: float = 1.0
    max_in_flight_bytes: int = 64 << 20
    sealed: bool = False
    secret: bytes = b""
    num_threads: int = 4


class RemoteTier:
    """A tier on a server; see ``KVTier`` for the calls.

    Args:
        store: The server.
        options: Settings.
        listener: Called when this engine stores extents; servers do not report evictions.

    Raises:
        ConfigError: Sealing without a secret.
    """

    name = "remote"

    def __init__(
        self,
        store: ByteStore,
        options: RemoteOptions | None = None,
        listener: port.TierListener | None = None,
    ) -> None:
        self._listener = listener or port.TierListener()
        self._store, self._options = store, options or RemoteOptions()
        keys = StoredKeys(store, KEYS) if self._options.sealed else None
        self._sealing = Sealing(self._options.secret, keys, remember=False)
        self._breaker = CircuitBreaker()
        self._threads = CallThreads(self._options.num_threads, store.abort)
        self._counting = threading.Lock()
        self._stores, self._loads = Counter[str](), Counter[str]()
        self._in_flight = self._loaded_bytes = self._written_bytes = 0
        self._reason = ""
        self._closed = False
        self._writable_s = 0.0

    def look_up(self, prefix: port.Prefix, start: int) -> list[port.ExtentRef]:
        """Find stored blocks that continue a prefix; see ``KVTier``."""
        size, num_bytes = prefix.namespace.block_size, prefix.namespace.block_bytes
        runs = self._attempt(lambda: self._search(prefix).run(start // size))
        return [
            port.ExtentRef(
                self.name, where.place_of_first * size, count, num_bytes, where,
                *where.header.lease[1:],
            )
            for where, count in runs or ()
        ]  # fmt: skip

    def load(
        self, ref: port.ExtentRef, into: memoryview, num_blocks: int, deadline: float
    ) -> port.LoadResult:
        """Read and verify blocks; see ``KVTier``."""
        assert isinstance(ref.locator, RemoteExtent), "a reference of another tier"
        where, done, fault = ref.locator, 0, None
        num_blocks = min(num_blocks, ref.num_blocks)
        step = max(1, _READ_BYTES // ref.block_bytes)
        while done < num_blocks and fault is None:
            count = min(step, num_blocks - done)
            answer = self._read(where, done, count, deadline)
            if isinstance(answer, port.LoadFault):
                fault = answer
            else:
                place = into[done * ref.block_bytes : (done + count) * ref.block_bytes]
                good, fault = verify(where, done, answer, place)
                done += good
        if fault in (port.LoadFault.CHECKSUM, port.LoadFault.SHORT):
            self._attempt(lambda: self._store.delete([where.place]))
        with self._counting:
            self._loads[fault or "ok"] += 1
            self._loaded_bytes += done * ref.block_bytes
        return port.LoadResult(done, fault)

    def store(self, extents: Sequence[tuple[port.Extent, port.Buffer]]) -> list[port.StoreResult]:
        """Store extents; see ``KVTier``. Each becomes visible on its own."""
        results = [self._store_one(extent, payload) for extent, payload in extents]
        with self._counting:
            self._stores.update(results)
        for (extent, _), result in zip(extents, results, strict=True):
            if result in (port.StoreResult.STORED, port.StoreResult.PRESENT):
                self._listener.on_stored(self.name, extent)
        return results

    def lease(self, prefix: port.Prefix, keep_until: float, refresh_s: float = 0.0) -> int:
        """Extend the time to live of a prefix's extents; see ``KVTier``."""
        ttl = max(self._options.ttl_s, keep_until - time.time())
        names = self._sealing.names(prefix)

        def extend() -> int:
            matches = self._search(prefix).last_run()
            self._store.expire(
                [x for where, _ in matches for x in with_marks(where.place, names)], ttl
            )
            return sum(count for _, count in matches)

        return (self._attempt(extend) or 0) * prefix.namespace.block_size

    def use(self, prefix: port.Prefix, reuse: ReuseClass) -> None:
        """Do nothing: the server evicts by its own policy."""

    def erase(self, salt: bytes) -> list[port.TierReceipt]:
        """Destroy a tenant's keys and delete its records; see ``KVTier``."""
        num_keys = num_extents = num_bytes = 0
        complete = True
        try:
            num_keys = self._sealing.destroy(salt)
            num_extents, num_bytes = delete_all(self._store, self._sealing.name(salt))
        except OSError as error:
            complete = False
            self._failed(str(error))
        where = self._store.where
        return [port.TierReceipt(self.name, where, num_extents, num_bytes, num_keys, complete)]

    def stats(self) -> list[port.TierStats]:
        """State and counts; see ``KVTier``."""
        is_read_only = time.monotonic() < self._writable_s
        state = "read-only" if is_read_only else "on"
        state = "off" if self._closed or self._breaker.is_open else state
        with self._counting:
            return [
                port.TierStats(
                    tier=self.name,
                    where=self._store.where,
                    state=state,
                    reason="" if state == "on" else self._reason,
                    written_bytes=self._written_bytes,
                    loaded_bytes=self._loaded_bytes,
                    stores=dict(self._stores),
                    loads=dict(self._loads),
                )
            ]

    def close(self) -> None:
        """Abort running calls and close the connections."""
        if not self._closed:
            self._closed, self._reason = True, "closed"
            self._threads.close()
            self._store.close()

    def _place(self, prefix: port.Prefix, block: int, key: bytes | None) -> str:
        """Return the key of an extent that begins with a block."""
        digest = prefix.digests[block]
        if key is not None:  # the server learns nothing about the tokens
            digest = hmac.digest(key, digest, hashlib.sha256)
        tenant, namespace = self._sealing.name(prefix.tenant).hex(), prefix.namespace.digest.hex()
        return f"{RECORDS}{tenant}/{namespace[:16]}/{digest.hex()}"

    def _search(self, prefix: port.Prefix, create: bool = False) -> PrefixSearch:
        key = self._sealing.key(prefix, create)
        return PrefixSearch(self._store, prefix, key, lambda i: self._place(prefix, i, key))

    def _call(self, what: Callable[[], T], timeout_s: float) -> T:
        """Return the result of a call to the server.

        Raises:
            TierOff: No call may be made.
            TimeoutError: It took too long.
            StoreError: It failed.
        """
        if self._closed or not self._breaker.allows():
            raise TierOff
        try:
            answer = self._threads.call(what, timeout_s)
        except (TimeoutError, StoreError) as error:
            self._failed(str(error) or "no answer in time")
            raise
        self._breaker.succeeded()
        return answer

    def _attempt(self, what: Callable[[], T]) -> T | None:
        """Return the result of a call; None if it is refused, fails or takes too long."""
        try:
            return self._call(what, self._options.timeout_s)
        except (TimeoutError, StoreError):
            return None

    def _failed(self, reason: str) -> None:
        self._reason = reason
        if self._breaker.failed():
            logger.warning(
                "kv_remote=%r is off for now: %s; serving continues without it",
                self._store.where, reason,
            )  # fmt: skip

    def _read(
        self, where: RemoteExtent, first: int, count: int, deadline: float
    ) -> bytes | port.LoadFault:
        """Return stored bytes of blocks, or why there are none."""
        width = where.header.stored_block_bytes
        start, size = where.header.header_bytes + (where.first + first) * width, count * width
        if (left := deadline - time.monotonic()) <= 0:
            return port.LoadFault.DEADLINE
        if not self._reserve(size):
            return port.LoadFault.OFF
        try:
            answer = self._call(lambda: self._store.get(where.place, start, size), left)
        except TimeoutError:
            return port.LoadFault.DEADLINE
        except StoreError as error:
            return port.LoadFault.OFF if isinstance(error, TierOff) else port.LoadFault.IO
        finally:
            self._reserve(-size)
        if time.monotonic() > deadline:  # answered in time, but this thread was late
            return port.LoadFault.DEADLINE
        return answer if answer else port.LoadFault.MISSING

    def _reserve(self, size: int) -> bool:
        """Count bytes as in flight; returns False if there are too many."""
        with self._counting:
            fits = self._in_flight + size <= self._options.max_in_flight_bytes
            if fits or size < 0:
                self._in_flight += size
            return fits

    def _store_one(self, extent: port.Extent, payload: port.Buffer) -> port.StoreResult:
        size = record_bytes(extent, self._sealing.on)
        if extent.num_blocks > look_back(extent.prefix):
            return port.StoreResult.TOO_LARGE
        if self._closed or self._breaker.is_open:
            return port.StoreResult.OFF
        if time.monotonic() < self._writable_s:
            return port.StoreResult.READ_ONLY
        if not self._reserve(size):
            return port.StoreResult.BUSY
        try:
            stored = self._attempt(lambda: self._try_put(extent, payload))
        finally:
            self._reserve(-size)
        return port.StoreResult.IO if stored is None else stored

    def _try_put(self, extent: port.Extent, payload: port.Buffer) -> port.StoreResult:
        try:
            return self._put(extent, payload)
        except CommandRefused as error:
            if not self._writable_s:
                logger.warning(
                    "kv_remote=%r takes no writes for now: %s; serving continues, and stores are "
                    "retried every %.0f seconds",
                    self._store.where, error, _RETRY_S,
                )  # fmt: skip
            self._reason, self._writable_s = str(error), time.monotonic() + _RETRY_S
            return port.StoreResult.READ_ONLY

    def _put(self, extent: port.Extent, payload: port.Buffer) -> port.StoreResult:
        prefix, names = extent.prefix, self._sealing.names(extent.prefix)
        search = self._search(prefix, create=True)
        if self._sealing.on and search.key is None:
            raise StoreError("the tenant's key was not made with this secret")
        place, *marks = with_marks(search.place(extent.first_block), names)
        ttl = max(self._options.ttl_s, extent.keep_until - time.time())
        if shared := min(extent.num_blocks, search.num_from(extent.first_block)):
            self._store.expire([place, *marks], ttl)
            if shared == extent.num_blocks:
                return port.StoreResult.PRESENT
            size, first = prefix.namespace.block_bytes, extent.first_block + shared
            rest = replace(extent, first_block=first, num_blocks=extent.end_block - first)
            return self._put(rest, memoryview(payload)[shared * size :])
        value = b"".join(encode(extent, payload, names, search.key, 0))
        for mark in marks:
            self._store.put(mark, b"1", ttl)
        self._store.put(place, value, ttl)
        self._writable_s = 0.0
        with self._counting:
            self._written_bytes += len(value)
        return port.StoreResult.STORED
