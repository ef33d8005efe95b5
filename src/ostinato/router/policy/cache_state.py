"""``CacheState``, the default policy: short waits, within a budget of hits given up.

The score of a request at a worker, in tokens of the fleet's mean price::

    work   =  to compute * price               what its hits there do not save
            + excess                           recent work of the worker above the mean
    wait   =  queued * price + work            prompts ahead of it there, and its own
    score  =  mean * exp(wait / mean) + price * work

* A long *wait* costs more than many short ones of the same sum. The slowest 1 % of requests are the
  longest prompts, and short ones that wait ten seconds for one of those to save half a second of
  work; a cost that grows exponentially sends the short ones elsewhere. *mean* is that of recently
  chosen waits, which gives the cost the scale of the traffic.
* *Prices* are those that workers publish of their steps; one that publishes none, such as vLLM, has
  the mean of the others. *Queued* is what goes before the request: where the shortest prompt goes
  first, the shorter ones, and of all longer ones the share of a step that the eldest keeps.
* A *hit given up* is a token that another worker has cached. That is right where waiting costs more
  than computing, but each such token is cached twice from then on, so the fleet has a budget for
  it: ``GIVEN_UP`` of all possible hits.
* The *price* spends that budget where it saves the most waiting. It rises with each hit given up,
  and falls with the budget: the multiplier of the budget's constraint, by dual ascent, at least 1.
* *Excess* begins two standard deviations of chance above the mean, so that noise moves nothing.
  Work counts until sessions return, so that agents which think between turns are not all sent to
  one worker, and a hot prefix is computed on a second worker once it costs the first one more.
* A prefix that is being sent to a worker counts as cached there: the second request of a cold
  prefix follows the first (single flight), until the queue there costs more than computing it
  again.

Sources: LMetric, arXiv 2603.15202, for scores without parameters, by new tokens; Preble, arXiv
2407.00023, for weighing a prefix's recomputation against load; Kelly, Maulloo and Tan, J. Oper.
Res. Soc. 49 (1998), for prices that keep a constraint; Howard and Matheson, Management Science 18
(1972), for the exponential cost of those who fear the tail.
"""

from collections.abc import Sequence
from math import exp, sqrt
from statistics import fmean

from ostinato.router.policy.decision import Candidate, RouteRequest
from ostinato.router.policy.policies import Candidates, Choice

GIVEN_UP = 0.02
"""Share of possible hits that may be computed again elsewhere. With it, the hits of a fleet stay
above 97 % of those of one engine with the memory of all."""

_FIRST_PRICE = 2.0
_MIN_PRICE, _MAX_PRICE = 1.0, 1e4
_STEP = 1 / 8
"""Step of the price's logarithm, for a typical hit given up."""

_STEEPEST = 30.0
"""Waits, in means, above which the cost is linear: it stays finite, and the longest prompts, which
wait too long anywhere, still go to their hits and to workers with little work."""

_SMOOTHING = 1 / 64
"""Weight of the newest request in means."""


class CacheState:
    """Weighs waits against hits."""

    def __init__(self) -> None:
        self._price = _FIRST_PRICE
        self._mean_hit = 1.0
        self._mean_wait = 0.0
        self._num_choices = 0

    def choose(self, request: RouteRequest, fleet: Candidates) -> Choice:
        """Return the candidate with the lowest score; among equals, the least recent work."""
        excess, candidates = self._excess(fleet), fleet.candidates
        work = [each.work + more for each, more in zip(candidates, excess, strict=True)]
        waits = [each.queued + own for each, own in zip(candidates, work, strict=True)]
        delays = self._delays(waits)
        price = self._price
        scores = [delay + price * own for delay, own in zip(delays, work, strict=True)]
        recent = [load.recent_tokens for load in fleet.loads]
        place = min(range(len(scores)), key=lambda at: (scores[at], recent[at]))
        chosen = candidates[place]
        self._learn(request, fleet, chosen)
        reason = (
            f"{delays[place]:,.0f} for {chosen.queued:,.0f} tokens queued + {price:.1f} * "
            f"({chosen.tokens_to_compute:,} to compute + {excess[place]:,.0f} above its share "
            "recently)"
        )
        return Choice(place, reason, scores)

    def _delays(self, waits: Sequence[float]) -> list[float]:
        """Return the cost of each wait: exponential up to ``_STEEPEST`` means, then linear."""
        mean = self._mean_wait or min(waits)
        bends = [min(wait, _STEEPEST * mean) for wait in waits]
        return [
            mean * exp(bend / mean) + wait - bend for wait, bend in zip(waits, bends, strict=True)
        ]

    def _excess(self, fleet: Candidates) -> list[float]:
        """Return each worker's recent work above the mean, and above what chance explains."""
        mean = fmean(load.recent_tokens for load in fleet.loads)
        chance = 2 * sqrt(fmean(load.recent_variance for load in fleet.loads))
        return [max(0.0, load.recent_tokens - mean - chance) for load in fleet.loads]

    def _learn(self, request: RouteRequest, fleet: Candidates, chosen: Candidate) -> None:
        """Update the means, and move the price towards the one that keeps the budget."""
        self._num_choices += 1
        min_tokens = min(each.tokens_to_compute for each in fleet.candidates)
        possible_hits = max(0, len(request.tokens) - min_tokens)
        newest = max(_SMOOTHING, 1 / self._num_choices)
        self._mean_hit += (max(1, possible_hits) - self._mean_hit) * newest
        wait = chosen.queued + chosen.work
        self._mean_wait += (wait - self._mean_wait) * newest
        over_budget = chosen.tokens_to_compute - min_tokens - GIVEN_UP * possible_hits
        step = _STEP * over_budget / self._mean_hit
        self._price = min(_MAX_PRICE, max(_MIN_PRICE, self._price * exp(min(step, 1.0))))
