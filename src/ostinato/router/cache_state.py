"""The default policy: least delay for all, by what each worker has cached and still has to do.

What a request costs the fleet if a worker serves it, in tokens to compute::

    score =   queued                    prompts ahead of it there: it waits for them
            + to compute * (2 + L)      its own work, which all that come behind it wait for, too
            + excess                    work that the worker got lately, above the fleet's mean

* ``L`` is the mean number of requests per worker that wait for their first token, as measured: in a
  queue, each token of work delays the work behind it by ``1 / (1 - utilisation)``, which is
  ``1 + L``. The other 1 is the cache: what is computed twice displaces as much of something else.
* *Excess* counts from two standard deviations of chance above the mean on, so that noise moves
  nothing. Work counts until sessions come back, so that agents which think between turns are not
  all sent to one worker, and a hot prefix is computed on a second worker once it brings its first
  one more work than that costs.
* A prefix on its way to a worker counts as cached there: the second request of a cold prefix
  follows the first (single flight), until the queue there outweighs computing it again.

Every figure is measured; there is no weight to set.

Sources: LMetric, arXiv 2603.15202, for scores without parameters, by new tokens; Preble, arXiv
2407.00023, for weighing a prefix's recomputation against load.
"""

from math import sqrt
from statistics import fmean

from ostinato.router.decision import RouteRequest
from ostinato.router.policies import Choice, Fleet

_SMOOTHING = 1 / 64
"""Weight of the newest request in means."""


class CacheState:
    """Least delay, weighed by what is cached."""

    def __init__(self) -> None:
        """Start with an idle fleet."""
        self._waiting = 0.0  # requests per worker before their first token

    def choose(self, request: RouteRequest, fleet: Fleet) -> Choice:
        """Return the candidate of the lowest score; of equals, that with the least recent work."""
        excess = self._excess(fleet)
        weight = 2 + self._waiting
        scores = [
            each.load_tokens + weight * each.tokens_to_compute + more
            for each, more in zip(fleet.candidates, excess, strict=True)
        ]
        recent = [load.recent_tokens for load in fleet.loads]
        place = min(range(len(scores)), key=lambda at: (scores[at], recent[at]))
        chosen = fleet.candidates[place]
        self._learn(fleet)
        reason = (
            f"{chosen.load_tokens:,} tokens queued + {weight:.1f} * {chosen.tokens_to_compute:,} "
            f"to compute + {excess[place]:,.0f} above its share lately"
        )
        return Choice(place, reason, scores)

    def _excess(self, fleet: Fleet) -> list[float]:
        """Return each worker's recent work above the mean, and above what chance explains."""
        mean = fmean(load.recent_tokens for load in fleet.loads)
        chance = 2 * sqrt(fmean(load.recent_variance for load in fleet.loads))
        return [max(0.0, load.recent_tokens - mean - chance) for load in fleet.loads]

    def _learn(self, fleet: Fleet) -> None:
        waiting = fmean(load.num_waiting for load in fleet.loads)
        self._waiting += (waiting - self._waiting) * _SMOOTHING
