"""The port of waiting orders, the table of all live sequences, and counters of both.

Priority comes first in every order: a lower number is served earlier. Within one priority the
default is by arrival; orders that look at cached prefixes or at tenants are in
``ostinato.scheduling``.
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from operator import attrgetter
from typing import NamedTuple

from ostinato.cache.block_table import BlockTable
from ostinato.cache.manager import CacheManager
from ostinato.core.ids import RequestId, SequenceId
from ostinato.core.request import FinishReason
from ostinato.sched.sequence import Sequence


@dataclass(slots=True)
class SchedulerStats:
    """Counters since the start."""

    num_steps: int = 0  # steps that ran, failed ones included
    num_failed_steps: int = 0  # steps whose forward pass raised
    num_preemptions: int = 0  # times that a running sequence was preempted
    computed_prompt_tokens: int = 0  # prompt tokens that went through the model
    computed_output_tokens: int = 0  # generated tokens that went through the model
    waited_prompt_tokens: int = 0
    """Prompt tokens that hit in whole blocks at first admission, but were not there when the
    request came: another computed them meanwhile (single flight)."""

    def count_computed(self, start: int, stop: int, num_prompt_tokens: int) -> None:
        """Count the computed tokens of one sequence, positions ``start .. stop``."""
        prompt = max(0, min(stop, num_prompt_tokens) - start)
        self.computed_prompt_tokens += prompt
        self.computed_output_tokens += stop - start - prompt


NumCachedTokens = Callable[[Sequence], int]
"""Returns how many tokens of a sequence would hit now; without effects."""


class StepRoom(NamedTuple):
    """The tokens and sequences that decodes leave for prompts in a step."""

    num_tokens: int  # that may be computed
    num_seats: int  # sequences that may be admitted


class WaitingOrder:
    """The port of waiting orders: ranks waiting sequences, and bounds a prompt's share of a step.

    By default they are tried by priority, then by arrival, and take all that is left.
    """

    def divide(
        self, prefilling: list[Sequence], waiting: list[Sequence], room: StepRoom
    ) -> dict[SequenceId, int]:
        """Return the most tokens that prompts may take of a step, of those that are limited.

        Called once per step; both lists are by priority and arrival.
        """
        return {}

    def candidates(self, waiting: list[Sequence]) -> Iterator[Sequence]:
        """Walk the sequences to try now, best first; the caller admits some of them on the way.

        Called once per step, also if none can be admitted; what ranking costs is spent when
        the first one is asked for.

        Args:
            waiting: All that wait, by priority and arrival.
        """
        return iter(waiting[:])

    def admitted(self, sequence: Sequence, waiting: list[Sequence]) -> None:
        """Note which sequence was admitted, and which still wait."""

    def planned(self, sequence: Sequence, num_tokens: int) -> None:
        """Note that a running sequence computes ``num_tokens`` tokens in this step."""


MakeOrder = Callable[[NumCachedTokens], WaitingOrder]
"""Makes an order, given a look-up that it may use."""


class FirstComeFirstServed(WaitingOrder):
    """Serve by priority, then by arrival; a preempted sequence keeps its place."""


by_arrival = attrgetter("rank")
"""What the waiting are sorted by: priority, then arrival."""


class Branch(NamedTuple):
    """The continuation of a searched sequence in the next step."""

    parent: Sequence  # whose tokens it has
    sequence: Sequence  # the parent, or what is to be forked from it
    token_id: int  # what follows


class RequestTable:
    """Every live sequence; the one place where one changes between waiting, running and ended.

    Attributes:
        live: By request: those that wait, run, or are about to.
        waiting: Those that hold no blocks, by priority and arrival.
        running: Those that hold blocks, in the order in which they came to hold them.
        branches: How sequences of searches go on; forks of a parent come before itself.
        forked: Parents and forks of the step that is planned or runs; they keep their blocks.
        order: In which the waiting are tried.
        cache: Whose blocks they hold.
        stats: Counters of the scheduler since the start.
    """

    def __init__(self, cache: CacheManager, order: WaitingOrder) -> None:
        """Start without a request."""
        self.live: dict[RequestId, list[Sequence]] = {}
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.branches: list[Branch] = []
        self.forked: list[Sequence] = []
        self.order = order
        self.cache = cache
        self.stats = SchedulerStats()

    def enter(self, sequence: Sequence) -> None:
        """Let the first sequence of a request wait."""
        self.live[sequence.request.request_id] = [sequence]
        insort(self.waiting, sequence, key=by_arrival)

    def wait(self, sequence: Sequence) -> None:
        """Put a live sequence in its place among the waiting."""
        insort(self.waiting, sequence, key=by_arrival)

    def admit(self, sequence: Sequence, table: BlockTable) -> None:
        """Move a waiting sequence to the running, with its blocks."""
        was_waiting = self._stop_waiting(sequence)
        assert was_waiting, "the sequence does not wait"
        self.order.admitted(sequence, self.waiting)
        sequence.table, sequence.num_computed = table, table.num_computed  # what hit
        self.running.append(sequence)

    def run(self, sequence: Sequence, table: BlockTable) -> None:
        """Let a sequence run that waits for nothing."""
        sequence.table = table
        self.running.append(sequence)

    def preempt(self, sequence: Sequence) -> None:
        """Take a running sequence's blocks back; what is computed stays findable.

        One that has its sample waits for its siblings alone.
        """
        self._release(sequence)
        self.stats.num_preemptions += 1
        sequence.num_preemptions += 1
        if sequence.sampled is None:
            self.wait(sequence)

    def requeue_forked(self) -> None:
        """Let forks and their parents wait, whose blocks the cache has released."""
        for sequence in dict.fromkeys(self.forked):
            sequence.table, sequence.num_computed = None, 0
            self.running.remove(sequence)
            self.wait(sequence)
        self.forked = []

    def finish(self, sequence: Sequence, reason: FinishReason) -> None:
        """End a sequence; its blocks are released, if it has any.

        Of a search's many ends no tails are kept: its whole blocks may still hit.
        """
        if sequence.table is not None:
            self._release(sequence, seals=sequence.request.search is None)
        else:
            self._stop_waiting(sequence)
        self._end(sequence, reason)

    def fail(self, sequence: Sequence, reason: FinishReason) -> None:
        """End a sequence whose blocks the cache has released."""
        if sequence.table is not None:
            sequence.table = None
            self.running.remove(sequence)
        self._end(sequence, reason)

    def _stop_waiting(self, sequence: Sequence) -> bool:
        """Remove a sequence from the waiting; False if it is not among them."""
        place = bisect_left(self.waiting, sequence.rank, key=by_arrival)
        waits = self.waiting[place : place + 1] == [sequence]
        if waits:
            del self.waiting[place]
        return waits

    def _release(self, sequence: Sequence, seals: bool = True) -> None:
        assert sequence.table is not None
        if sequence.num_computed > sequence.table.num_planned:  # drafts were right
            self.cache.advance(sequence.table, sequence.num_computed)
        kept = sequence.num_computed
        kept -= 0 if seals else kept % self.cache.block_size
        self.cache.release(sequence.table, kept, sequence.num_output_tokens)
        sequence.table, sequence.num_computed = None, 0
        self.running.remove(sequence)

    def _end(self, sequence: Sequence, reason: FinishReason) -> None:
        """Forget a sequence; its request is live while it has another."""
        sequence.finish_reason = reason
        live = self.live[sequence.request.request_id]
        live.remove(sequence)
        if not live:
            del self.live[sequence.request.request_id]
