"""Leases: prefixes that are kept, and until when.

A lease is a pinned block table of no sequence: while it is held, its blocks are not evictable.
The sum of all leases is bounded, so that the longest request still fits beside them; a lease that
would exceed the bound is clipped, from the tail.
"""

import heapq
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ostinato.cache.block_table import BlockTable
from ostinato.cache.observer import CacheObserver
from ostinato.core.identity import Identity
from ostinato.core.request import RequestContext
from ostinato.tenants.lease_tree import LeasedPrefix, LeaseTree
from ostinato.tenants.terms import LeaseId, LeaseTerms

_FEW = 64
"""Entries of closed leases that may stay in the heap, besides one per live lease."""


@dataclass(slots=True, eq=False)
class Lease:
    """A prefix that is kept."""

    lease_id: LeaseId
    table: BlockTable  # pinned; of the prefix
    terms: LeaseTerms
    started_s: float  # by the cache's clock
    prefix: LeasedPrefix | None = None  # for those that are renewed by use

    @property
    def expires_s(self) -> float | None:
        """When it ends if it is not used, by the cache's clock; None if pinned."""
        if self.terms.ttl_s is None:
            return None
        if self.prefix is None:
            return self.started_s + self.terms.ttl_s
        return max(self.started_s, self.prefix.last_used_s()) + self.terms.ttl_s


class LeaseBook(CacheObserver):
    """All live leases, by number and by time of expiry; an observer of the cache.

    Attributes:
        num_opened: Leases so far; with the first one it begins to observe.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        """Start without a lease."""
        self._clock = clock
        self._leases: dict[LeaseId, Lease] = {}
        # One entry per lease, with the time it had when the entry was made: a refresh moves
        # nothing, and an entry that surfaces too early goes back with the time of now.
        self._heap: list[tuple[float, LeaseId]] = []
        self._refreshing: dict[Identity, LeaseTree] = {}  # leases that are renewed by use
        self.num_opened = 0

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
        for lease in self.expired() if self._heap else ():
            unpin(lease.table)

    def on_admit(self, table: BlockTable, context: RequestContext) -> None:
        """Refresh the leases whose prefix a request used."""
        tree = self._refreshing.get(table.key.identity) if self._refreshing else None
        if tree is not None:
            tree.use(_blocks_used(table), self._clock())

    def open(self, table: BlockTable, terms: LeaseTerms) -> Lease:
        """Note a new lease."""
        lease = Lease(LeaseId(self.num_opened), table, terms, self._clock())
        self.num_opened += 1
        self._leases[lease.lease_id] = lease
        if terms.refresh_on_hit:
            tree = self._refreshing.setdefault(table.key.identity, LeaseTree())
            lease.prefix = tree.add(table.blocks)
        if (expires_s := lease.expires_s) is not None:
            heapq.heappush(self._heap, (expires_s, lease.lease_id))
        return lease

    def close(self, lease_id: LeaseId) -> Lease | None:
        """Remove a lease; returns it, or None if there is none of that number."""
        lease = self._leases.pop(lease_id, None)
        if lease is not None and lease.prefix is not None:
            identity = lease.table.key.identity
            self._refreshing[identity].remove(lease.prefix)
            if not self._refreshing[identity]:
                del self._refreshing[identity]
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
            expires_s = None if lease is None else lease.expires_s
            if lease is None or expires_s is None:
                continue  # it was closed before its time
            if expires_s > now:
                heapq.heappush(self._heap, (expires_s, lease_id))
            else:
                self.close(lease_id)
                gone.append(lease)
        return gone


def _blocks_used(table: BlockTable) -> "array[int]":
    """Return the blocks that a request uses in full.

    Its last token is always computed (law 4); the last block is used as well if it is copied but
    for that one.
    """
    source, num_cached = table.copy_source, table.num_cached_tokens
    if source is not None and num_cached == len(table.key.tokens) - 1:
        rest = table.key.tokens[table.num_shared_tokens :].tobytes()
        if source.run_from(0)[1] == rest:
            return array("i", [*table.blocks, source.blocks[0]])
    return table.blocks
