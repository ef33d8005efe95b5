"""The names of the port of eviction policies, as policies import them."""

from collections.abc import Sequence

from ostinato.cache import eviction
from ostinato.cache.block import CacheEntry
from ostinato.cache.eviction import Recall
from ostinato.cache.eviction import RequestSummary as Turn


class EvictionPolicy(eviction.EvictionPolicy):
    """A policy that takes entries one by one."""

    def add(self, entry: CacheEntry, turn: Turn | None) -> None:
        """Take an entry."""

    def remove(self, entry: CacheEntry) -> None:
        """Remove an entry that is held again."""

    def add_all(self, entries: Sequence[CacheEntry], turn: Turn | None) -> None:
        """Take entries one by one."""
        for entry in entries:
            self.add(entry, turn)

    def remove_all(self, entries: Sequence[CacheEntry]) -> None:
        """Remove entries one by one."""
        for entry in entries:
            self.remove(entry)


__all__ = ["EvictionPolicy", "Recall", "Turn"]
