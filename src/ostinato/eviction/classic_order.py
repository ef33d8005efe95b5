"""One queue of free blocks, cached or not, by release, as in the example of vLLM's document."""

from array import array
from collections import deque
from collections.abc import Iterator
from typing import Any

from ostinato.cache.block_table import BlockTable
from ostinato.cache.eviction import Victim
from ostinato.cache.observer import EvictionCause
from ostinato.cache.pool import BlockPool
from ostinato.cache.prefix_index import Contents
from ostinato.core.ids import BlockId


class ClassicPool(BlockPool):
    """A pool that allocates the free block that was released longest ago, unused or cached."""

    def __init__(self, *args: Any) -> None:
        """Make a pool in which every block is unused, as ``BlockPool`` does."""
        super().__init__(*args)
        self._freed_at = dict.fromkeys(self._unused, 0)  # in pool ticks

    def allocate(self, table: BlockTable, num_blocks: int, contents: Contents) -> "array[int]":
        """Allocate private blocks one by one, since unused and cached ones alternate."""
        allocated = array("i")
        for _ in range(num_blocks):
            allocated.extend(super().allocate(table, 1, contents))
        return allocated

    def free(self, blocks: "array[int]", tenant: bytes) -> None:
        """Free private blocks, in token order: they are allocated tail first, after all others."""
        if blocks:
            self._tick += 1
            self._freed_at.update(dict.fromkeys(blocks, self._tick))
            super().free(blocks, tenant)
            self._unused = blocks + self._unused[: -len(blocks)]

    def free_order(self) -> Iterator[BlockId]:
        """Iterate over all free blocks in the order in which LRU would allocate them."""
        unused = deque(reversed(self._unused))
        for entry in self.entries():
            while unused and self._freed_at[unused[0]] < entry.idle_tick:
                yield BlockId(unused.popleft())
            yield from map(BlockId, reversed(entry.blocks))
        yield from map(BlockId, unused)

    def _next_victim(self, tenant: bytes, num_needed: int) -> tuple[Victim | None, EvictionCause]:
        """Choose what to evict for a tenant's next blocks; None if an unused one is older."""
        victim, cause = super()._next_victim(tenant, num_needed)
        if victim is None:
            oldest = self.shares.victim(tenant, num_needed)
            if oldest is not None and oldest[0].idle_tick < self._freed_at[self._unused[-1]]:
                return oldest, cause
        return victim, cause
