"""The block pool: a fixed number of blocks, and which of them are given away next.

::

    all blocks = free + evictable + held + private

The pool counts; it never looks at content. Free blocks wait in ``FreeBlocks``, cached entries that
no request holds wait in the eviction policy, and both can be given away. ``free_order`` says which
come first: ``scratch_first`` spares every cached block while a free one is left; ``classic`` takes
what was released longest ago, as in the worked example of vLLM's document. ``shares`` says who may
take from whom.
"""

from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence

from ostinato.cache.block import CacheEntry
from ostinato.cache.block_shares import BlockShares
from ostinato.cache.eviction import Recall, RequestSummary
from ostinato.cache.free_list import FreeBlocks
from ostinato.cache.observer import Observers
from ostinato.core.config import FreeOrder
from ostinato.core.identity import PrefixKey
from ostinato.core.ids import BlockId

MANY_USES = 20
"""Content that was used more often is shared: it says nothing of one conversation's pace."""


class BlockPool:
    """A fixed number of blocks.

    Attributes:
        num_blocks: All blocks.
        shares: Keeps the evictable ones.
        learns: Whether the eviction policy is told what is looked up and published.
        num_allocated: Blocks given away so far.
    """

    def __init__(
        self,
        num_blocks: int,
        shares: BlockShares,
        free_order: FreeOrder,
        clock: Callable[[], float],
        observers: Observers,
    ) -> None:
        """Make a pool in which every block is free; block 0 is given away first."""
        self.num_blocks = num_blocks
        self.shares = shares
        self.learns = any(policy.remembers for policy in shares.policies())
        self.num_allocated = 0
        self.now = clock
        self._on_reuse = observers.on_reuse
        self._classic = free_order == "classic"
        self._tick = 0
        self._scratch = FreeBlocks(num_blocks, self._classic)

    @property
    def num_scratch(self) -> int:
        """Blocks without content."""
        return self._scratch.num_blocks

    @property
    def num_evictable(self) -> int:
        """Cached blocks that no request holds."""
        return self.shares.num_evictable

    @property
    def num_free(self) -> int:
        """Blocks that could be given away."""
        return self.num_scratch + self.num_evictable

    def num_free_for(self, tenant: bytes) -> int:
        """Blocks that a tenant could be given now."""
        return self._scratch.num_blocks + self.shares.num_takeable(tenant)

    @property
    def scratch(self) -> list[BlockId]:
        """Blocks without content in the order in which they would be given away."""
        return [block for _, block in self._scratch]

    def next_victim(self, tenant: bytes, num_wanted: int) -> tuple[CacheEntry | None, bool]:
        """Choose what the next blocks of a tenant are taken from.

        Returns:
            The entry to evict, None if free blocks come first; and whether it is the tenant's own
            that goes for its quota.
        """
        own = self.shares.quota_victim(tenant)
        if own is not None:
            return own, True
        has_free = self.num_scratch > 0
        if has_free and not self._classic:
            return None, False
        victim = self.shares.victim(tenant, num_wanted)
        assert has_free or victim is not None, "the caller takes no more than num_free_for tells"
        if has_free and victim is not None and victim.idle_tick > self._scratch.first_tick:
            victim = None
        return victim, False

    def take_free(self, num_blocks: int, tenant: bytes) -> "array[int] | None":
        """Take blocks where free ones are enough; None if something has to be evicted."""
        scratch = self._scratch
        if self._classic or self.shares.are_limited or scratch.num_blocks < num_blocks:
            return None
        taken = scratch.take(num_blocks)
        while len(taken) < num_blocks:
            taken.extend(scratch.take(num_blocks - len(taken)))
        self.num_allocated += num_blocks
        self.shares.charge(tenant, num_blocks)
        return taken

    def take_some(self, most: int) -> "array[int]":
        """Take up to ``most`` free blocks that come before every cached one, at least one."""
        return self._scratch.take(most)

    def charge(self, tenant: bytes, num_blocks: int) -> None:
        """Note that a tenant was given blocks."""
        self.num_allocated += num_blocks
        self.shares.charge(tenant, num_blocks)

    def free(self, blocks: "array[int]", tenant: bytes | None) -> None:
        """Free private blocks; their content is lost.

        Args:
            blocks: Ids in token order; they are given away tail first.
            tenant: To whom they were charged; None if they are charged no more.
        """
        if not blocks:
            return
        self._tick += 1
        self._scratch.give(blocks, self._tick)
        if tenant is not None:
            self.shares.charge(tenant, -len(blocks))

    def stamp(self, entry: CacheEntry) -> None:
        """Note when a new entry was published."""
        entry.born_s = self.now()

    def mark_evictable(
        self, entries: Sequence[CacheEntry], summary: RequestSummary | None = None
    ) -> None:
        """Note that no request holds entries of one sequence any more.

        Args:
            entries: Tail first.
            summary: Of the request that held them; None if it was no request.
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
        if self.learns:
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
        scratch = deque(self._scratch)
        for entry in self.entries():
            while scratch and not (self._classic and entry.idle_tick < scratch[0][0]):
                yield scratch.popleft()[1]
            yield from entry.blocks_tail_first
        yield from (block for _, block in scratch)

    def check(self) -> None:
        """Assert that counts and lists agree and no block is free twice."""
        self.shares.check(self.num_blocks - self.num_scratch)
        free = list(self.free_order())
        assert len(free) == len(set(free)), f"a block is free twice: {free}"
        assert all(0 <= block < self.num_blocks for block in free), f"no such block: {free}"
        assert len(self.scratch) == self.num_scratch, "free blocks are miscounted"
        assert len(free) == self.num_free, f"{len(free)} free blocks, {self.num_free} counted"
