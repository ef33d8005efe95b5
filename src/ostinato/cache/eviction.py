"""The ports of eviction: which cached blocks are evicted first, and who may take whose.

A policy keeps the evictable entries: those that no request holds. The pool adds what is released,
removes what is held again, and asks for a victim when no unused blocks are left::

    add ──► (evictable) ──remove──► held again
                 │  ▲
              evict └─ split, became_leaf
                 ▼
             evicted ──recall──► published again

Source: the free block queue of vLLM's automatic prefix caching design.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from ostinato.cache.block import CacheEntry
from ostinato.core.identity import PrefixKey


@dataclass(slots=True)
class RequestSummary:
    """Facts of the request that releases an entry, for eviction policies."""

    num_output_tokens: int = 0
    gap_s: float | None = None
    """Seconds since what it found was last released, which is the time since its conversation's
    previous turn; None if it found nothing, or what many share."""
    num_new_blocks: int = 0  # blocks it published that were never cached before
    recalled: list[Any] = field(default_factory=list)
    """Evicted blocks that it asked for, as the policy remembers them."""


Victim = tuple[CacheEntry, int]
"""A leaf to evict, and how many of its last blocks before another victim is chosen."""


class EvictionPolicy(Protocol):
    """The port of policies, which choose the evictable entry to evict next.

    Entries of one request arrive tail first. A victim is always a leaf: nothing cached builds on
    it (law 8).
    """

    @property
    def num_blocks(self) -> int:
        """Blocks of all entries."""

    def add(self, entries: Sequence[CacheEntry], summary: RequestSummary | None) -> None:
        """Add all entries that a request releases, tail first; None if it was no request."""

    def remove(self, entries: Sequence[CacheEntry]) -> None:
        """Remove entries that are held again."""

    def evict(self, entry: CacheEntry, num_blocks: int) -> None:
        """Note that an entry is about to lose its last blocks; if all, remove it."""

    def split(self, tail: CacheEntry, head: CacheEntry) -> None:
        """Add ``head``, which was the first part of ``tail`` until now; it is held next."""

    def became_leaf(self, entry: CacheEntry) -> None:
        """Note that nothing cached builds on an entry any more."""
        return None

    def victim(self, num_needed: int = 0) -> Victim | None:
        """Choose what to evict for ``num_needed`` blocks, 0 if unknown; None without an entry."""

    def recall(
        self,
        key: PrefixKey,
        first: int,
        max_blocks: int,
        block_size: int,
        summary: RequestSummary | None,
    ) -> tuple[int, int]:
        """Return what is remembered of blocks ``first ..`` of a sequence, now published again.

        Returns:
            How often they were used before they were evicted, 0 if they are new, and for how many
            blocks, up to ``max_blocks``, this is true.
        """
        return 0, max_blocks

    def erase(self, belongs: Callable[[CacheEntry], bool]) -> None:
        """Erase what is remembered of evicted entries that match."""
        return None

    def __iter__(self) -> Iterator[CacheEntry]:
        """Iterate over all entries, least recently released first."""

    def check(self) -> None:
        """Assert the policy's invariants."""


PolicyFactory = Callable[[int, Callable[[], float]], EvictionPolicy]
"""Makes a policy from the pool's number of blocks and a clock whose seconds never fall."""


class LeastRecentlyUsed(EvictionPolicy):
    """Evict what was released longest ago, and of one request the deepest first.

    A request that holds an entry holds all before it, so ancestors are released with it or later
    and come after it in the queue: the first is a leaf. Each operation is O(1) per entry.
    """

    num_blocks = 0

    def __init__(self) -> None:
        """Start without an entry."""
        self._queue: OrderedDict[CacheEntry, None] = OrderedDict()

    def __iter__(self) -> Iterator[CacheEntry]:
        """Iterate, least recently released first; the queue must not change meanwhile."""
        return iter(self._queue)

    def add(self, entries: Sequence[CacheEntry], summary: RequestSummary | None) -> None:
        """Append entries, one after the other."""
        queue, num_blocks = self._queue, self.num_blocks
        for entry in entries:
            assert entry not in queue, "an entry is in a queue once"
            queue[entry] = None
            num_blocks += entry.num_blocks
        self.num_blocks = num_blocks

    def remove(self, entries: Sequence[CacheEntry]) -> None:
        """Remove entries from anywhere in the queue."""
        queue, num_blocks = self._queue, self.num_blocks
        for entry in entries:
            del queue[entry]
            num_blocks -= entry.num_blocks
        self.num_blocks = num_blocks

    def evict(self, entry: CacheEntry, num_blocks: int) -> None:
        """Remove an entry if it loses all its blocks."""
        self.num_blocks -= num_blocks
        if num_blocks == entry.num_blocks:
            del self._queue[entry]

    def split(self, tail: CacheEntry, head: CacheEntry) -> None:
        """Append the head; a request that splits an entry holds the head at once."""
        self._queue[head] = None

    def victim(self, num_needed: int = 0) -> Victim | None:
        """Return the first entry, or the next that is a leaf if a copy of it was retracted."""
        return next(((entry, entry.num_blocks) for entry in self if entry.is_leaf), None)

    def check(self) -> None:
        """Assert that ticks never fall."""
        ticks = [entry.idle_tick for entry in self]
        assert ticks == sorted(ticks), f"entries out of order: {ticks}"


class BlockShares:
    """The port of shares: which tenant may take evictable blocks of which; by default, all of all.

    ``ostinato.tenants`` gives tenants, named by ``Identity.owner``, guarantees and quotas, and
    their entries a policy each.
    """

    are_limited = False
    """Whether a tenant may be refused blocks although some are free; if not, none is charged."""
    policies: Sequence[EvictionPolicy]
    add: Callable[[Sequence[CacheEntry], RequestSummary | None], None]
    remove: Callable[[Sequence[CacheEntry]], None]
    """Those of the policies that keep the entries, which are of one sequence."""

    def __init__(self, policy: EvictionPolicy) -> None:
        """Keep all evictable entries in one policy."""
        self.policies = (policy,)
        self.add, self.remove = policy.add, policy.remove

    def policy_of(self, tenant: bytes) -> EvictionPolicy:
        """Return the policy that keeps a tenant's entries."""
        return self.policies[0]

    def charge(self, tenant: bytes, num_blocks: int) -> None:
        """Note that blocks were allocated to a tenant, or freed if that is negative."""

    def num_takeable(self, tenant: bytes) -> int:
        """Return how many evictable blocks a tenant may take."""
        return self.policies[0].num_blocks

    def quota_victim(self, tenant: bytes, num_more: int) -> Victim | None:
        """Return the tenant's own victim if ``num_more`` blocks would exceed its quota, else None.

        None as well if nothing of its own is evictable.
        """
        return None

    def victim(self, tenant: bytes, num_needed: int) -> Victim | None:
        """Return what to evict for a tenant's next blocks."""
        return self.policies[0].victim(num_needed)

    def check(self, num_in_use: int) -> None:
        """Assert that ``num_in_use`` blocks, all that are not free, are charged."""
