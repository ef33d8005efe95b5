"""What a policy that learns tells the ghost."""

from typing import Protocol, runtime_checkable

from ostinato.cache.eviction import RequestSummary


@runtime_checkable
class LearnedPolicy(Protocol):
    """What a policy that learns from the whole traffic can tell of it."""

    @property
    def lru_lead(self) -> int:
        """Blocks that hit and would have missed under LRU, less the opposite."""

    def request_class(self, summary: RequestSummary) -> int:
        """Return the class of what a request releases, uses left out."""

    def row_of(self, request_class: int, uses: int) -> int:
        """Return where the index of a block's class begins."""

    def worth(self, row: int, age_s: float) -> float:
        """Return what a block is worth that was released so long ago."""
