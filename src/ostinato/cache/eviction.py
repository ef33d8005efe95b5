"""The ports of eviction: policies, by default LRU, and who may take whose blocks.

A policy keeps the entries that no request holds. The pool tells it what is released and used
again, and asks it for a victim when free blocks have run out::

    add ──► (evictable) ──remove──► held again
                 │  ▲
              evict └─ split, expose
                 ▼
             evicted ──recall──► published anew: it was wanted after all

Source: the free block queue of vLLM's automatic prefix caching design.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ostinato.cache.block import CacheEntry
from ostinato.core.identity import PrefixKey


@dataclass(slots=True)
class RequestSummary:
    """What a policy may know of the request that releases an entry.

    Attributes:
        num_output_tokens: Tokens that were generated for it.
        policy_state: The policy's own.
    """

    num_output_tokens: int = 0
    policy_state: Any = None


class EvictionPolicy(Protocol):
    """Which evictable entry is worth least?

    Entries of one request arrive tail first. The victim is always a leaf: nothing cached
    builds on it (law 8).
    """

    def add(self, entries: Sequence[CacheEntry], summary: RequestSummary | None) -> None:
        """Take all entries that a request releases, tail first; None if it was no request."""

    def remove(self, entries: Sequence[CacheEntry]) -> None:
        """Remove entries that are held again."""

    def evict(self, entry: CacheEntry, num_blocks: int) -> None:
        """Note that an entry is about to lose its last blocks; if all, remove it."""

    def split(self, tail: CacheEntry, head: CacheEntry) -> None:
        """Take ``head``, which was the first part of ``tail`` until now; it is held next."""

    def expose(self, entry: CacheEntry) -> None:
        """Note that an entry has become a leaf."""
        return None

    def victim(self, num_wanted: int = 0) -> CacheEntry | None:
        """Return the leaf to evict next, of so many blocks if known; None without an entry."""

    def takeable(self, victim: CacheEntry) -> int:
        """Return how many of its victim's blocks may go before it names another."""
        return victim.num_blocks

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

    def __iter__(self) -> Iterator[CacheEntry]:
        """Walk all entries, those released longest ago first."""

    def check(self) -> None:
        """Assert the policy's invariants."""


PolicyFactory = Callable[[int, Callable[[], float]], EvictionPolicy]
"""Makes a policy for a pool of so many blocks, with a clock whose seconds never fall."""


class LeastRecentlyUsed(EvictionPolicy):
    """Evict what was released longest ago, and of one request the deepest first.

    A request that holds an entry holds all before it, so ancestors are released with it or later
    and come after it in the queue: the first is a leaf. Each operation is O(1) per entry.
    """

    def __init__(self) -> None:
        """Start without an entry."""
        self._queue: OrderedDict[CacheEntry, None] = OrderedDict()

    def __len__(self) -> int:
        """Number of entries."""
        return len(self._queue)

    def __iter__(self) -> Iterator[CacheEntry]:
        """Walk from the one released longest ago; the queue must not change meanwhile."""
        return iter(self._queue)

    def __reversed__(self) -> Iterator[CacheEntry]:
        """Walk from the one released last."""
        return reversed(self._queue)

    def add(self, entries: Sequence[CacheEntry], summary: RequestSummary | None) -> None:
        """Put entries at the end, one after the other."""
        queue = self._queue
        num_before = len(queue)
        for entry in entries:
            queue[entry] = None
        assert len(queue) == num_before + len(entries), "an entry is in a queue once"

    def remove(self, entries: Sequence[CacheEntry]) -> None:
        """Take entries out, wherever each of them is."""
        for entry in entries:
            del self._queue[entry]

    def evict(self, entry: CacheEntry, num_blocks: int) -> None:
        """Remove it if all its blocks are evicted."""
        if num_blocks == entry.num_blocks:
            del self._queue[entry]

    def split(self, tail: CacheEntry, head: CacheEntry) -> None:
        """Append the head; a request that splits an entry holds the head at once."""
        self._queue[head] = None

    def victim(self, num_wanted: int = 0) -> CacheEntry | None:
        """Return the first entry, or the next that is a leaf where a copy of it was taken back."""
        return next((entry for entry in self._queue if entry.is_leaf), None)

    def check(self) -> None:
        """Assert that ticks never fall."""
        ticks = [entry.idle_tick for entry in self]
        assert ticks == sorted(ticks), f"entries out of order: {ticks}"


class BlockShares:
    """The port of who may take whose evictable blocks; by default, all from all.

    Shares keep the evictable entries, in one eviction policy or in several, and count blocks.
    ``ostinato.tenants`` gives tenants, named by ``Identity.owner``, guarantees and quotas.

    Attributes:
        num_evictable: Evictable blocks of all.
        are_limited: Whether free blocks alone do not say what a tenant may take.
    """

    are_limited = False

    def __init__(self, policy: EvictionPolicy) -> None:
        """Keep evictable entries in one policy."""
        self._policy = policy
        self.num_evictable = 0

    def policies(self) -> Iterable[EvictionPolicy]:
        """Return every policy."""
        return (self._policy,)

    def policy_of(self, tenant: bytes) -> EvictionPolicy:
        """Return the policy that keeps a tenant's entries."""
        return self._policy

    def add(self, entries: Sequence[CacheEntry], summary: RequestSummary | None) -> None:
        """Take entries of one request that have become evictable, tail first."""
        self._policy.add(entries, summary)
        for entry in entries:
            self.num_evictable += entry.num_blocks

    def remove(self, entries: Sequence[CacheEntry]) -> None:
        """Remove evictable entries that are held again."""
        self._policy.remove(entries)
        for entry in entries:
            self.num_evictable -= entry.num_blocks

    def shrink(self, entry: CacheEntry, num_blocks: int) -> None:
        """Note that an evictable entry is about to lose its last blocks."""
        self.num_evictable -= num_blocks
        self._policy.evict(entry, num_blocks)

    def recall(
        self, key: PrefixKey, first: int, most: int, block_size: int, summary: RequestSummary | None
    ) -> tuple[int, int]:
        """Tell what the policy of a sequence's tenant remembers, as ``EvictionPolicy.recall``."""
        return self.policy_of(key.identity.owner).recall(key, first, most, block_size, summary)

    def charge(self, tenant: bytes, num_blocks: int) -> None:
        """Note that a tenant was given blocks, or gave some back if that is negative."""

    def num_takeable(self, tenant: bytes) -> int:
        """Return how many evictable blocks a tenant may take."""
        return self.num_evictable

    def quota_victim(self, tenant: bytes, num_more: int) -> CacheEntry | None:
        """Return what a tenant's quota has it evict to have so many more blocks; None if nothing.

        None as well if nothing of its own is evictable.
        """
        return None

    def victim(self, tenant: bytes, num_wanted: int) -> CacheEntry | None:
        """Return the entry to evict for a tenant's next blocks."""
        return self._policy.victim(num_wanted)

    def takeable(self, victim: CacheEntry, tenant: bytes) -> int:
        """Return how many of a victim's blocks a tenant may take."""
        return self._policy.takeable(victim)

    def check(self, num_in_use: int) -> None:
        """Assert that policies and counts agree; so many blocks are not free."""
        self._policy.check()
        assert self.num_evictable == sum(entry.num_blocks for entry in self._policy)
        victim = self._policy.victim()
        assert victim is None or victim.is_leaf, "the victim has cached descendants"
