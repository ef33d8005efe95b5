"""What is noted of what happens?

The manager and its groups tell the journal; it keeps statistics, events if anybody may
listen, and losses if they are to be explained. Groups are numbered: 0 is full attention, then
one per window size.
"""

from collections.abc import Sequence

from ostinato.cache.block import CacheEntry
from ostinato.cache.block_hash import BlockHasher
from ostinato.cache.chronicle import Chronicle
from ostinato.cache.events import AllCleared, BlockRemoved, BlockStored, EventLog
from ostinato.cache.pool import BlockPool
from ostinato.cache.prefix_index import Forgotten
from ostinato.cache.stats import CacheStats
from ostinato.core.identity import Identity, PrefixKey
from ostinato.core.ids import BlockDigest


class Journal:
    """Statistics, events and losses of one cache."""

    def __init__(self, events: EventLog | None, hasher: BlockHasher, chronicle: Chronicle) -> None:
        """Start empty.

        Args:
            events: Where events go; None if nobody may listen.
            hasher: Names blocks to the outside.
            chronicle: Remembers losses, for explanations.
        """
        self.stats = CacheStats()
        self.events = events
        self.chronicle = chronicle
        self._hasher = hasher

    def published(self, key: PrefixKey, first: int, last: int, group: int = 0) -> None:
        """Note that blocks ``first .. last`` of a sequence became findable."""
        if group == 0:
            self.stats.published_blocks += last - first
        if self.events is None or first >= last:
            return
        size, digests = self._hasher.block_size, self._hasher.digests(key, last)
        extras = [key.extra(i * size, (i + 1) * size) for i in range(first, last)]
        self.events.add(
            BlockStored(
                tuple(digests[first:last]),
                digests[first - 1] if first else None,
                key.tokens[first * size : last * size],
                size,
                key.identity,
                tuple(None if extra is None else extra.encoded for extra in extras),
                group,
            )
        )

    def evicted(self, pool: BlockPool, entry: CacheEntry, evicted: Forgotten, group: int) -> None:
        """Note that an entry lost blocks to another's content."""
        if group == 0:
            count = len(evicted.blocks)
            self.stats.evicted_blocks += count
            self.stats.eviction_ages_s.add(pool.age_s(entry), count)
            self.stats.residencies_s.add(pool.residency_s(entry), count)
            self.chronicle.lost("evicted", entry, evicted.blocks, pool.age_s(entry))
        self.removed(entry, evicted.digests, group)

    def forgotten(self, pool: BlockPool, entry: CacheEntry, lost: Forgotten, group: int) -> None:
        """Note that an administrator had blocks of an entry forgotten."""
        if group == 0:
            self.chronicle.lost("removed", entry, lost.blocks, pool.age_s(entry))
        self.removed(entry, lost.digests, group)

    def removed(self, entry: CacheEntry, digests: Sequence[BlockDigest], group: int) -> None:
        """Note that contents are gone, for whatever reason."""
        if self.events is not None and digests:
            self.events.add(BlockRemoved(tuple(digests), entry.identity, group))

    def cleared(self) -> None:
        """Note that nothing is cached any more."""
        if self.events is not None:
            self.events.add(AllCleared())
            self.events.flush()

    def commit(self) -> None:
        """Tell outsiders what the step did."""
        if self.events is not None:
            self.events.flush()

    def retracted(self, identity: Identity, digests: Sequence[BlockDigest], group: int) -> None:
        """Note that a failed step took contents back whose last copy is gone with it."""
        if self.events is not None:
            self.events.retract(identity, digests, group)

    def fail(self) -> None:
        """Tell outsiders what a failed step did: it stored nothing, but it may have evicted."""
        if self.events is not None:
            self.events.flush()

    def forget(self, tenant: bytes) -> int:
        """Erase a tenant from statistics and kept events; returns the number of events."""
        self.stats.tenants.pop(tenant, None)
        self.chronicle.forget(tenant)
        return 0 if self.events is None else self.events.forget(tenant)
