"""Who is next?

The queue keeps sequences by priority and arrival; one of the ``orders`` says which is tried next.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator

from ostinato.core.config import SchedulerConfig
from ostinato.sched.depth_first import DepthFirst
from ostinato.sched.fair_share import FairShare
from ostinato.sched.orders import (
    FirstComeFirstServed,
    LongestPrefixFirst,
    NumCachedTokens,
    WaitingOrder,
    by_arrival,
)
from ostinato.sched.sequence import Sequence


class WaitingQueue:
    """Sequences that wait, by priority and arrival, and the order they are tried in."""

    def __init__(self, config: SchedulerConfig, num_cached_tokens: NumCachedTokens) -> None:
        """Make an empty queue in the configured order."""
        self._waiting: list[Sequence] = []
        self._order = make_order(config, num_cached_tokens)

    def __len__(self) -> int:
        """Number of sequences that wait."""
        return len(self._waiting)

    def __iter__(self) -> Iterator[Sequence]:
        """Walk by priority and arrival."""
        return iter(self._waiting)

    def __contains__(self, sequence: Sequence) -> bool:
        """Whether a sequence waits."""
        place = bisect_left(self._waiting, sequence.rank, key=by_arrival)
        return place < len(self._waiting) and self._waiting[place] is sequence

    def add(self, sequence: Sequence) -> None:
        """Put a sequence in its place."""
        insort(self._waiting, sequence, key=by_arrival)

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out that goes away without being admitted."""
        place = bisect_left(self._waiting, sequence.rank, key=by_arrival)
        assert self._waiting[place] is sequence, "the sequence does not wait"
        del self._waiting[place]

    def admit(self, sequence: Sequence) -> None:
        """Take a sequence out that is admitted."""
        self.remove(sequence)
        self._order.admitted(sequence, self._waiting)

    def in_order(self) -> Iterator[Sequence]:
        """Walk those to try in this step, best first; the caller admits some on the way."""
        return self._order.walk(self._waiting)

    def planned(self, sequence: Sequence, num_tokens: int) -> None:
        """Note that a running sequence computes so many tokens in this step."""
        self._order.planned(sequence, num_tokens)


def make_order(config: SchedulerConfig, num_cached_tokens: NumCachedTokens) -> WaitingOrder:
    """Return the configured order, with nobody waiting."""
    match config.order:
        case "longest_prefix":
            return LongestPrefixFirst(config.max_overtakes, num_cached_tokens)
        case "depth_first":
            return DepthFirst(config.max_overtakes, num_cached_tokens)
        case "fair_share":
            return FairShare(config.max_overtakes)
        case "fcfs":
            return FirstComeFirstServed()
