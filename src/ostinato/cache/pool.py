"""The block pool: a fixed number of blocks, and which of them are given away next.

::

    all blocks = unused + evictable + held + private

Unused blocks, which are without content, wait in ``FreeBlocks``; cached entries that no request
holds wait in the eviction policy; both are free to be given away. ``free_order`` says which come
first: ``unused_first`` spares every cached block while an unused one is left; ``classic`` takes
what was released longest ago, as in the worked example of vLLM's document. ``shares`` says who
may take from whom. The pool counts; what content is, its index knows.
"""

from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from ostinato.cache.block import CacheEntry
from ostinato.cache.block_shares import BlockShares
from ostinato.cache.block_table import BlockTable
from ostinato.cache.eviction import Recall, RequestSummary
from ostinato.cache.observer import Eviction, EvictionCause, Observers
from ostinato.cache.prefix_index import Removal
from ostinato.core.config import FreeOrder
from ostinato.core.identity import PrefixKey
from ostinato.core.ids import BlockId

MANY_USES = 20
"""Content that was used more often is shared: it says nothing of one conversation's pace."""


class Contents(Protocol):
    """What knows the content of the pool's blocks: an index, or a window group."""

    def evict(self, entry: CacheEntry, most: int) -> Removal:
        """Remove up to ``most`` blocks of an evictable leaf."""


class FreeBlocks:
    """Blocks without content, which come back in runs and are taken in pieces of runs.

    ::

        first run           second run
        tick 9: 4 7 5 6     tick 2: 12 11 10 9 8
        ◄── taken from the end: 6 first      then 8

    ``unused_first`` gives away first what came back last; ``classic`` what came back first.

    Attributes:
        num_blocks: How many there are.
    """

    __slots__ = ("_is_fifo", "_runs", "num_blocks")

    def __init__(self, num_blocks: int, is_fifo: bool) -> None:
        """Have all blocks of a pool, block 0 first."""
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
        """Take up to ``most`` blocks of one run, at least one; there are some."""
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
        """Take blocks back, in token order, later than all before; the tail is given away first."""
        run = (tick, blocks[:])
        if self._is_fifo:
            self._runs.append(run)
        else:
            self._runs.appendleft(run)
        self.num_blocks += len(blocks)


