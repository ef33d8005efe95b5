"""Queues of what can be given away: blocks without content, and entries to evict.

Free blocks come back in runs, and are taken in pieces of runs::

    first run           second run
    tick 9: 4 7 5 6     tick 2: 12 11 10 9 8
    ◄── taken from the end: 6 first      then 8

``scratch_first`` gives away first what came back last; ``classic`` what came back first.

Entries are in an intrusive doubly linked list, whose links are in the entries and whose ring a
sentinel closes::

    sentinel ⇄ least recently released ⇄ … ⇄ most recently released ⇄ (sentinel)

Source: the free block queue of vLLM's automatic prefix caching design.
"""

from array import array
from collections import deque
from collections.abc import Iterator, Sequence

from ostinato.cache.block import CacheEntry
from ostinato.core.identity import Identity
from ostinato.core.ids import BlockId


class FreeBlocks:
    """Blocks without content, by the moment of their release.

    Attributes:
        num_blocks: How many there are.
    """

    __slots__ = ("_is_fifo", "_runs", "num_blocks")

    def __init__(self, num_blocks: int, is_fifo: bool) -> None:
        """Have all blocks of a pool, block 0 first.

        Args:
            num_blocks: Of the pool.
            is_fifo: Whether runs are given away in the order in which they came back.
        """
        self.num_blocks = num_blocks
        self._is_fifo = is_fifo
        # The last of a run goes first, so that taking some costs no copy of the rest.
        first = array("i", range(num_blocks - 1, -1, -1))
        self._runs: deque[tuple[int, array[int]]] = deque([(0, first)])

    @property
    def first_tick(self) -> int:
        """When the block came back that is given away next; there is one."""
        return self._runs[0][0]

    def __iter__(self) -> Iterator[tuple[int, BlockId]]:
        """Walk in the order in which they would be given away, each with its release."""
        return ((tick, BlockId(block)) for tick, run in self._runs for block in reversed(run))

    def take(self, most: int) -> "array[int]":
        """Take up to ``most`` blocks, at least one; there are some."""
        run = self._runs[0][1]
        if len(run) <= most:
            self._runs.popleft()
            taken = run[:]
        else:
            taken = run[-most:]
            del run[-most:]
        taken.reverse()
        self.num_blocks -= len(taken)
        return taken

    def give(self, blocks: "array[int]", tick: int) -> None:
        """Take blocks back.

        Args:
            blocks: Ids in token order; they are given away tail first.
            tick: When, later than all that came back before.
        """
        run = (tick, blocks[:])
        if self._is_fifo:
            self._runs.append(run)
        else:
            self._runs.appendleft(run)
        self.num_blocks += len(blocks)


class EntryQueue:
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
