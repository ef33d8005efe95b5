"""The contract that every eviction policy keeps.

A policy keeps the entries that no request holds, radix nodes or blocks of the hash index. The pool
tells it what comes and goes, and asks it for a victim when free blocks without content have run
out::

    add_all ──► (evictable) ──remove_all──► held again: the entry was used
                    │  ▲
                 evict └─ split, expose
                    ▼
                evicted ──recall──► published anew: it was wanted after all

Only policies that set ``remembers`` are asked to ``recall``; the others pay nothing for it.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from ostinato.cache.block import CacheEntry
from ostinato.cache.policies.ghost_list import EvictedRun
from ostinato.core.identity import PrefixKey


@dataclass(slots=True)
class Turn:
    """What is known of the request that releases an entry.

    Attributes:
        gap_s: Seconds since the deepest content that it found, cached or evicted, was last
            released: the time since its conversation's previous turn. None if it found none, or
            one that many share.
        num_new_blocks: Blocks it published that were never cached before, as far as is known.
        num_output_tokens: Tokens that were generated for it.
        recalled: What the policy remembers of what it asked for and did not find.
    """

    gap_s: float | None = None
    num_new_blocks: int = 0
    num_output_tokens: int = 0
    recalled: list[EvictedRun[Any]] = field(default_factory=list)


@dataclass(slots=True)
class Recall:
    """What a policy remembers of content that is published.

    Attributes:
        num_blocks: Blocks that this is true of.
        uses: How often they were in use before they were evicted; 0 if they are new.
        idle_since_s: When they were last released; None if they are new.
    """

    num_blocks: int
    uses: int = 0
    idle_since_s: float | None = None


class EvictionPolicy(Protocol):
    """The contract every policy keeps; what a policy does not override learns nothing.

    Entries of one request arrive tail first. The victim is always a leaf: nothing cached
    builds on it (law 8).

    Attributes:
        remembers: Whether it wants to be asked about what is published.
        joins: Whether what a request adds to an entry that it alone holds may become part of it:
            the policy ranks by the time of release alone.
    """

    remembers: bool = False
    joins: bool = False

    def add_all(self, entries: Sequence[CacheEntry], turn: Turn | None) -> None:
        """Take the entries of one request that no request holds any more, tail first.

        Args:
            entries: At least one.
            turn: What is known of the request; None if it was none.
        """

    def remove_all(self, entries: Sequence[CacheEntry]) -> None:
        """Remove entries that are held again; at least one."""

    def add(self, entry: CacheEntry, turn: Turn | None) -> None:
        """Take one entry."""
        self.add_all((entry,), turn)

    def remove(self, entry: CacheEntry) -> None:
        """Remove one entry that is held again."""
        self.remove_all((entry,))

    def evict(self, entry: CacheEntry, num_blocks: int) -> None:
        """Note that an entry is about to lose its last blocks; if all, remove it."""

    def split(self, tail: CacheEntry, head: CacheEntry) -> None:
        """Take ``head``, which was the first part of ``tail`` until now."""

    def expose(self, entry: CacheEntry) -> None:
        """Note that nothing builds on an entry any more: it is a leaf from now on."""
        return None

    def look_up(self, key: PrefixKey, first: int, last: int, block_size: int, turn: Turn) -> None:
        """Note that a request asks for ``last`` blocks, and those from ``first`` on are missing.

        Called once per request, when it holds what it found and before anything is evicted.
        """
        return None

    def recall(
        self, key: PrefixKey, first: int, most: int, block_size: int, turn: Turn | None
    ) -> Recall:
        """Say what is remembered of blocks ``first ..`` of a sequence, now published anew."""
        return Recall(most)

    def forget(self, belongs: Callable[[CacheEntry], bool]) -> None:
        """Remember nothing of evicted entries that belong to something."""
        return None

    def victim(self, num_wanted: int = 0) -> CacheEntry | None:
        """Name the leaf to evict next; None if there is no entry.

        Args:
            num_wanted: Blocks that will be evicted in a row, if that is known.
        """

    def takeable(self, victim: CacheEntry) -> int:
        """Say how many of its victim's blocks may be evicted before it names another."""
        return victim.num_blocks

    def __iter__(self) -> Iterator[CacheEntry]:
        """Walk all entries, those released longest ago first."""

    def check(self) -> None:
        """Assert the policy's invariants."""


PolicyFactory = Callable[[int, Callable[[], float]], EvictionPolicy]
"""Makes a policy for a pool of so many blocks, with a clock whose seconds never fall."""


@runtime_checkable
class LearnedPolicy(Protocol):
    """What a policy that learns from the whole traffic can tell of it."""

    @property
    def lru_lead(self) -> int:
        """Blocks that hit and would have missed under LRU, less the opposite."""

    def request_class(self, turn: Turn) -> int:
        """Return the class of what a request releases, uses left out."""

    def row_of(self, request_class: int, uses: int) -> int:
        """Return where the index of a block's class begins."""

    def worth(self, row: int, age_s: float) -> float:
        """Return what a block is worth that was released so long ago."""