class BlockPool:
    """A fixed number of blocks.

    Attributes:
        num_blocks: All blocks.
        shares: Keeps the evictable ones.
        learns: Whether the eviction policy is asked what it remembers of what is published.
        num_allocated: Blocks given away so far.
        now: The clock.
    """

    def __init__(
        self,
        num_blocks: int,
        shares: BlockShares,
        free_order: FreeOrder,
        clock: Callable[[], float],
        observers: Observers,
        group: int = 0,
    ) -> None:
        """Make a pool in which every block is unused; block 0 is given away first.

        Observers are told of evictions, and in group 0 of reuse. The clock's seconds never fall.
        """
        self.num_blocks = num_blocks
        self.shares = shares
        self.learns = any(policy.remembers for policy in shares.policies())
        self.num_allocated = 0
        self.now = clock
        self._on_reuse = () if group else observers.on_reuse
        self._on_evict = observers.on_evict
        self._group = group
        self._classic = free_order == "classic"
        self._tick = 0
        self._unused = FreeBlocks(num_blocks, self._classic)

    @property
    def num_unused(self) -> int:
        """Blocks without content."""
        return self._unused.num_blocks

    @property
    def num_evictable(self) -> int:
        """Cached blocks that no request holds."""
        return self.shares.num_evictable

    @property
    def num_free(self) -> int:
        """Blocks that could be given away."""
        return self.num_unused + self.num_evictable

    def num_free_for(self, tenant: bytes) -> int:
        """Blocks that a tenant could be given now."""
        return self._unused.num_blocks + self.shares.num_takeable(tenant)

    def has_unused(self, num_blocks: int) -> bool:
        """Whether so many blocks are without content, and any tenant may take them."""
        return num_blocks <= self._unused.num_blocks and not self.shares.are_limited

    # --- blocks of tables ---

    def take(self, table: BlockTable, num_blocks: int, contents: Contents) -> "array[int]":
        """Take private blocks for a table; the caller knows that enough are free for its tenant."""
        unused, tenant, taken = self._unused, table.tenant, array("i")
        is_enough = num_blocks <= unused.num_blocks and not self.shares.are_limited
        only_unused = is_enough and not self._classic
        while len(taken) < num_blocks:
            most = num_blocks - len(taken)
            victim, cause = (None, "space") if only_unused else self._next_victim(tenant, most)
            if victim is None:
                blocks = unused.take(most)
            else:
                most = min(most, self.shares.takeable(victim, tenant))
                blocks = self._evict(victim, most, cause, table, contents)
            self.num_allocated += len(blocks)
            self.shares.charge(tenant, len(blocks))
            taken.extend(blocks)
        return taken

    def free(self, blocks: "array[int]", tenant: bytes | None) -> None:
        """Free private blocks, in token order; they are given away tail first.

        The tenant is the one they were charged to; None if they are charged no more.
        """
        if blocks:
            self._tick += 1
            self._unused.give(blocks, self._tick)
            if tenant is not None:
                self.shares.charge(tenant, -len(blocks))

    def evict(
        self, entry: CacheEntry, cause: EvictionCause, table: BlockTable | None, contents: Contents
    ) -> int:
        """Evict all of an evictable leaf for no new content; return how many blocks became free."""
        count = entry.num_blocks
        while entry.num_blocks:
            self.free(self._evict(entry, entry.num_blocks, cause, table, contents), None)
        return count

    def enforce_quota(self, table: BlockTable, contents: Contents) -> None:
        """Evict a tenant's own blocks while it keeps more than its quota."""
        while excess := self.shares.num_over_quota(table.tenant):
            victim = self.shares.policy_of(table.tenant).victim()
            if victim is None:
                return
            self.free(self._evict(victim, excess, "quota", table, contents), None)

    def remove(self, belongs: Callable[[CacheEntry], bool], contents: Contents) -> int:
        """Free every evictable block whose entry matches, and forget it; return how many."""
        count, waiting = 0, [entry for entry in self.entries() if belongs(entry)]
        while waiting:  # once, as a rule: what was released longest ago is a leaf
            inner: list[CacheEntry] = []
            for entry in waiting:
                if entry.is_leaf:
                    count += self.evict(entry, "removed", None, contents)
                else:
                    inner.append(entry)
            assert len(inner) < len(waiting), "what is removed has descendants that are not"
            waiting = inner[::-1]  # a chain that came root first goes in the second round
        for policy in self.shares.policies():
            policy.forget(belongs)
        return count

    def _next_victim(
        self, tenant: bytes, num_wanted: int
    ) -> tuple[CacheEntry | None, EvictionCause]:
        """Choose the entry to evict for a tenant's next blocks; None if unused ones come first."""
        own = self.shares.quota_victim(tenant)
        if own is not None:
            return own, "quota"
        has_unused = self._unused.num_blocks > 0
        if has_unused and not self._classic:
            return None, "space"
        victim = self.shares.victim(tenant, num_wanted)
        assert has_unused or victim is not None, "the caller takes no more than num_free_for tells"
        if has_unused and victim is not None and victim.idle_tick > self._unused.first_tick:
            victim = None
        return victim, "space"

    def _evict(
        self,
        entry: CacheEntry,
        most: int,
        cause: EvictionCause,
        table: BlockTable | None,
        contents: Contents,
    ) -> "array[int]":
        removal = contents.evict(entry, most)
        if self._on_evict:
            eviction = Eviction(cause, entry, removal, table, self._group)
            for notify in self._on_evict:
                notify(eviction)
        return removal.blocks

    # --- what indexes tell of their entries ---

    def hold(self, entry: CacheEntry) -> None:
        """Count one more holder of an entry."""
        if not entry.ref_count:
            self.mark_used((entry,))
        entry.ref_count += 1

    def release(self, entry: CacheEntry) -> None:
        """Count one holder of an entry less; without any it is evictable."""
        assert entry.ref_count > 0, "released more often than acquired"
        entry.ref_count -= 1
        if not entry.ref_count:
            self.mark_evictable((entry,))

    def mark_evictable(
        self, entries: Sequence[CacheEntry], summary: RequestSummary | None = None
    ) -> None:
        """Note that no request holds entries of one sequence any more, tail first.

        The summary is of the request that held them; None if it was no request.
        """
        now_s, moment, tick = self.now(), self.num_allocated, self._tick
        for entry in entries:
            tick += 1
            entry.idle_tick, entry.idle_since_s, entry.idle_allocated = tick, now_s, moment
        self._tick = tick
        self.shares.add(entries, summary)

    def mark_used(self, entries: Sequence[CacheEntry]) -> None:
        """Note that evictable entries of one sequence are held again."""
        self.shares.remove(entries)
        for entry in entries:
            entry.uses += 1
        for notify in self._on_reuse:
            notify(entries, self.num_allocated)

    def split(self, tail: CacheEntry, head: CacheEntry) -> None:
        """Note that an entry was split; block counts stay."""
        head.idle_tick, head.idle_since_s = tail.idle_tick, tail.idle_since_s
        head.idle_allocated, head.uses = tail.idle_allocated, tail.uses
        if not tail.ref_count:
            self.shares.policy_of(tail.identity.owner).split(tail, head)

    def shrink(self, entry: CacheEntry, num_blocks: int) -> None:
        """Note that an evictable entry is about to lose its last blocks."""
        self.shares.shrink(entry, num_blocks)
        self.shares.charge(entry.identity.owner, -num_blocks)

    def expose(self, entry: CacheEntry) -> None:
        """Note that nothing builds on an entry any more, or on this copy of it."""
        if not entry.ref_count:
            self.shares.policy_of(entry.identity.owner).expose(entry)

    # --- for policies that learn ---

    def note_gap(self, summary: RequestSummary, uses: int, idle_since_s: float) -> None:
        """Note the time since the content that a request found was released."""
        summary.gap_s = self.now() - idle_since_s if uses < MANY_USES else None

    def recall(
        self, key: PrefixKey, first: int, most: int, block_size: int,
        summary: RequestSummary | None,
    ) -> Recall:  # fmt: skip
        """Return what the policy remembers of blocks ``first ..`` that are published anew."""
        policy = self.shares.policy_of(key.identity.owner)
        known = policy.recall(key, first, most, block_size, summary)
        if summary is not None:
            if known.idle_since_s is None:
                summary.num_new_blocks += known.num_blocks
            else:
                self.note_gap(summary, known.uses, known.idle_since_s)
        return known

    # --- for pictures and checks ---

    def entries(self) -> Iterator[CacheEntry]:
        """Walk all evictable entries, those released longest ago first."""
        entries = [entry for policy in self.shares.policies() for entry in policy]
        return iter(sorted(entries, key=lambda entry: entry.idle_tick))

    def free_order(self) -> Iterator[BlockId]:
        """Walk all free blocks in the order in which they would be given away under LRU."""
        unused = deque(self._unused)
        for entry in self.entries():
            while unused and not (self._classic and entry.idle_tick < unused[0][0]):
                yield unused.popleft()[1]
            yield from map(BlockId, reversed(entry.blocks))
        yield from (block for _, block in unused)

    def check(self, owned: Sequence[int]) -> None:
        """Assert that counts and lists agree, and that each block is unused or owned, once."""
        self.shares.check(self.num_blocks - self.num_unused)
        unused, free = [block for _, block in self._unused], list(self.free_order())
        everything = sorted([*owned, *unused])
        assert everything == list(range(self.num_blocks)), "a block has two owners or none"
        assert len(free) == len(set(free)), f"a block is free twice: {free}"
        assert len(unused) == self.num_unused, "free blocks are miscounted"
        assert len(free) == self.num_free, f"{len(free)} free blocks, {self.num_free} counted"
