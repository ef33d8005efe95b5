"""Leases: prefixes that are kept, and until when.

A lease is a pinned block table of no sequence: while it is held, its blocks are not evictable.
The sum of all leases is bounded, so that the longest request still fits beside them; a lease that
would exceed the bound is clipped, from the tail.
"""

import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ostinato.cache.block_table import BlockTable
from ostinato.cache.observer import CacheObserver
from ostinato.core.identity import Identity, PrefixKey
from ostinato.core.request import RequestContext
from ostinato.core.tokens import TOKEN_BYTES
from ostinato.tenants.terms import LeaseId, LeaseTerms

_FEW = 64
"""Entries of closed leases that may stay in the heap, besides one per live lease."""


@dataclass(slots=True, eq=False)
class Lease:
    """A prefix that is kept."""

    lease_id: LeaseId
    table: BlockTable  # pinned; of the prefix
    terms: LeaseTerms
    expires_s: float | None = None  # by the cache's clock; None if pinned

    @property
    def packed(self) -> bytes:
        """The leased prefix's packed tokens."""
        return self.table.key.tokens[: self.table.num_computed].tobytes()

    def shows_other_images(self, key: PrefixKey) -> bool:
        """Whether a sequence of the same tokens has other images among them."""
        return self.table.key.num_common_tokens(key) < self.table.num_computed


class LeaseBook(CacheObserver):
    """All live leases, by number and by time of expiry; an observer of the cache."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """Start without a lease."""
        self._clock = clock
        self._leases: dict[LeaseId, Lease] = {}
        # One entry per lease, with the time it had when the entry was made: a refresh moves
        # nothing, and an entry that surfaces too early goes back with the time of now.
        self._heap: list[tuple[float, LeaseId]] = []
        # Leases to be refreshed, by what a request must begin with: identity, length, tokens.
        self._refreshing: dict[Identity, dict[int, dict[bytes, list[Lease]]]] = {}
        self._next = 0

    def __len__(self) -> int:
        """Number of live leases."""
        return len(self._leases)

    def __contains__(self, lease_id: LeaseId) -> bool:
        """Whether a lease of that number is live."""
        return lease_id in self._leases

    def __iter__(self) -> Iterator[Lease]:
        """Iterate over all live leases, which may be closed meanwhile."""
        return iter(list(self._leases.values()))

    def on_step(self, unpin: Callable[[BlockTable], None]) -> None:
        """Release the leases that have expired, in O(log n) each."""
        for lease in self.expired():
            unpin(lease.table)

    def on_admit(self, table: BlockTable, context: RequestContext) -> None:
        """Refresh the leases whose prefix a request used."""
        if self._refreshing:
            used = table.num_cached_tokens
            if used and used == len(table.key) - 1:
                used += 1  # all that may hit did (law 4)
            self.refresh(table.key, used)

    def open(self, table: BlockTable, terms: LeaseTerms) -> Lease:
        """Note a new lease."""
        lease = Lease(LeaseId(self._next), table, terms)
        self._next += 1
        self._leases[lease.lease_id] = lease
        if terms.refresh_on_hit:
            lengths = self._refreshing.setdefault(table.key.identity, {})
            lengths.setdefault(len(lease.packed), {}).setdefault(lease.packed, []).append(lease)
        self._start(lease)
        if lease.expires_s is not None:
            heapq.heappush(self._heap, (lease.expires_s, lease.lease_id))
        return lease

    def refresh(self, key: PrefixKey, num_tokens: int) -> None:
        """Refresh every lease that asks for it whose prefix a request used in full.

        Args:
            key: The request's sequence.
            num_tokens: Its first tokens that it used.

        Cost: one look-up per length of leased prefixes of this identity.
        """
        for length, leases in self._refreshing.get(key.identity, {}).items():
            if length <= num_tokens * TOKEN_BYTES:
                for lease in leases.get(key.tokens[: length // TOKEN_BYTES].tobytes(), ()):
                    if not lease.shows_other_images(key):
                        self._start(lease)

    def _start(self, lease: Lease) -> None:
        """Start or restart a lease's time, in O(1)."""
        if lease.terms.ttl_s is not None:
            lease.expires_s = self._clock() + lease.terms.ttl_s

    def close(self, lease_id: LeaseId) -> Lease | None:
        """Remove a lease; returns it, or None if there is none of that number."""
        lease = self._leases.pop(lease_id, None)
        if lease is not None and lease.terms.refresh_on_hit:
            self._unlist(lease)
        if len(self._heap) > 2 * len(self._leases) + _FEW:
            self._heap = [entry for entry in self._heap if entry[1] in self._leases]
            heapq.heapify(self._heap)
        return lease

    def expired(self) -> list[Lease]:
        """Remove and return the leases that have expired, in O(log n) each."""
        now, gone = self._clock(), []
        while self._heap and self._heap[0][0] <= now:
            lease_id = heapq.heappop(self._heap)[1]
            lease = self._leases.get(lease_id)
            if lease is None or lease.expires_s is None:
                continue  # it was closed before its time
            if lease.expires_s > now:
                heapq.heappush(self._heap, (lease.expires_s, lease_id))
            else:
                self.close(lease_id)
                gone.append(lease)
        return gone

    def _unlist(self, lease: Lease) -> None:
        """Remove a lease from those to be refreshed, and the dicts that it leaves empty."""
        identity, length = lease.table.key.identity, len(lease.packed)
        lengths = self._refreshing[identity]
        lengths[length][lease.packed].remove(lease)
        if not lengths[length][lease.packed]:
            del lengths[length][lease.packed]
        if not lengths[length]:
            del lengths[length]
        if not lengths:
            del self._refreshing[identity]
