"""The port of eviction policies, the queue they keep entries in, and the default: LRU.

A policy keeps the entries that no request holds. The pool tells it what is released and used
again, and asks it for a victim when free blocks have run out::

    add ──► (evictable) ──remove──► held again
                 │  ▲
              evict └─ split, expose
                 ▼
             evicted ──recall──► published anew: it was wanted after all

Policies that learn from what was evicted set ``remembers``; the others pay nothing for it.

Source: the free block queue of vLLM's automatic prefix caching design.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from ostinato.cache.block import CacheEntry
from ostinato.core.identity import Identity, PrefixKey


@dataclass(slots=True)
class RequestSummary:
    """What a policy may know of the request that releases an entry.

    Attributes:
        num_output_tokens: Tokens that were generated for it.
        gap_s: The policy's own: seconds since what it found was last released, which is the time
            since its conversation's previous turn; None if it found nothing, or what many share.
        num_new_blocks: The policy's own: blocks it published that were never cached before.
        recalled: The policy's own: what is remembered of what it asked for and did not find.
    """

    num_output_tokens: int = 0
    gap_s: float | None = None
    num_new_blocks: int = 0
    recalled: list[Any] = field(default_factory=list)


class EvictionPolicy(Protocol):
    """Which evictable entry is worth least?

    Entries of one request arrive tail first. The victim is always a leaf: nothing cached
    builds on it (law 8).

    Attributes:
        remembers: Whether it is asked what it remembers of what is published.
    """

    remembers: bool = False

    def add(self, entries: Sequence[CacheEntry], summary: RequestSummary | None) -> None:
        """Take all entries that a request releases, tail first; None if it was no request."""

    def remove(self, entries: Sequence[CacheEntry]) -> None:
        """Remove entries that are held again."""

    def evict(self, entry: CacheEntry, num_blocks: int) -> None:
        """Note that an entry is about to lose its last blocks; if all, remove it."""

    def split(self, tail: CacheEntry, head: CacheEntry) -> None:
        """Take ``head``, which was the first part of ``tail`` until now."""

    def expose(self, entry: CacheEntry) -> None:
        """Note that an entry has become a leaf."""
        return None

    def victim(self, num_wanted: int = 0) -> CacheEntry | None:
        """Return the leaf to evict next, of so many blocks if known; None without an entry."""

    def takeable(self, victim: CacheEntry) -> int:
        """Return how many of its victim's blocks may go before it names another."""
        return victim.num_blocks

    def __iter__(self) -> Iterator[CacheEntry]:
        """Walk all entries, those released longest ago first."""

    def check(self) -> None:
        """Assert the policy's invariants."""

    # --- for policies that remember ---

    def recall(
        self, key: PrefixKey, first: int, most: int, block_size: int, summary: RequestSummary | None
    ) -> tuple[int, int]:
        """Tell what is remembered of blocks ``first ..`` of a sequence, now published anew.

        Returns:
            How often they were used before they were evicted, 0 if they are new, and of how many
            blocks, up to ``most``, this is true.
        """
        return 0, most

    def forget(self, belongs: Callable[[CacheEntry], bool]) -> None:
        """Erase what is remembered of evicted entries that match."""
        return None


PolicyFactory = Callable[[int, Callable[[], float]], EvictionPolicy]
"""Makes a policy for a pool of so many blocks, with a clock whose seconds never fall."""


class EntryQueue:
    """Entries in a doubly linked ring; any of them leaves in O(1).

    ::

        sentinel ⇄ least recently released ⇄ … ⇄ most recently released ⇄ (sentinel)
    """

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

    @property
    def oldest_leaf(self) -> CacheEntry | None:
        """The head, or the next entry that is a leaf where a copy of the head's was taken back."""
        head = self.head
        if head is None or head.is_leaf:
            return head
        return next(entry for entry in self if entry.is_leaf)

    def extend(self, entries: Sequence[CacheEntry]) -> None:
        """Put entries at the tail, one after the other."""
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
        """Put an entry right after another one."""
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
        while (following := entry.next) is not self._sentinel:
            assert following is not None and following.prev is entry, "the ring is broken"
            entry, count = following, count + 1
        assert self._sentinel.prev is entry, "the ring is broken"
        assert count == self._length, f"{count} entries linked, {self._length} counted"


class LeastRecentlyUsed(EntryQueue, EvictionPolicy):
    """Evict what was released longest ago, and of one request the deepest first.

    A request that holds an entry holds all before it, so ancestors are released with it or later
    and come after it in the queue: the head is always a leaf. Each operation is O(1) per entry.
    """

    __slots__ = ()

    def add(self, entries: Sequence[CacheEntry], summary: RequestSummary | None) -> None:
        """Append them."""
        self.extend(entries)

    def evict(self, entry: CacheEntry, num_blocks: int) -> None:
        """Unlink it if all its blocks are evicted."""
        if num_blocks == entry.num_blocks:
            self.remove((entry,))

    def split(self, tail: CacheEntry, head: CacheEntry) -> None:
        """Put the head right after its tail."""
        self.insert_after(tail, head)

    def victim(self, num_wanted: int = 0) -> CacheEntry | None:
        """Return the oldest leaf."""
        return self.oldest_leaf

    def check(self) -> None:
        """Assert the links and that ticks never fall."""
        super().check()
        ticks = [entry.idle_tick for entry in self]
        assert ticks == sorted(ticks), f"entries out of order: {ticks}"
