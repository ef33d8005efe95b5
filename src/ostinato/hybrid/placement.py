"""The few positions of a prompt that deserve a checkpoint before requests part there.

Where later prompts part is learnt from where earlier ones did, in depths of ``unit`` tokens. With
so many checkpoints to place, the best positions are those from which the least is computed again
in expectation: a dynamic program over depths.

Source: sparse checkpoints by expected overlap, arXiv 2605.05219.
"""

from collections.abc import Sequence
from math import inf

_MOST_DEPTHS = 24
"""Depths that are considered for one prompt."""

_LEAST_SHARE = 1 / 16
"""Of all partings, those at one depth that make it worth a checkpoint."""

_HALF_LIFE = 512
"""Partings after which an earlier one counts half."""


class Placement:
    """Learns where prompts part, and chooses where to keep states.

    Attributes:
        budget: Checkpoints that one prompt may have besides those at its end and where it parts.
    """

    def __init__(self, budget: int) -> None:
        """Start without a parting."""
        self.budget = budget
        self._weights: dict[int, float] = {}
        self._weight_of_next = 1.0

    def learn(self, depth: int) -> None:
        """Note that two prompts parted at a depth; later ones weigh more."""
        self._weight_of_next *= 2 ** (1 / _HALF_LIFE)
        self._weights[depth] = self._weights.get(depth, 0.0) + self._weight_of_next
        if self._weight_of_next > 2**40 or len(self._weights) > 1024:
            self._shrink()

    def choose(self, first: int, last: int, has_unused: bool) -> list[int]:
        """Choose depths ``first .. last`` to keep the states of.

        Args:
            first: Of the depths that will be computed.
            last: Of them.
            has_unused: Whether there are slots without content: then, where nothing is known of
                these depths, prompts are taken to part anywhere. Otherwise a checkpoint would
                cost another one, and only a depth at which many part is worth that.
        """
        if self.budget < 1 or last <= first:
            return []
        least = _LEAST_SHARE * sum(self._weights.values())
        known = [(d, w) for d, w in self._weights.items() if first <= d <= last and w >= least]
        if not known and has_unused:
            step = max(1, (last - first + 1) // _MOST_DEPTHS)
            known = [(depth, 1.0) for depth in range(first, last + 1, step)]
        return place(sorted(known), first - 1, self.budget)

    def _shrink(self) -> None:
        """Keep the weightiest depths, in small numbers."""
        best = sorted(self._weights.items(), key=lambda pair: -pair[1])[:512]
        self._weights = {depth: weight / self._weight_of_next for depth, weight in best}
        self._weight_of_next = 1.0


def place(depths: Sequence[tuple[int, float]], start: int, budget: int) -> list[int]:
    """Choose at most ``budget`` depths such that the least is computed again in expectation.

    Args:
        depths: Depths above ``start`` at which prompts part, in order, each with its weight.
        start: Depth whose state is kept in any case.
        budget: How many to choose.

    Returns:
        The depths, in order.

    Cost: O(depths^2 * budget).
    """
    after = [weight for _, weight in depths]  # of all that part at a depth or behind it
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
