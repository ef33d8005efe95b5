"""What did another cache find more or less, and how sure is that?

A small cache of another size or policy is set beside one of this size and policy, turn by turn.
Of what it found more and less, two things follow for the whole traffic:

* of the sampled blocks that missed here, it found some: the same share of all that missed, and
  how much that was has been measured;
* of those that hit here, it lost some. What all requests share hits always and is sampled with
  luck, so this is set against what has been measured to hit, not against what hit of the sample.

How far off that may be is told by the sample itself. By their names, blocks belong to 32 parts,
each a small sample of its own; if the parts disagree, the whole may be wrong.

Source: the sum of sampled blocks, over the share that is sampled: Horvitz, Thompson, 1952; the
spread of random groups: Wolter, Introduction to Variance Estimation, chapter 2.
"""

from math import exp, hypot, sqrt
from typing import NamedTuple

from ostinato.cache.anchor import Counted

NUM_PARTS = 32

_STUDENT = 2.04
"""What 95 % of all samples are within, in standard errors, by 32 parts."""

_LEAST_UNITS = 3.0
"""Sampled blocks by which any sum may be wrong: of what was not seen once, there may be as much as
would be seen three times, in 95 % of all samples."""

LIKENESS, LEARNED_LIKENESS, LEARNERS_LIKENESS = 0.06, 0.08, 0.15
"""By how much a small cache may differ from a large one, times the root of its blocks, by what
``benchmarks/ghost.py`` finds; under a policy that has learned; and under one that learns from the
little that a small cache sees."""

_DRIFT = 1.0
"""Share of the difference between the sampled traffic's hit ratio and that of all by which an
estimate may be wrong as well: gains and losses are reckoned as shares, which change less."""

_FILLING = 0.35
"""By how much an estimate may be wrong as well, times the root of the small cache's blocks, until
the pool has been filled three times: it counts when exactly a small cache is full."""

_POOLS, _UNFILLED = 4.0, 0.05
"""Until a pool is full no policy loses anything, so what was sampled by then tells little of what
comes next: by how much an estimate may be wrong as well where the sampled traffic has filled the
pool anew half as often as all of it, or as four times."""


class SoFar(NamedTuple):
    """How far the whole traffic has come.

    Attributes:
        tokens: That were looked up.
        hits: How many of them hit.
        requests: That they were of.
    """

    tokens: float = 0.0
    hits: float = 0.0
    requests: float = 0.0

    @staticmethod
    def of(counts: Counted) -> "SoFar":
        """As the cache has counted."""
        return SoFar(counts.query_tokens, counts.hit_tokens, counts.num_requests)

    def beyond(self, earlier: "SoFar") -> "SoFar":
        """What came since then."""
        return SoFar(
            self.tokens - earlier.tokens, self.hits - earlier.hits, self.requests - earlier.requests
        )

    def and_also(self, other: "SoFar") -> "SoFar":
        """Both together."""
        return SoFar(
            self.tokens + other.tokens, self.hits + other.hits, self.requests + other.requests
        )


