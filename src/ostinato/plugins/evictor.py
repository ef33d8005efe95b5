"""The small port of eviction policies, and the policy that drives it.

An ``Evictor`` is told which cached entries have lost their last holder, and names the next victim.
An entry has ``ref_count`` and ``is_leaf``; what else it is, is not for the evictor to know.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from ostinato.cache.block import CacheEntry
from ostinato.cache.eviction import EvictionPolicy, RequestSummary, Victim
from ostinato.plugins.faults import FaultCounter


class Evictor(Protocol):
    """Chooses the next entry to evict among those without a holder; made without arguments."""

    def add(self, entries: list[Any]) -> None:
        """Add entries that one request released, its last block first."""

    def remove(self, entries: list[Any]) -> None:
        """Remove entries: they are held again, or evicted."""

    def victim(self) -> Any | None:
        """Return the entry to evict, a leaf; None if there is none."""


class EvictorPolicy(EvictionPolicy):
    """Asks an evictor; where its answer cannot be used, evicts what was released longest ago."""

    num_blocks = 0

    def __init__(self, make_evictor: Callable[[], Any], name: str) -> None:
        """Start without an entry; faults of the evictor are logged under a name."""
        self._evictor = make_evictor()
        self._queue: OrderedDict[CacheEntry, None] = OrderedDict()
        self.faults = FaultCounter(name)

    def __iter__(self) -> Iterator[CacheEntry]:
        """Iterate, least recently released first."""
        return iter(self._queue)

    def add(self, entries: Sequence[CacheEntry], summary: RequestSummary | None) -> None:
        """Pass entries on."""
        for entry in entries:
            self._queue[entry] = None
            self.num_blocks += entry.num_blocks
        self.faults.call("add", lambda: self._evictor.add(list(entries)), None)

    def remove(self, entries: Sequence[CacheEntry]) -> None:
        """Pass entries on that are held again."""
        for entry in entries:
            del self._queue[entry]
            self.num_blocks -= entry.num_blocks
        self.faults.call("remove", lambda: self._evictor.remove(list(entries)), None)

    def evict(self, entry: CacheEntry, num_blocks: int) -> None:
        """Remove an entry if it loses all its blocks."""
        self.num_blocks -= num_blocks
        if num_blocks == entry.num_blocks:
            del self._queue[entry]
            self.faults.call("remove", lambda: self._evictor.remove([entry]), None)

    def split(self, tail: CacheEntry, head: CacheEntry) -> None:
        """Add the head, which is held at once."""
        self._queue[head] = None
        self.faults.call("add", lambda: self._evictor.add([head]), None)

    def victim(self, num_needed: int = 0) -> Victim | None:
        """Return the evictor's choice, if it is an evictable leaf."""
        if not self._queue:
            return None
        choice: Any = self.faults.call("victim", self._evictor.victim, None)
        if isinstance(choice, CacheEntry) and choice in self._queue and choice.is_leaf:
            return choice, choice.num_blocks
        self.faults.note("victim", f"returns {choice!r:.60}, which is no evictable leaf")
        return next(((entry, entry.num_blocks) for entry in self if entry.is_leaf), None)

    def check(self) -> None:
        """Assert that blocks are counted."""
        assert self.num_blocks == sum(entry.num_blocks for entry in self._queue), "miscounted"
