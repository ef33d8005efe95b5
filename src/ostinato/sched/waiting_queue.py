"""The waiting queue with the port of waiting orders, and the table of all live sequences.

::

    enter ──► waiting ──admit──► running ──leave──► ended
                 ▲                  │
                 └─────preempt──────┘

Priority comes first in every order: a lower number is served earlier. Within one priority the
default is by arrival; orders that look at cached prefixes or at tenants are in
``ostinato.scheduling``. In all of them the step planner passes over sequences that wait for a
running prefill.
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from typing import Protocol

from ostinato.cache.block_table import BlockTable
from ostinato.cache.manager import CacheManager
from ostinato.core.ids import RequestId
from ostinato.core.request import FinishReason
from ostinato.sched.sequence import Sequence
from ostinato.sched.stats import SchedulerStats

NumCachedTokens = Callable[[Sequence], int]
"""Returns how many tokens of a sequence would hit now; without effects."""


class WaitingOrder(Protocol):
    """In which order are waiting sequences tried?"""

    def candidates(self, waiting: list[Sequence]) -> Iterator[Sequence]:
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

    def candidates(self, waiting: list[Sequence]) -> Iterator[Sequence]:
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
        self.planned = order.planned

    def __len__(self) -> int:
        """Number of sequences that wait."""
        return len(self._waiting)

    def __iter__(self) -> Iterator[Sequence]:
        """Walk by priority and arrival."""
        return iter(self._waiting)

    def __contains__(self, sequence: Sequence) -> bool:
        """Whether a sequence waits."""
        place = self._place_of(sequence)
        return place < len(self._waiting) and self._waiting[place] is sequence

    def add(self, sequence: Sequence) -> None:
        """Put a sequence in its place."""
        insort(self._waiting, sequence, key=by_arrival)

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out that ends without being admitted."""
        place = self._place_of(sequence)
        assert self._waiting[place] is sequence, "the sequence does not wait"
        del self._waiting[place]

    def admit(self, sequence: Sequence) -> None:
        """Take a sequence out that is admitted."""
        self.remove(sequence)
        self._order.admitted(sequence, self._waiting)

    def in_order(self) -> Iterator[Sequence]:
        """Walk those to try in this step, best first; the caller admits some on the way."""
        return self._order.candidates(self._waiting)

    def _place_of(self, sequence: Sequence) -> int:
        return bisect_left(self._waiting, sequence.rank, key=by_arrival)


class RequestTable:
    """Every live sequence; the one place where one changes between waiting, running and ended.

    Attributes:
        live: By request: those that wait, run, or are about to.
        waiting: Those that hold no blocks.
        running: Those that hold blocks, in the order in which they came to hold them.
    """

    def __init__(self, cache: CacheManager, stats: SchedulerStats, order: WaitingOrder) -> None:
        """Start without a request; ``stats`` counts preemptions."""
        self.live: dict[RequestId, list[Sequence]] = {}
        self.waiting = WaitingQueue(order)
        self.running: list[Sequence] = []
        self._cache = cache
        self._stats = stats

    def enter(self, sequence: Sequence) -> None:
        """Let the first sequence of a request wait."""
        self.live[sequence.request.request_id] = [sequence]
        self.waiting.add(sequence)

    def admit(self, sequence: Sequence, table: BlockTable) -> None:
        """Move a waiting sequence to the running, with its blocks."""
        self.waiting.admit(sequence)
        self.run(sequence, table)
        sequence.num_computed = table.num_planned  # what hit

    def run(self, sequence: Sequence, table: BlockTable) -> None:
        """Let a sequence run that waits for nothing."""
        sequence.table = table
        self.running.append(sequence)

    def preempt(self, sequence: Sequence) -> None:
        """Take a running sequence's blocks back; what is computed stays findable."""
        self._release(sequence)
        self._stats.num_preemptions += 1
        sequence.num_preemptions += 1
        self.waiting.add(sequence)

    def leave(self, sequence: Sequence, reason: FinishReason) -> None:
        """End a sequence; its blocks are released, if it has any."""
        if sequence.table is not None:
            self._release(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
        self._end(sequence, reason)

    def fail(self, sequence: Sequence, reason: FinishReason) -> None:
        """End a sequence whose blocks the cache has taken back."""
        if sequence.table is not None:
            sequence.table = None
            self.running.remove(sequence)
        self._end(sequence, reason)

    def _release(self, sequence: Sequence) -> None:
        assert sequence.table is not None
        self._cache.release(sequence.table, sequence.num_computed, sequence.num_output_tokens)
        sequence.table, sequence.num_computed = None, 0
        self.running.remove(sequence)

    def _end(self, sequence: Sequence, reason: FinishReason) -> None:
        """Forget a sequence; its request is live while it has another."""
        sequence.finish_reason = reason
        live = self.live[sequence.request.request_id]
        live.remove(sequence)
        if not live:
            del self.live[sequence.request.request_id]
