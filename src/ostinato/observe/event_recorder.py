"""Logs events of a cache: blocks by digest, each stored and removed once."""

from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from ostinato.cache.block import CacheEntry
from ostinato.cache.block_table import BlockTable
from ostinato.cache.observer import CacheObserver, Eviction
from ostinato.cache.prefix_index import CachedRun, PublishResult, Removal
from ostinato.core.identity import PrefixKey
from ostinato.core.ids import BlockDigest
from ostinato.indexes.block_hash import BlockHasher
from ostinato.observe.events import AllCleared, BlockRemoved, BlockStored, EventLog


class EventRecorder(CacheObserver):
    """Fills an event log. Partial blocks have no digest and no events."""

    def __init__(self, log: EventLog, hasher: BlockHasher) -> None:
        """Start with an empty cache; the hasher names blocks."""
        self._log = log
        self._hasher = hasher
        self._digests: dict[tuple[int, int], BlockDigest] = {}  # by group and block
        self._copies: Counter[tuple[int, BlockDigest]] = Counter()

    def on_publish(
        self, table: BlockTable, first: int, last: int, result: PublishResult, group: int = 0
    ) -> None:
        """Log new content, and keep which block has which."""
        key, blocks, size = table.key, table.groups[group], self._hasher.block_size
        digests = self._hasher.digests(key, last)
        for place in range(first + len(result.duplicates), last):
            self._digests[group, blocks[place]] = digests[place]
            self._copies[group, digests[place]] += 1
        for event in stored_events(key, digests, first + result.num_known, last, size, group):
            self._log.add(event)

    def on_evict(self, eviction: Eviction) -> None:
        """Log evicted and removed contents."""
        gone = self._remove(eviction.removal.blocks, eviction.group)
        if gone:
            self._log.add(BlockRemoved(gone, eviction.entry.identity, eviction.group))

    def on_retract(self, table: BlockTable, removal: Removal, group: int = 0) -> None:
        """Retract what a failed step stored."""
        gone = self._remove(removal.blocks, group)
        self._log.retract(table.key.identity, gone, group)

    def on_settle(self) -> None:
        """Flush the step's events."""
        self._log.flush()

    def on_clear(self, everything: bool) -> None:
        """Log that the cache is empty."""
        if everything:
            self._log.add(AllCleared())
            self._log.flush()

    def snapshot(self, runs: Iterable[CachedRun]) -> list[BlockStored]:
        """Describe what is cached under full attention, as events that would store it.

        Args:
            runs: Runs of the index, parents before children.

        Cost: O(cached tokens) copied bytes, and O(cached blocks) short steps in Python.
        """
        last: list[BlockDigest | None] = []
        events = []
        for run in runs:
            entry = run.entries[0]
            known = [self._digests.get((0, block)) for block in entry.blocks]
            digests = tuple(digest for digest in known if digest is not None)  # no partial tail
            parent = None if run.parent is None else last[run.parent]
            last.append(digests[-1] if digests else None)
            if digests:
                events.append(self._stored_run(entry, parent, digests))
        return events

    def _stored_run(
        self, entry: CacheEntry, parent: BlockDigest | None, digests: tuple[BlockDigest, ...]
    ) -> BlockStored:
        size = self._hasher.block_size
        keys = [entry.block_key(place, size) for place in range(len(digests))]
        return BlockStored(
            digests,
            parent,
            array("I", b"".join(key.tokens for key in keys)),
            size,
            entry.identity,
            tuple(key.extra or None for key in keys),
        )

    def erase(self, tenant: bytes) -> int:
        """Erase a tenant's kept events; returns how many."""
        return self._log.erase(tenant)

    def _remove(self, blocks: Iterable[int], group: int) -> tuple[BlockDigest, ...]:
        """Return the digests of contents whose last copy is gone."""
        gone = []
        for block in blocks:
            digest = self._digests.pop((group, block), None)
            if digest is None:
                continue
            self._copies[group, digest] -= 1
            if not self._copies[group, digest]:
                del self._copies[group, digest]
                gone.append(digest)
        return tuple(gone)


def stored_events(
    key: PrefixKey,
    digests: Sequence[BlockDigest],
    first: int,
    last: int,
    block_size: int,
    group: int = 0,
    medium: str = "",
) -> Iterator[BlockStored]:
    """Describe blocks ``first .. last`` of a sequence: one event per identity."""
    while first < last:
        identity, next_stage = key.identity.of_block(first, block_size)
        end = min(last, next_stage)
        blocks = (key.block_key(i * block_size, (i + 1) * block_size) for i in range(first, end))
        yield BlockStored(
            tuple(digests[first:end]),
            digests[first - 1] if first else None,
            key.tokens[first * block_size : end * block_size],
            block_size,
            identity,
            tuple(block.extra or None for block in blocks),
            group,
            medium,
        )
        first = end
