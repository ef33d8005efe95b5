"""``RemoteTier``: extents as values of a server that several engines share.

An extent's key names tenant, namespace, and all tokens up to the end of its *first* block, so that
an engine asks for all places where one may begin with one command. Whatever the server returns is
checked as on disk: header, tenant, namespace, place, tokens, then every block.

Every call ends in time: a server that is slow, or lies, costs a deadline.
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

from ostinato.tiers.breaker import CallThreads, CircuitBreaker
from ostinato.tiers.byte_store import ByteStore, CommandRefused, StoredKeys, StoreError
from ostinato.tiers.port import (
    Buffer,
    Extent,
    ExtentRef,
    LoadFault,
    LoadResult,
    Prefix,
    StoreResult,
    TierListener,
    TierReceipt,
    TierStats,
)
from ostinato.tiers.record import FIXED_BYTES, encode, names_and_size, record_bytes
from ostinato.tiers.remote_search import (
    LONGEST_WINDOW,
    FoundExtent,
    PrefixSearch,
    look_back,
    verify,
)
from ostinato.tiers.retention import ReuseClass
from ostinato.tiers.sealing import Sealing

logger = logging.getLogger(__name__)

T = TypeVar("T")
KEYS, RECORDS = "ostinato/1/keys/", "ostinato/1/kv/"
_READ_BYTES = 4 << 20
_RETRY_S = 60.0
"""Seconds for which a server that refused to write is asked for nothing but reads."""


@dataclass(frozen=True, slots=True)
class RemoteOptions:
    """Settings of a remote tier.

    Attributes:
        ttl_s: Seconds after which the server removes what is not leased.
        timeout_s: For a look-up, and for every other call but a load, which has its own deadline.
        max_in_flight_bytes: Bytes of all stores and loads that run.
        sealed: Encrypt each tenant's records with a key of its own.
        secret: 16 random bytes at least, the same for all engines; sealing needs it.
        num_threads: Calls at a time.
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
        listener: Is told what this engine stores; the server alone knows what it removes.

    Raises:
        ConfigError: Sealing without a secret.
    """

    name = "remote"

    def __init__(
        self,
        store: ByteStore,
        options: RemoteOptions | None = None,
        listener: TierListener | None = None,
    ) -> None:
        self._listener = listener or TierListener()
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

    def look_up(self, prefix: Prefix, start: int) -> list[ExtentRef]:
        """Find what continues a prefix; see ``KVTier``."""
        found = self._attempt(lambda: self._search(prefix, start // prefix.namespace.block_size))
        refs = list[ExtentRef]()
        for where, count in found or ():
            size = prefix.namespace.block_bytes
            refs.append(ExtentRef(self.name, start, count, size, where, *where.header.lease[1:]))
            start += count * prefix.namespace.block_size
        return refs

    def load(
        self, ref: ExtentRef, into: memoryview, num_blocks: int, deadline: float
    ) -> LoadResult:
        """Read and verify blocks; see ``KVTier``."""
        assert isinstance(ref.locator, FoundExtent), "a reference of another tier"
        where, done, fault = ref.locator, 0, None
        wanted = min(num_blocks, ref.num_blocks)
        step = max(1, _READ_BYTES // ref.block_bytes)
        while done < wanted and fault is None:
            count = min(step, wanted - done)
            answer = self._read(where, done, count, deadline)
            if isinstance(answer, LoadFault):
                fault = answer
            else:
                place = into[done * ref.block_bytes : (done + count) * ref.block_bytes]
                good, fault = verify(where, done, answer, place)
                done += good
        if fault in (LoadFault.CHECKSUM, LoadFault.SHORT):
            self._attempt(lambda: self._store.delete([where.place]))
        with self._counting:
            self._loads[fault or "ok"] += 1
            self._loaded_bytes += done * ref.block_bytes
        return LoadResult(done, fault)

    def store(self, extents: Sequence[tuple[Extent, Buffer]]) -> list[StoreResult]:
        """Store extents; see ``KVTier``. Each is visible as soon as the server has all of it."""
        results = [self._store_one(extent, payload) for extent, payload in extents]
        with self._counting:
            self._stores.update(results)
        for (extent, _), result in zip(extents, results, strict=True):
            if result in (StoreResult.STORED, StoreResult.PRESENT):
                self._listener.on_stored(self.name, extent)
        return results

    def lease(self, prefix: Prefix, keep_until: float, refresh_s: float = 0.0) -> int:
        """Let what is stored of a prefix live as long as its lease; see ``KVTier``."""
        refs = self.look_up(prefix, 0)
        places = [ref.locator.place for ref in refs if isinstance(ref.locator, FoundExtent)]
        ttl = max(self._options.ttl_s, keep_until - time.time())
        if not places or self._attempt(lambda: self._expire(places, ttl)) is None:
            return 0
        return sum(ref.num_blocks for ref in refs) * prefix.namespace.block_size

    def use(self, prefix: Prefix, reuse: ReuseClass) -> None:
        """Ignore the hint: the server evicts by rules of its own."""

    def erase(self, salt: bytes) -> list[TierReceipt]:
        """Destroy a tenant's keys and delete its records; see ``KVTier``."""
        num_keys = num_extents = num_bytes = 0
        complete = True
        try:
            num_keys = self._sealing.destroy(salt)
            num_extents, num_bytes = self._delete(self._sealing.name(salt))
        except OSError as error:
            complete = False
            self._failed(str(error))
        where = self._store.where
        return [TierReceipt(self.name, where, num_extents, num_bytes, num_keys, complete)]

    def stats(self) -> list[TierStats]:
        """State and counts; see ``KVTier``."""
        is_read_only = time.monotonic() < self._writable_s
        state = "read-only" if is_read_only else "on"
        state = "off" if self._closed or self._breaker.is_open else state
        with self._counting:
            return [
                TierStats(
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
        """Break off what runs and close the connections."""
        if not self._closed:
            self._closed, self._reason = True, "closed"
            self._threads.close()
            self._store.close()

    def _place(self, prefix: Prefix, block: int, key: bytes | None) -> str:
        """Key of an extent that begins with a block."""
        digest = prefix.digests[block]
        if key is not None:  # a server learns nothing of the tokens
            digest = hmac.digest(key, digest, hashlib.sha256)
        tenant, namespace = self._sealing.name(prefix.tenant).hex(), prefix.namespace.digest.hex()
        return f"{RECORDS}{tenant}/{namespace[:16]}/{digest.hex()}"

    def _search(self, prefix: Prefix, block: int) -> list[tuple[FoundExtent, int]]:
        key = self._sealing.key(prefix, create=False)
        search = PrefixSearch(self._store, prefix, key, lambda i: self._place(prefix, i, key))
        return search.run(block)

    def _expire(self, places: list[str], ttl_s: float) -> bool:
        self._store.expire(places, ttl_s)
        return True

    def _attempt(self, what: Callable[[], T]) -> T | None:
        """Return what a call returns; None if it is refused, fails or takes too long."""
        if self._closed or not self._breaker.allows():
            return None
        try:
            answer = self._threads.call(what, self._options.timeout_s)
        except (TimeoutError, StoreError) as error:
            self._failed(str(error) or "no answer in time")
            return None
        self._breaker.succeeded()
        return answer

    def _failed(self, reason: str) -> None:
        self._reason = reason
        if self._breaker.failed():
            logger.warning(
                "kv_remote=%r is off for now: %s; serving goes on without it",
                self._store.where, reason,
            )  # fmt: skip

    def _read(
        self, where: FoundExtent, first: int, count: int, deadline: float
    ) -> bytes | LoadFault:
        """Return stored bytes of blocks, or why there are none."""
        width = where.header.stored_block_bytes
        start = where.header.header_bytes + (where.first + first) * width
        if self._closed or not self._breaker.allows():
            return LoadFault.OFF
        left = deadline - time.monotonic()
        if left <= 0 or not self._reserve(count * width):
            return LoadFault.DEADLINE if left <= 0 else LoadFault.OFF
        try:
            answer = self._threads.call(
                lambda: self._store.get(where.place, start, count * width), left
            )
        except (TimeoutError, StoreError) as error:
            self._failed(str(error) or "no answer before the deadline")
            return LoadFault.IO if isinstance(error, StoreError) else LoadFault.DEADLINE
        finally:
            self._reserve(-count * width)
        self._breaker.succeeded()
        if time.monotonic() > deadline:  # the answer came, and this thread was late
            return LoadFault.DEADLINE
        return answer if answer else LoadFault.MISSING

    def _reserve(self, size: int) -> bool:
        """Count bytes as in flight; returns False if they are too many."""
        with self._counting:
            fits = self._in_flight + size <= self._options.max_in_flight_bytes
            if fits or size < 0:
                self._in_flight += size
            return fits

    def _store_one(self, extent: Extent, payload: Buffer) -> StoreResult:
        size = record_bytes(extent, self._sealing.on)
        if extent.num_blocks > look_back(extent.prefix):
            return StoreResult.TOO_LARGE
        if self._closed or self._breaker.is_open:
            return StoreResult.OFF
        if time.monotonic() < self._writable_s:
            return StoreResult.READ_ONLY
        if not self._reserve(size):
            return StoreResult.BUSY
        try:
            stored = self._attempt(lambda: self._try_put(extent, payload))
        finally:
            self._reserve(-size)
        return StoreResult.IO if stored is None else stored

    def _try_put(self, extent: Extent, payload: Buffer) -> StoreResult:
        try:
            return self._put(extent, payload)
        except CommandRefused as error:
            if not self._writable_s:
                logger.warning(
                    "kv_remote=%r takes no writes for now: %s; serving goes on, and a store is "
                    "tried again every %.0f seconds",
                    self._store.where, error, _RETRY_S,
                )  # fmt: skip
            self._reason, self._writable_s = str(error), time.monotonic() + _RETRY_S
            return StoreResult.READ_ONLY

    def _put(self, extent: Extent, payload: Buffer) -> StoreResult:
        key = self._sealing.key(extent.prefix, create=True)
        if self._sealing.on and key is None:
            raise StoreError("the tenant's key was not made with this secret")
        place = self._place(extent.prefix, extent.first_block, key)
        ttl = max(self._options.ttl_s, extent.keep_until - time.time())
        if shared := self._num_stored(extent, key):
            self._store.expire([place], ttl)
            if shared == extent.num_blocks:
                return StoreResult.PRESENT
            size, first = extent.prefix.namespace.block_bytes, extent.first_block + shared
            rest = replace(extent, first_block=first, num_blocks=extent.end_block - first)
            return self._put(rest, memoryview(payload)[shared * size :])
        value = b"".join(encode(extent, payload, self._sealing.names(extent.prefix), key, 0))
        self._store.put(place, value, ttl)
        self._writable_s = 0.0
        with self._counting:
            self._written_bytes += len(value)
        return StoreResult.STORED

    def _num_stored(self, extent: Extent, key: bytes | None) -> int:
        """Return how many leading blocks of an extent one that begins like it has."""
        prefix, block = extent.prefix, extent.first_block
        search = PrefixSearch(self._store, prefix, key, lambda i: self._place(prefix, i, key))
        return min(extent.num_blocks, search.num_from(block))

    def _delete(self, name: bytes) -> tuple[int, int]:
        places, num_extents, num_bytes = list(self._store.keys(RECORDS)), 0, 0
        for first in range(0, len(places), LONGEST_WINDOW):
            batch = places[first : first + LONGEST_WINDOW]
            starts = self._store.starts(batch, FIXED_BYTES)
            owned = [(x, names_and_size(y)) for x, y in zip(batch, starts, strict=True)]
            doomed = {place: size for place, (names, size) in owned if name in names}
            self._store.delete(list(doomed))
            num_extents += len(doomed)
            num_bytes += sum(doomed.values())
        return num_extents, num_bytes
