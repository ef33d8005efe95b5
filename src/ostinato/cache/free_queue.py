"""Which entry is given away next?

An intrusive doubly linked list: the links live in the entries, a sentinel closes the ring::

    sentinel ⇄ least recently released ⇄ … ⇄ most recently released ⇄ (sentinel)

Source: the free block queue of vLLM's automatic prefix caching design.
"""

from collections.abc import Iterator, Sequence

from ostinato.cache.block import CacheEntry
from ostinato.core.identity import Identity


class FreeQueue:
    """A queue whose members can also leave from the middle, each operation in O(1)."""

    __slots__ = ("_length", "_sentinel")

    def __init__(self) -> None:
        """Make an empty queue."""
        self._sentinel = CacheEntry(Identity())
        self._sentinel.prev = self._sentinel.next = self._sentinel
        self._length = 0

    def __len__(self) -> int:
        """Number of entries."""
        return self._length

    def __iter__(self) -> Iterator[CacheEntry]:
        """Walk from the head; the queue must not change meanwhile."""
        entry = self._sentinel.next
        while entry is not None and entry is not self._sentinel:
            yield entry
            entry = entry.next

    @property
    def head(self) -> CacheEntry | None:
        """The entry that would be given away next; None if empty."""
        return self._sentinel.next if self._length else None

    def extend(self, entries: Sequence[CacheEntry]) -> None:
        """Put entries at the tail, one behind the other."""
        sentinel = self._sentinel
        last = sentinel.prev
        assert last is not None
        for entry in entries:
            assert entry.next is None, "an entry is in at most one queue"
            last.next, entry.prev = entry, last
            last = entry
        last.next, sentinel.prev = sentinel, last
        self._length += len(entries)

    def insert_after(self, left: CacheEntry, entry: CacheEntry) -> None:
        """Put an entry right behind another one."""
        assert entry.next is None, "an entry is in at most one queue"
        right = left.next
        assert right is not None
        entry.prev, entry.next = left, right
        left.next = right.prev = entry
        self._length += 1

    def remove(self, entries: Sequence[CacheEntry]) -> None:
        """Take entries out, wherever each of them stands."""
        for entry in entries:
            left, right = entry.prev, entry.next
            assert left is not None and right is not None, "the entry is in no queue"
            left.next, right.prev = right, left
            entry.prev = entry.next = None
        self._length -= len(entries)

    def check(self) -> None:
        """Walk the ring and assert that both directions agree."""
        entry, count = self._sentinel, 0
        while True:
            following = entry.next
            assert following is not None and following.prev is entry, "the ring is broken"
            if following is self._sentinel:
                break
            entry, count = following, count + 1
        assert count == self._length, f"{count} entries linked, {self._length} counted"
