"""How much fits into a step?"""


class TokenBudget:
    """Tokens that may still be planned in this step.

    Decodes are served first and number at most ``max_num_seqs``, which is no more than the
    budget: so they never starve, and a prefill gets what they leave (chunked prefill,
    Sarathi, arXiv 2308.16369).
    """

    __slots__ = ("_max_chunk", "left")

    def __init__(self, max_tokens: int, max_chunk_tokens: int | None = None) -> None:
        """Start a step; without a limit on chunks one sequence may take all."""
        self.left = max_tokens
        self._max_chunk = max_tokens if max_chunk_tokens is None else max_chunk_tokens

    @property
    def most(self) -> int:
        """Most tokens that the next sequence could get."""
        return min(self.left, self._max_chunk)

    def take(self, num_tokens: int) -> int:
        """Take up to so many tokens for one sequence; return how many it gets."""
        taken = min(num_tokens, self.most)
        self.left -= taken
        return taken

    def give_back(self, num_tokens: int) -> None:
        """Return the tokens of a sequence that was planned and then preempted."""
        self.left += num_tokens
