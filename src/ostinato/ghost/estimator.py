"""Estimates the hits of another cache, from two simulations that replay the same sample.

One simulation stands for the real cache, whose hits are counted, and one for another size or
policy. From the sampled blocks follow two figures of the whole traffic:

* gained: of those that missed in the first simulation, the second found a share; the same share
  is taken of all tokens that were counted as misses;
* lost: of those that hit in the first, the second missed some, each of which stands for
  ``stride`` blocks.

The interval comes from the sample as well. Blocks belong to 32 parts by their names, each a small
sample of its own; the more the parts disagree, the wider the interval. What all parts have in
common, the size of the sample, is compared with the misses that were counted.

Source: the sum of sampled blocks, over the share that is sampled: Horvitz, Thompson, 1952; the
spread of random groups: Wolter, Introduction to Variance Estimation, chapter 2.
"""

from array import array
from collections.abc import Sequence
from math import exp, hypot, log, sqrt
from typing import NamedTuple

from ostinato.observe.counters import LookupCounts

NUM_PARTS = 32

_STUDENT = 2.04
"""Standard errors of a 95 % interval, with 32 parts."""

_MIN_BLOCKS = 3.0
"""Sampled blocks by which any sum may be wrong (the rule of three): if none was seen, fewer than
three were to be expected, with 95 % confidence."""


class SimulationError(NamedTuple):
    """Errors of a simulation, as measured for ``docs/eviction.md``.

    Attributes:
        scale: Error of the hit ratio because it is small, times the root of its blocks.
        gain: Error of the additional hits, as a share of them.
    """

    scale: float
    gain: float = 0.0


PLAYED = SimulationError(0.06)
"""Of a policy that is simulated as it is."""

LEARNED = SimulationError(0.1, 0.15)
"""Of a policy that uses what the real one has learned, which is limited by its memory."""

_DRIFT = 1.0
"""Error of an estimate, as a share of the difference between the hit ratios of the sampled traffic
and of all traffic: gains and losses are estimated as shares, which change less."""

_FILLING = 0.35
"""Error of an estimate, times the root of the simulation's blocks, until the pool has been filled
three times: until then it matters at which request exactly a simulation is full."""

_POOLS, _UNFILLED = 4.0, 0.05
"""Error of an estimate if the sampled traffic has refilled the pool half as often as all traffic,
at most four times: until a pool is full nothing is evicted, so that part of the sample says little
of what follows."""


class Coverage(NamedTuple):
    """How much traffic has arrived, or was sampled.

    Attributes:
        tokens: Tokens that were looked up.
        hits: Tokens that hit.
        requests: Requests.
    """

    tokens: int = 0
    hits: int = 0
    requests: int = 0

    @staticmethod
    def of(counts: LookupCounts) -> "Coverage":
        """Return the counts of the cache."""
        return Coverage(counts.query_tokens, counts.hit_tokens, counts.num_requests)