class Tally:
    """What small caches of a size and policy found, beside those of the cache's own.

    Attributes:
        num_blocks: Sampled blocks that were looked up.
        reached: How far the traffic had come with the last of them.
    """

    __slots__ = (
        "_begun",
        "_gained",
        "_likeness",
        "_lost",
        "_missed",
        "_past",
        "_size",
        "_unit",
        "num_blocks",
        "reached",
    )

    def __init__(self, likeness: float = LIKENESS) -> None:
        """Know nothing.

        Args:
            likeness: By how much a small cache may differ, times the root of its blocks.
        """
        self.num_blocks, self._likeness = 0, likeness
        self._gained, self._lost, self._missed = ([0.0] * NUM_PARTS for _ in range(3))
        self._size = 0  # blocks of the smallest small cache
        self._unit = 1.0  # blocks of the traffic that one sampled block stands for
        self._past = SoFar()  # stretches of traffic that have ended
        self._begun = self.reached = SoFar()  # where the running one began, and has come to

    @property
    def covered(self) -> SoFar:
        """The traffic that was sampled."""
        return self._past.and_also(self.reached.beyond(self._begun))

    def begin(self, so_far: SoFar, size: int, unit: float) -> None:
        """Begin with another stretch of the traffic.

        Args:
            so_far: What came before.
            size: Blocks of the small cache.
            unit: Blocks of which one is sampled.
        """
        self._past = self.covered
        self._begun = self.reached = so_far
        self._size = min(size, self._size or size)
        self._unit = max(unit, self._unit)

    def reach(self, so_far: SoFar) -> None:
        """Note how far the traffic has come, sampled or not."""
        self.reached = so_far

    def add(self, part: int, num_asked: int, own: int, other: int, unit: float) -> None:
        """Add a turn.

        Args:
            part: Where its blocks belong to.
            num_asked: Sampled blocks that were looked up.
            own: How many of them the cache's own likeness found.
            other: How many of them the other one found.
            unit: Blocks of which one is sampled.
        """
        self.num_blocks += num_asked
        if own < num_asked:
            self._missed[part] += (num_asked - own) * unit
        if other > own:
            self._gained[part] += (other - own) * unit
        elif other < own:
            self._lost[part] += (own - other) * unit

    def estimate(self, counts: Counted, block_size: int, num_blocks: int) -> tuple[float, float]:
        """Estimate what the other one would have found of all that was looked up.

        Args:
            counts: What the cache has found.
            block_size: Tokens per block.
            num_blocks: Of the cache.

        Returns:
            The hit ratio, and by how much it may be wrong, in 95 % of all samples. Where the
            sampled traffic hit more or less than all, it may be wrong by that as well.
        """
        covered, hit_ratio = self.covered, counts.hit_ratio
        if covered.tokens <= 0:
            return 0.0, 1.0
        loss = hit_ratio / covered.hits if covered.hits else 1 / covered.tokens
        difference, error = self._difference(counts, block_size, loss)
        error += self._unlike(counts, num_blocks * block_size)
        return min(1.0, max(0.0, hit_ratio + difference)), error

    def excess(
        self, beside: Counted, counts: Counted, block_size: int, num_blocks: int
    ) -> tuple[float, float]:
        """Estimate what the other one would have found more.

        Args:
            beside: What the one that it is set beside would have found.
            counts: What was counted beside the sample.
            block_size: Tokens per block.
            num_blocks: Of the cache.

        Returns:
            Points of the hit ratio, and by how much they may be wrong, as ``estimate`` does.
        """
        covered = self.covered
        if covered.tokens <= 0:
            return 0.0, 1.0
        difference, error = self._difference(beside, block_size, 1 / covered.tokens)
        return difference, error + self._unlike(counts, num_blocks * block_size)

    def _difference(
        self, counts: Counted, block_size: int, loss_per_token: float
    ) -> tuple[float, float]:
        """Return by how much ratios differ, and by how much that may be wrong."""
        gain = _open_share(counts, block_size) / max(self._unit, sum(self._missed))
        loss = block_size * loss_per_token
        gained, lost = sum(self._gained) * gain, sum(self._lost) * loss
        least = _LEAST_UNITS * self._unit * block_size / self.covered.tokens
        rate = sum(self._gained) / max(self._unit, sum(self._missed))
        gains = [g - rate * m for g, m in zip(self._gained, self._missed, strict=True)]
        likeness = self._likeness / sqrt(max(1, self._size))
        sampled = (
            _most_beyond(gained, gain * self._spread(gains)),
            _most_beyond(lost, loss * self._spread(self._lost)),
        )
        return gained - lost, hypot(least, *sampled, likeness)

    def _spread(self, parts: list[float]) -> float:
        """Return the standard error of a sum, by the parts that it is of."""
        mean = sum(parts) / NUM_PARTS
        variance = sum((part - mean) ** 2 for part in parts) * NUM_PARTS / (NUM_PARTS - 1)
        return sqrt(variance * (1 - 1 / self._unit))  # of what is not sampled

    def _unlike(self, counts: Counted, pool_tokens: int) -> float:
        """Return by how much a ratio may be wrong for what was sampled being unlike the rest."""
        covered, missed = self.covered, counts.query_tokens - counts.hit_tokens
        error = _DRIFT * abs(counts.hit_ratio - covered.hits / covered.tokens)
        if missed < 3 * pool_tokens:
            error += _FILLING / sqrt(max(1, self._size))
        wanted = min(_POOLS * pool_tokens, missed - pool_tokens)
        filled = max(1.0, covered.tokens - covered.hits - pool_tokens)
        return error + _UNFILLED * max(0.0, wanted / filled - 1)


def _most_beyond(total: float, spread: float) -> float:
    """Return by how much a sum that is never negative may be larger than its sample says.

    Few blocks that are asked for often make most of what is gained and lost, and a sample that
    has missed them knows of no spread either. So errors are taken to be even in the logarithm:
    of one block that was seen there may be seven, of ten nineteen.
    """
    return total * (exp(min(_STUDENT, _STUDENT * spread / total)) - 1) if total > 0 else 0.0


def _open_share(counts: Counted, block_size: int) -> float:
    """Share of looked-up tokens that missed and might have hit in whole blocks.

    The last token of a prompt never hits, nor does what is left of its last block.
    """
    tails = counts.num_requests * (block_size + 1) / 2
    return max(0.0, counts.query_tokens - tails - counts.hit_tokens) / counts.query_tokens
