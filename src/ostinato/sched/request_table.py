"""The request table: which sequences are live, and which of them hold blocks.

::

    enter ──► waiting ──admit──► running ──leave──► ended
                 ▲                  │
                 └─────preempt──────┘

The one place where a sequence changes between these states; the scheduler decides when.
"""

from ostinato.cache.block_table import BlockTable
from ostinato.cache.manager import CacheManager
from ostinato.core.ids import RequestId
from ostinato.core.request import FinishReason
from ostinato.sched.sequence import Sequence
from ostinato.sched.stats import SchedulerStats
from ostinato.sched.waiting_queue import WaitingOrder, WaitingQueue


class RequestTable:
    """Every live sequence.

    Attributes:
        live: By request: those that wait, run, or are about to.
        waiting: Those that hold no blocks.
        running: Those that hold blocks, in the order in which they came to hold them.
    """

    def __init__(
        self,
        cache: CacheManager,
        stats: SchedulerStats,
        order: WaitingOrder,
    ) -> None:
        """Start without a request.

        Args:
            cache: Where blocks are released.
            stats: Counts preemptions.
            order: In which waiting sequences are tried.
        """
        self.waiting = WaitingQueue(order)
        self.running: list[Sequence] = []
        self._cache = cache
        self._stats = stats
        self.live: dict[RequestId, list[Sequence]] = {}

    def __contains__(self, request_id: RequestId) -> bool:
        """Whether a request of that id is live."""
        return request_id in self.live

    def __bool__(self) -> bool:
        """Whether any request is live."""
        return bool(self.live)

    def of(self, request_id: RequestId) -> list[Sequence]:
        """List a request's live sequences; none of an unknown id."""
        return list(self.live.get(request_id, ()))

    def enter(self, sequence: Sequence) -> None:
        """Let the first sequence of a request wait."""
        self.live[sequence.request.request_id] = [sequence]
        self.waiting.add(sequence)

    def join(self, forks: list[Sequence]) -> None:
        """Note a live request's further sequences, which neither wait nor run yet."""
        for fork in forks:
            self.live[fork.request.request_id].append(fork)

    def admit(self, sequence: Sequence, table: BlockTable) -> None:
        """Move a waiting sequence to the running, with its blocks."""
        self.waiting.admit(sequence)
        self.run(sequence, table)
        sequence.num_computed = table.num_cached_tokens

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
        """End a sequence; its blocks are given back, if it has any."""
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
        """Give a running sequence's blocks back."""
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
