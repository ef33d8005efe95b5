"""The contract every eviction policy keeps.

A policy keeps the entries that nobody holds, radix nodes or blocks of the hash index. The pool
tells it what comes and goes, and asks it for a victim when scratch blocks have run out::

    add ──► (evictable) ──remove──► held again: the entry was used
                 │  ▲
              evict └─ split, expose
                 ▼
             forgotten ──recall──► published anew: it was wanted after all

Only policies that set ``remembers`` are asked to ``recall``; the others pay nothing for it.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from ostinato.cache.block import CacheEntry
from ostinato.core.identity import PrefixKey


@dataclass(slots=True)
class Turn:
    """What is known of the request that lets go of an entry.

    Attributes:
        gap_s: Seconds since the deepest content that it found, cached or evicted, was last let
            go of: the time since its conversation's previous turn. None if it found none, or
            one that many share.
        num_new_blocks: Blocks it published that were never cached before, as far as is known.
        num_output_tokens: Tokens that were generated for it.
        recalled: What the policy remembers of what it asked for and did not find; its own.
    """

    gap_s: float | None = None
    num_new_blocks: int = 0
    num_output_tokens: int = 0
    recalled: list[Any] = field(default_factory=list)


@dataclass(slots=True)
class Recall:
    """What a policy remembers of content that is published.

    Attributes:
        num_blocks: Blocks that this is true of.
        uses: How often they were in use before they were evicted; 0 if they are new.
        idle_since_s: When they were last let go of; None if they are new.
    """

    num_blocks: int
    uses: int = 0
    idle_since_s: float | None = None


class EvictionPolicy(Protocol):
    """The contract every policy keeps.

    Entries of one request arrive tail first. The victim is always a leaf: nothing cached
    builds on it (law 8).

    Attributes:
        remembers: Whether it wants to be asked about what is published.
        joins: Whether what a request adds to an entry that it alone holds may become part of it:
            it goes by the moment alone at which they are let go of.
    """

    remembers: bool
    joins: bool

    def add(self, entry: CacheEntry, turn: Turn | None) -> None:
        """Take an entry that nobody holds any more, and what is known of its last holder."""

    def remove(self, entry: CacheEntry) -> None:
        """Let go of an entry that is held again."""

    def add_all(self, entries: Sequence[CacheEntry], turn: Turn | None) -> None:
        """Take all entries of one request, tail first; one by one unless it knows better."""
        for entry in entries:
            self.add(entry, turn)

    def remove_all(self, entries: Sequence[CacheEntry]) -> None:
        """Let go of entries that are held again; one by one unless it knows better."""
        for entry in entries:
            self.remove(entry)

    def evict(self, entry: CacheEntry, num_blocks: int) -> None:
        """Note that an entry is about to lose its last blocks; if all, let go of it."""

    def split(self, tail: CacheEntry, head: CacheEntry) -> None:
        """Take ``head``, which was the first part of ``tail`` until now."""

    def expose(self, entry: CacheEntry) -> None:
        """Note that nothing builds on an entry any more: it is a leaf from now on."""

    def look_up(self, key: PrefixKey, first: int, last: int, block_size: int, turn: Turn) -> None:
        """Note that a request asks for ``last`` blocks, and those from ``first`` on are missing.

        Called once per request, when it holds what it found and before anything is evicted.
        """

    def recall(
        self, key: PrefixKey, first: int, most: int, block_size: int, turn: Turn | None
    ) -> Recall:
        """Say what is remembered of blocks ``first ..`` of a sequence, now published anew."""

    def forget(self, belongs: Callable[[CacheEntry], bool]) -> None:
        """Remember nothing of evicted entries that belong to something."""

    def victim(self, num_wanted: int = 0) -> CacheEntry | None:
        """Name the leaf to evict next; None if there is no entry.

        Args:
            num_wanted: Blocks that will be evicted in a row, if that is known.
        """

    def takeable(self, victim: CacheEntry) -> int:
        """Say how many of its victim's blocks may go before it names another."""

    def __iter__(self) -> Iterator[CacheEntry]:
        """Walk all entries, those released longest ago first."""

    def check(self) -> None:
        """Assert the policy's invariants."""
