"""Single flight: whose prefix is being computed right now?

A request whose prompt a running prefill is about to compute waits for it instead of computing the
same tokens (law 1). Nothing about the wait is stored: the question is asked anew in every step, of
the sequences that run in it. If a leader is cancelled, fails or is preempted, it is no longer
asked, and its followers go on by themselves; so no sequence waits for one that makes no progress.

Within one step no question is needed: blocks are findable from the moment they are planned,
so a follower of a prompt that is finished in this step shares the step. Nor is there one without
``max_chunk_tokens``: a prefill that goes on has taken all that was left of the budget, and
no other sequence is admitted beside it.
"""

from ostinato.cache.prefix_index import PrefixMatch
from ostinato.sched.sequence import Sequence


class SingleFlight:
    """The prefills that will go on after this step."""

    def __init__(self, block_size: int) -> None:
        """Start a step with no prefill in flight."""
        self._block_size = block_size
        self._leaders: list[tuple[Sequence, int]] = []

    def add(self, sequence: Sequence, num_planned: int) -> None:
        """Note a running sequence that has computed so many tokens after this step."""
        table = sequence.table
        if table is not None and table.writes and num_planned < sequence.num_tokens:
            self._leaders.append((sequence, num_planned // self._block_size * self._block_size))

    def leader(self, sequence: Sequence, match: PrefixMatch) -> Sequence | None:
        """Find a prefill that will publish more of a prompt than is cached now.

        Returns:
            The sequence to wait for; None if there is none.

        Cost: O(prefills in flight) comparisons of packed tokens.
        """
        if not sequence.reads_cache:
            return None
        for leader, published in self._leaders:
            # What the leader has behind it may be evicted from a window: no use in waiting.
            if self._num_to_hit(leader, sequence) > max(match.num_tokens, published):
                return leader
        return None

    def _num_to_hit(self, leader: Sequence, sequence: Sequence) -> int:
        """Count the tokens that a sequence will find once its leader is computed."""
        published = leader.num_tokens // self._block_size * self._block_size
        common = leader.key.num_common_tokens(sequence.key)
        most = min(common, published, sequence.num_tokens - 1)
        start = most // self._block_size * self._block_size
        return start + sequence.key.num_text_tokens(start, most)  # only text is copied
