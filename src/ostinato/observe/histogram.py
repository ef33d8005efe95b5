"""A histogram in bounded memory.

Buckets grow by a factor of two, so that a thousandth and a million need 40 counters between
them, and a quantile is right to within a factor of two.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import accumulate
from math import frexp

_NUM_BUCKETS = 64
_LOWEST_EXPONENT = -20
"""The first bucket ends at 2**-20: about a microsecond, if values are seconds."""


@dataclass(slots=True)
class Histogram:
    """Counts by power of two.

    Attributes:
        counts: Bucket ``i`` counts values in ``[2**(i-21), 2**(i-20))``; the first takes all
            that is smaller, the last all that is larger. Shape (64,).
        total: Sum of all values, each as often as it was counted.
    """

    counts: list[int] = field(default_factory=lambda: [0] * _NUM_BUCKETS)
    total: float = 0.0

    def add(self, value: float, count: int = 1) -> None:
        """Count a value that is not negative, in O(1)."""
        bucket = frexp(value)[1] - _LOWEST_EXPONENT if value > 0 else 0
        if not 0 <= bucket < _NUM_BUCKETS:
            bucket = 0 if bucket < 0 else _NUM_BUCKETS - 1
        self.counts[bucket] += count
        self.total += value * count

    def add_whole(self, value: int, count: int) -> None:
        """Count a whole number that is not negative, in half the time."""
        bucket = value.bit_length() - _LOWEST_EXPONENT if value else 0
        self.counts[bucket if bucket < _NUM_BUCKETS else _NUM_BUCKETS - 1] += count
        self.total += value * count

    def copy(self) -> "Histogram":
        """Return an independent histogram of the same counts."""
        return Histogram(self.counts[:], self.total)

    @property
    def num_values(self) -> int:
        """How many values were counted."""
        return sum(self.counts)

    def bound(self, bucket: int) -> float:
        """Return the value at which a bucket ends."""
        return float(2.0 ** (bucket + _LOWEST_EXPONENT))

    def cumulative(self, bounds: Iterable[float]) -> list[tuple[str, float]]:
        """List how many values are below each bound, a power of two, and below infinity."""
        below = {self.bound(i): number for i, number in enumerate(accumulate(self.counts))}
        return [*((repr(bound), below[bound]) for bound in bounds), ("+Inf", self.num_values)]

    def quantile(self, share: float) -> float:
        """Return the bound below which at least that share of the values is; 0 if empty."""
        rank, seen = share * self.num_values, 0
        for bucket, count in enumerate(self.counts):
            seen += count
            if seen and seen >= rank:
                return self.bound(bucket)
        return 0.0
