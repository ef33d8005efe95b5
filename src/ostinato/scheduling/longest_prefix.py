"""Longest cached prefix first, and what all ranked orders share.

Prefixes are used while they are there (RadixAttention's cache-aware order, arXiv 2312.07104).
"""

from bisect import bisect_left
from collections.abc import Iterator

from ostinato.core.ids import SequenceId
from ostinato.sched.sequence import Sequence
from ostinato.sched.waiting_queue import NumCachedTokens, WaitingOrder, by_arrival

MAX_RANKED = 512
"""Sequences that a ranked order looks at in one step, by arrival; each costs a look-up."""


class RankedOrder(WaitingOrder):
    """Serve by priority, then by a rank of this step, within the bound on waiting.

    No sequence is overtaken more than ``max_overtakes`` times: after that it goes before all that
    arrived later. Looks at the first ``MAX_RANKED`` by arrival.
    """

    def __init__(self, max_overtakes: int) -> None:
        """Start with no sequence overdue."""
        self._max_overtakes = max_overtakes
        self._has_newly_overdue = False

    def rank(self, waiting: list[Sequence]) -> dict[SequenceId, int]:
        """Rank waiting requests: lower goes first, and equals, here all, keep their order."""
        return {sequence.sequence_id: 0 for sequence in waiting}

    def candidates(self, waiting: list[Sequence]) -> Iterator[Sequence]:
        """Walk the overdue by arrival, then the others by rank.

        A sequence that becomes overdue on the way is next: the bound holds within a step as well.
        """
        left = waiting[:MAX_RANKED]
        if len(left) < 2:  # there is nothing to rank
            yield from left
            return
        ranks = self.rank(left)

        def place(sequence: Sequence) -> tuple[int, bool, int, int]:
            on_time = sequence.num_overtakes < self._max_overtakes
            rank = ranks[sequence.sequence_id] if on_time else 0
            return sequence.request.priority, on_time, rank, sequence.sequence_id

        self._has_newly_overdue = True
        while left:
            if self._has_newly_overdue:
                left.sort(key=place, reverse=True)
                self._has_newly_overdue = False
            yield left.pop()

    def admitted(self, sequence: Sequence, waiting: list[Sequence]) -> None:
        """Count an overtake for every waiting sequence that arrived before it."""
        for other in waiting[: bisect_left(waiting, sequence.rank, key=by_arrival)]:
            other.num_overtakes += 1
            if other.num_overtakes == self._max_overtakes:
                self._has_newly_overdue = True


class LongestPrefixFirst(RankedOrder):
    """Serve by priority, then by cached prefix, within the bound on waiting."""

    def __init__(self, max_overtakes: int, num_cached_tokens: NumCachedTokens) -> None:
        """Rank by a look-up that has no effects."""
        super().__init__(max_overtakes)
        self._num_cached_tokens = num_cached_tokens

    def rank(self, waiting: list[Sequence]) -> dict[SequenceId, int]:
        """Rank by what would hit now; cost: one look-up each."""
        return {s.sequence_id: -self._num_cached_tokens(s) for s in waiting}
