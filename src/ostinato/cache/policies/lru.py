"""LRU: evicts what was released longest ago."""

from collections.abc import Iterator, Sequence

from ostinato.cache.block import CacheEntry
from ostinato.cache.free_queue import FreeQueue
from ostinato.cache.policies.contract import EvictionPolicy, Turn


class LeastRecentlyUsed(EvictionPolicy):
    """Evict what was released longest ago, and of one request the deepest first.

    A request that holds an entry holds all before it, so ancestors are released with it or later
    and come after it in the queue: the head is always a leaf.
    """

    joins = True

    def __init__(self) -> None:
        """Make an empty policy."""
        self._queue = FreeQueue()

    def add_all(self, entries: Sequence[CacheEntry], turn: Turn | None) -> None:
        """Append in O(1) each."""
        self._queue.extend(entries)

    def remove_all(self, entries: Sequence[CacheEntry]) -> None:
        """Unlink in O(1) each."""
        self._queue.remove_all(entries)

    def evict(self, entry: CacheEntry, num_blocks: int) -> None:
        """Unlink in O(1) if all blocks go."""
        if num_blocks == entry.num_blocks:
            self._queue.remove(entry)

    def split(self, tail: CacheEntry, head: CacheEntry) -> None:
        """Put the head right behind its tail in O(1)."""
        self._queue.insert_after(tail, head)

    def victim(self, num_wanted: int = 0) -> CacheEntry | None:
        """Name the head of the queue in O(1)."""
        return self._queue.head

    def __iter__(self) -> Iterator[CacheEntry]:
        """Walk in order of eviction."""
        return iter(self._queue)

    def check(self) -> None:
        """Assert the links and that ticks never fall."""
        self._queue.check()
        ticks = [entry.idle_tick for entry in self._queue]
        assert ticks == sorted(ticks), f"entries out of order: {ticks}"
