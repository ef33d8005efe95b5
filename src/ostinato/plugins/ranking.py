"""The small port of waiting orders: a rank per waiting prompt.

A ``Ranking`` has ``rank(num_tokens, num_cached, num_waited)``; the lowest rank is tried first.
Priorities come before it, and no prompt is overtaken more than ``max_overtakes`` times.
"""

from collections.abc import Callable
from typing import Any, Protocol

from ostinato.core.ids import SequenceId
from ostinato.plugins.faults import FaultCounter
from ostinato.sched.sequence import Sequence
from ostinato.sched.waiting_queue import NumCachedTokens
from ostinato.scheduling.ranked_orders import RankedOrder


class Ranking(Protocol):
    """Ranks waiting prompts; constructed without arguments."""

    def rank(self, num_tokens: int, num_cached: int, num_waited: int) -> int:
        """Return the rank of a prompt: lower goes first, equals keep the order of arrival.

        Args:
            num_tokens: Its tokens.
            num_cached: Those of them that would hit now.
            num_waited: Later prompts that were admitted before it.
        """


class RankingOrder(RankedOrder):
    """Serve by priority, then by the rank of a plug-in."""

    def __init__(
        self,
        max_overtakes: int,
        num_cached_tokens: NumCachedTokens,
        make_ranking: Callable[[], Any],
        name: str,
    ) -> None:
        """Rank by a plug-in; its faults are logged under a name."""
        super().__init__(max_overtakes)
        self._num_cached_tokens, self._ranking = num_cached_tokens, make_ranking()
        self.faults = FaultCounter(name)

    def rank(self, waiting: list[Sequence]) -> dict[SequenceId, int]:
        """Rank each; one that cannot be ranked keeps its arrival's place."""
        return {sequence.sequence_id: self._rank(sequence) for sequence in waiting}

    def _rank(self, sequence: Sequence) -> int:
        counts = sequence.num_tokens, self._num_cached_tokens(sequence), sequence.num_overtakes
        return self.faults.call("rank", lambda: int(self._ranking.rank(*counts)), 0)