class PairedEstimator:
    """The difference of two simulations, over all sampling windows.

    Attributes:
        num_blocks: Sampled blocks that were looked up.
        reached: The traffic up to the last of them.
    """

    def __init__(self, stride: float, size: int, unsure: SimulationError = PLAYED) -> None:
        """Start without samples.

        Args:
            stride: Blocks of the traffic that one sampled block stands for.
            size: Blocks of the smaller simulation.
            unsure: Errors of the simulation.
        """
        self._stride, self._size, self._unsure = stride, size, unsure
        self.num_blocks = 0
        self._gained, self._lost, self._missed = ([0] * NUM_PARTS for _ in range(3))
        self._past = Coverage()  # of windows that have ended
        self._begun = self.reached = Coverage()

    @property
    def covered(self) -> Coverage:
        """The traffic that was sampled."""
        parts = zip(self._past, self.reached, self._begun, strict=True)
        return Coverage(*(past + reached - begun for past, reached, begun in parts))

    def begin(self, at: Coverage) -> None:
        """Start another window of the traffic."""
        self._past = self.covered
        self._begun = self.reached = at

    def add(self, names: "array[int]", own: int, other: int) -> None:
        """Add a request.

        Args:
            names: Names of its sampled blocks that were looked up, in token order.
            own: How many of them the simulation of the real cache found.
            other: How many of them the other one found.
        """
        self.num_blocks += len(names)
        for name in names[own:]:
            self._missed[name % NUM_PARTS] += 1
        for name in names[own:other]:
            self._gained[name % NUM_PARTS] += 1
        for name in names[other:own]:
            self._lost[name % NUM_PARTS] += 1

    def estimate(
        self, counts: LookupCounts, block_size: int, num_blocks: int
    ) -> tuple[float, float]:
        """Estimate what the other cache would have found of all that was looked up.

        Args:
            counts: Lookups and hits of the cache.
            block_size: Tokens per block of the cache.
            num_blocks: Blocks of the cache.

        Returns:
            The hit ratio, and half the width of its 95 % interval.
        """
        covered = self.covered
        if covered.tokens <= 0:
            return 0.0, 1.0
        missed = max(1, sum(self._missed))
        rate = sum(self._gained) / missed
        per_gain = _open_share(counts, block_size) / missed
        per_loss = self._stride * block_size / covered.tokens
        gained, lost = per_gain * sum(self._gained), per_loss * sum(self._lost)
        gains = [g - rate * m for g, m in zip(self._gained, self._missed, strict=True)]
        error = hypot(
            _MIN_BLOCKS * per_loss,
            _upper_bound(gained, per_gain * self._spread(gains)),
            _upper_bound(lost, per_loss * self._spread(self._lost)),
            self._simulation_error(),
        )
        error += self._unsure.gain * gained
        error += self._size_error(block_size) * (gained + lost)
        error += self._unlike(counts, num_blocks * block_size)
        return min(1.0, max(0.0, counts.hit_ratio + gained - lost)), error

    def _spread(self, parts: Sequence[float]) -> float:
        """Return the standard error of a sum over parts."""
        mean = sum(parts) / NUM_PARTS
        variance = sum((part - mean) ** 2 for part in parts) * NUM_PARTS / (NUM_PARTS - 1)
        return sqrt(variance * (1 - 1 / self._stride))  # 0 if all blocks are sampled

    def _simulation_error(self) -> float:
        """Return the error of a ratio because a simulation is small."""
        return 0.0 if self._stride <= 1 else self._unsure.scale / sqrt(self._size)

    def _size_error(self, block_size: int) -> float:
        """Return the share by which the misses of the sample differ from those of the cache.

        All 32 parts share one simulated cache. If more blocks were sampled than one in
        ``stride``, it is too small for every part, and the parts agree on a wrong estimate.
        """
        if self._stride <= 1:
            return 0.0
        covered, one_block = self.covered, self._stride * block_size
        counted = covered.tokens - covered.hits - covered.requests * (block_size + 1) / 2
        sampled = one_block * sum(self._missed)
        return min(1.0, abs(log((sampled + one_block) / (max(0.0, counted) + one_block))))

    def _unlike(self, counts: LookupCounts, pool_tokens: int) -> float:
        """Return the error of a ratio because other traffic differs from the sampled traffic."""
        covered, missed = self.covered, counts.query_tokens - counts.hit_tokens
        error = _DRIFT * abs(counts.hit_ratio - covered.hits / covered.tokens)
        if missed < 3 * pool_tokens and self._stride > 1:
            error += _FILLING / sqrt(self._size)
        needed_tokens = min(_POOLS * pool_tokens, missed - pool_tokens)
        filled = max(1.0, covered.tokens - covered.hits - pool_tokens)
        return error + _UNFILLED * max(0.0, needed_tokens / filled - 1)


def _upper_bound(total: float, spread: float) -> float:
    """Return by how much a sum of counts may exceed its estimate.

    Most of what is gained and lost is due to few blocks that are used often, and a sample without
    them shows no spread either. So errors are symmetric in the logarithm: one block that was seen
    may stand for seven, ten for nineteen.
    """
    return total * (exp(min(_STUDENT, _STUDENT * spread / total)) - 1) if total > 0 else 0.0


def _open_share(counts: LookupCounts, block_size: int) -> float:
    """Share of looked-up tokens that missed and might have hit in whole blocks.

    The last token of a prompt never hits, nor does its last, partial block.
    """
    tails = counts.num_requests * (block_size + 1) / 2
    return max(0.0, counts.query_tokens - tails - counts.hit_tokens) / max(1, counts.query_tokens)
