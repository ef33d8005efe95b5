"""At which few positions of a prompt a state is saved, for later prompts that branch off there.

Where prompts branch off is learnt from earlier ones, in depths of ``unit`` tokens. Of all ways to
place n checkpoints, the best one computes the least again in expectation: a dynamic program
over depths finds it.

Source: sparse checkpoints by expected overlap, arXiv 2605.05219.
"""

from collections.abc import Sequence
from math import inf

_MAX_DEPTHS = 24
"""Depths that are considered for one prompt."""

_MIN_SHARE = 1 / 16
"""Share of all branches that must begin at a depth to make it worth a checkpoint."""

_HALF_LIFE = 512
"""Branches after which an earlier one counts half."""


class Placement:
    """Learns where prompts branch off, and chooses where to keep states.

    Attributes:
        budget: Checkpoints that one prompt may have besides those at its end and where it branches
            off.
    """

    def __init__(self, budget: int) -> None:
        """Start without a branch."""
        self.budget = budget
        self._weights: dict[int, float] = {}
        self._weight_of_next = 1.0

    def learn(self, depth: int) -> None:
        """Note that a prompt branched off at a depth; later ones weigh more."""
        self._weight_of_next *= 2 ** (1 / _HALF_LIFE)
        self._weights[depth] = self._weights.get(depth, 0.0) + self._weight_of_next
        if self._weight_of_next > 2**40 or len(self._weights) > 1024:
            self._shrink()

    def choose(self, first: int, last: int, has_unused: bool) -> list[int]:
        """Choose depths ``first .. last`` to keep the states of.

        Args:
            first: First depth that will be computed.
            last: The last one.
            has_unused: Whether there are slots without content: then, if nothing is known of these
                depths, prompts are assumed to branch off anywhere. Otherwise a checkpoint evicts
                another one, and only a depth at which many branch off is worth that.
        """
        if self.budget < 1 or last <= first:
            return []
        min_weight = _MIN_SHARE * sum(self._weights.values())
        known = [(d, w) for d, w in self._weights.items() if first <= d <= last and w >= min_weight]
        if not known and has_unused:
            step = max(1, (last - first + 1) // _MAX_DEPTHS)
            known = [(depth, 1.0) for depth in range(first, last + 1, step)]
        return place(sorted(known), first - 1, self.budget)

    def _shrink(self) -> None:
        """Keep the heaviest depths, and scale their weights down so that they stay finite."""
        best = sorted(self._weights.items(), key=lambda pair: -pair[1])[:512]
        self._weights = {depth: weight / self._weight_of_next for depth, weight in best}
        self._weight_of_next = 1.0


def place(depths: Sequence[tuple[int, float]], start: int, budget: int) -> list[int]:
    """Choose the depths from which the least is computed again in expectation.

    Args:
        depths: Depths above ``start`` at which prompts branch off, in order, each with its weight.
        start: Depth whose state is kept in any case.
        budget: How many to choose, at most.

    Returns:
        The depths, in order.

    Cost: O(depths^2 * budget).
    """
    after = [weight for _, weight in depths]  # of all that branch off at a depth or after it
    for i in range(len(depths) - 2, -1, -1):
        after[i] += after[i + 1]
    choices: list[tuple[float, tuple[int, ...]]] = [
        ((depth - start) * after[i], (depth,)) for i, (depth, _) in enumerate(depths)
    ]
    best = max(choices, default=(0.0, ()))
    for _ in range(budget - 1):
        choices = [
            max(
                (saved + (depth - chosen[-1]) * after[i], (*chosen, depth))
                for saved, chosen in choices[:i] or [(-inf, (depth,))]
            )
            for i, (depth, _) in enumerate(depths)
        ]
        best = max(best, max(choices, default=best))
    return list(best[1])
