"""The waiting queue, and the port of waiting orders: which sequence is tried next?

Priority comes first in every order: a lower number is served earlier. Within one priority the
default is by arrival; orders that look at cached prefixes or at tenants are in
``ostinato.scheduling``. In all of them the scheduler passes over sequences that wait for a running
prefill (``single_flight``).
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from typing import Protocol

from ostinato.sched.sequence import Sequence

NumCachedTokens = Callable[[Sequence], int]
"""Returns how many tokens of a sequence would hit now; without effects."""


class WaitingOrder(Protocol):
    """In which order are waiting sequences tried?"""

    def walk(self, waiting: list[Sequence]) -> Iterator[Sequence]:
        """Walk the sequences to try now, best first; the caller admits some of them on the way.

        Called once per step, also if none can be admitted; what ranking costs is spent when
        the first one is asked for.

        Args:
            waiting: All that wait, by priority and arrival.
        """

    def admitted(self, sequence: Sequence, waiting: list[Sequence]) -> None:
        """Note which sequence was admitted, and which still wait."""
        return None

    def planned(self, sequence: Sequence, num_tokens: int) -> None:
        """Note that a running sequence computes so many tokens in this step."""
        return None


MakeOrder = Callable[[NumCachedTokens], WaitingOrder]
"""Makes an order, given a look-up that it may use."""


class FirstComeFirstServed(WaitingOrder):
    """Serve by priority, then by arrival; a preempted sequence keeps its place."""

    def walk(self, waiting: list[Sequence]) -> Iterator[Sequence]:
        """Walk all as they stand."""
        return iter(waiting[:])


def by_arrival(sequence: Sequence) -> tuple[int, int]:
    """Return what the queue is sorted by: priority, then arrival."""
    return sequence.rank


class WaitingQueue:
    """Sequences that wait, by priority and arrival, and the order they are tried in."""

    def __init__(self, order: WaitingOrder) -> None:
        """Make an empty queue."""
        self._waiting: list[Sequence] = []
        self._order = order

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
