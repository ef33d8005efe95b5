"""What is known by now of other sizes and policies?

A cache of half, double or four times the size differs from a small one of this size as the large
ones would differ, so an estimate is the hit ratio that was counted, plus what the small caches
differ by. It comes with the interval that it is within, and not before that is of ten points.

Under a policy that learns what LRU would have found is counted as well, and is what others are
set beside. The policy at another size lies between two ends, and the sample says where::

    LRU of that size, less the share ──────────── all that was ever asked for before
                    └─ what learned caches find more ─┘
"""

from math import hypot

from ostinato.cache.anchor import BESIDE_LRU, AtRatio, Watched
from ostinato.cache.likenesses import ALL, SIZES, Which
from ostinato.cache.policies.shadow import SHARE
from ostinato.cache.tally import LEARNED_LIKENESS, LEARNERS_LIKENESS, LIKENESS, Tally
from ostinato.core.config import PolicyName
from ostinato.observe.counters import GhostEstimate, LookupCounts

TOO_WIDE = 0.1
"""An interval that is wider says nothing yet."""

COUNTED_ERROR = 0.002
"""By how much an account against LRU may be wrong where requests run at once."""


class Answers:
    """All tallies, and what follows from them."""

    def __init__(self, counts: LookupCounts, watched: Watched) -> None:
        """Know nothing.

        Args:
            counts: What the cache has found.
            watched: What others are set beside.
        """
        self._counts, self._lru, self._config = counts, watched.counts, watched.config
        self._learned = watched.experience is not None
        self._tallies: dict[Which, Tally] = {}

    def tally(self, which: Which) -> Tally:
        """Return what counts for a size and policy."""
        likeness = LIKENESS
        if which[1] == "reuse_hazard":
            likeness = LEARNED_LIKENESS if self._learned else LEARNERS_LIKENESS
        return self._tallies.setdefault(which, Tally(likeness))

    def estimates(self) -> tuple[GhostEstimate, ...]:
        """Return what others would have found, by what was played so far.

        Those are left out whose interval is wider than ten points.
        """
        if self._learned:
            found = self._of_learner()
        else:
            found = [self._plain(which, tally) for which, tally in self._tallies.items()]
        return tuple(estimate for estimate in found if 2 * estimate.error <= TOO_WIDE)

    def _plain(self, which: Which, tally: Tally) -> GhostEstimate:
        """Estimate by what was found beside the cache's own policy, or LRU in its place."""
        config, counts = self._config, self._lru
        ratio, error = tally.estimate(counts, config.block_size, config.num_blocks)
        return self._estimate(which, (ratio, error), tally)

    def _of_learner(self) -> list[GhostEstimate]:
        """Estimate its sizes by LRU's and what it finds more, and LRU by what was counted."""
        own, tallies, lru = self._config.policy, self._tallies, self._lru
        if not tallies:
            return []
        found = [self._size_of_learner(memory, own) for memory in SIZES]
        counted = GhostEstimate(
            self._config.num_blocks,
            "lru",
            lru.hit_ratio,
            lru.query_tokens // self._config.block_size,
            error=COUNTED_ERROR,
            num_requests=lru.num_requests,
        )
        others = [which for which in tallies if which[1] not in BESIDE_LRU]
        return [*found, counted, *(self._plain(which, tallies[which]) for which in others)]

    def _size_of_learner(self, memory: float, own: PolicyName) -> GhostEstimate:
        """Estimate another size of a policy that learns, within what is certain."""
        low, high = self._limits(memory)
        ratio, error = self._by_excess(memory, own)
        if low <= ratio + error and ratio - error <= high:
            low, high = max(low, ratio - error), min(high, ratio + error)
        played, sizes = self._tallies[memory, own], self._tallies[memory, "lru"]
        tally = played if played.num_blocks else sizes
        return self._estimate((memory, own), ((low + high) / 2, (high - low) / 2), tally)

    def _limits(self, memory: float) -> tuple[float, float]:
        """Say what a policy with an account finds at least and at most.

        At least what LRU of that size does, less the share; at most what was ever asked for
        before. A smaller cache finds no more than this one, and a larger one no less.
        """
        tallies, lru, config = self._tallies, self._lru, self._config
        now, sizes = self._counts.hit_ratio, (config.block_size, config.num_blocks)
        least, error = tallies[memory, "lru"].estimate(lru, *sizes)
        low = max(0.0, least - error - SHARE)
        if memory < 1:
            return min(low, now), now
        asked_before = tallies[ALL, "lru"]
        if 2 * asked_before.covered.requests < lru.num_requests:
            return max(low, now - SHARE), 1.0  # what was seen in its stead was long ago
        most, error = asked_before.estimate(lru, *sizes)
        return max(low, now - SHARE), min(1.0, max(low, now, most + error))

    def _by_excess(self, memory: float, own: PolicyName) -> tuple[float, float]:
        """Estimate by LRU of that size, and what learned caches found more.

        These have no account, so they may find more than a policy that is held back by one. At
        the cache's own size that shows.
        """
        tallies, lru = self._tallies, self._lru
        sizes = self._config.block_size, self._config.num_blocks
        ratio, error = tallies[memory, "lru"].estimate(lru, *sizes)
        more, wrong = tallies[memory, own].excess(AtRatio(lru, ratio), lru, *sizes)
        played, doubt = tallies[1.0, own].excess(lru, lru, *sizes)
        unlike = abs(played - (self._counts.hit_ratio - lru.hit_ratio))
        return ratio + more, hypot(error, wrong) + max(0.0, unlike - doubt)

    def _estimate(self, which: Which, found: tuple[float, float], tally: Tally) -> GhostEstimate:
        """Say what is known of a size and policy, and by how much traffic."""
        (memory, policy), (ratio, error) = which, found
        return GhostEstimate(
            int(memory * self._config.num_blocks),
            policy,
            ratio,
            tally.num_blocks,
            memory,
            error,
            int(tally.covered.requests),
            max(0, int(self._counts.num_requests - tally.reached.requests)),
        )
