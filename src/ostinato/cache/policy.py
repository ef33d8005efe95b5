"""Which cached entry is worth least?

A policy keeps the entries that nobody holds. The pool tells it what comes and goes and asks
it for a victim when scratch blocks have run out.
"""

from collections.abc import Iterator
from typing import Protocol

from ostinato.cache.block import CacheEntry
from ostinato.cache.free_queue import FreeQueue
from ostinato.core.config import PolicyName


class EvictionPolicy(Protocol):
    """The contract every policy keeps.

    Entries of one request arrive tail first. The victim is always a leaf: nothing cached
    builds on it (law 8).
    """

    def add(self, entry: CacheEntry) -> None:
        """Take an entry that nobody holds any more."""

    def remove(self, entry: CacheEntry) -> None:
        """Let go of an entry that is held again or gone."""

    def split(self, tail: CacheEntry, head: CacheEntry) -> None:
        """Take ``head``, which was the first part of ``tail`` until now."""

    def victim(self) -> CacheEntry | None:
        """Name the leaf to evict next; None if there is no entry. No effects."""

    def __iter__(self) -> Iterator[CacheEntry]:
        """Walk all entries, in order of eviction as far as it is known."""

    def check(self) -> None:
        """Assert the policy's invariants."""


class LeastRecentlyUsed:
    """Evict what was released longest ago, and of one request the deepest first.

    Whoever holds an entry holds all before it, so ancestors are released with it or later
    and stand behind it in the queue: the head is always a leaf.
    """

    def __init__(self) -> None:
        """Make an empty policy."""
        self._queue = FreeQueue()

    def add(self, entry: CacheEntry) -> None:
        """Append in O(1)."""
        self._queue.append(entry)

    def remove(self, entry: CacheEntry) -> None:
        """Unlink in O(1)."""
        self._queue.remove(entry)

    def split(self, tail: CacheEntry, head: CacheEntry) -> None:
        """Put the head right behind its tail in O(1)."""
        self._queue.insert_after(tail, head)

    def victim(self) -> CacheEntry | None:
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


def make_policy(name: PolicyName) -> EvictionPolicy:
    """Make the policy of that name."""
    return {"lru": LeastRecentlyUsed}[name]()
