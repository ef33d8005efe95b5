"""The hits of several replicas, each with a cache of its own.

A conversation that moves to another replica misses, so hits depend on the router:

* ``affinity``: a request goes where most of its prefix is cached, unless that replica has more than
  its share of the load (a quarter above the mean, and one request); then to the next best. Without
  a cached prefix it goes to the least loaded one.
* ``round_robin``: a load balancer that ignores prefixes.

Sources: consistent hashing with bounded loads, arXiv 1608.01350, for the bound; Preble, arXiv
2407.00023, and SGLang's router for routing by prefix.
"""

from array import array
from dataclasses import dataclass
from math import exp
from typing import Literal

import numpy as np
import numpy.typing as npt

from ostinato.lab.replay.serial_replay import Pools, SerialCache, each_path, hit_tokens
from ostinato.lab.traces.block_trace import BlockTrace, Numbers
from ostinato.lab.work.cost_model import PerRequest, StepCost
from ostinato.settings import PolicyName

Routing = Literal["affinity", "round_robin"]
"""Routing of requests over replicas."""

LOAD_FACTOR = 1.25
"""Multiple of the mean load above which a replica gets no request for its prefix alone."""

_LOAD_WINDOW_S = 60.0
"""Time after which a request's work counts for a third of what it was, in a replica's load."""


@dataclass(frozen=True, slots=True)
class ReplicaWork:
    """Seconds that each request of a trace takes on one replica.

    Attributes:
        prefill_s: Prefill time without a cache, shape (num_requests,).
        decode_s: Decode time of its answer, shape (num_requests,).
    """

    prefill_s: PerRequest
    decode_s: PerRequest

    @property
    def total_s(self) -> float:
        """Time of all requests, without a cache."""
        return float(self.prefill_s.sum() + self.decode_s.sum())


@dataclass(frozen=True, slots=True, eq=False)
class RoutedResult:
    """The hits of replicas.

    Attributes:
        hit_tokens: Prompt tokens that hit, shape (num_requests,).
        replica: Replica that served each request, shape (num_requests,).
        evicted_blocks: Evicted blocks of full attention, over all replicas.
        max_cached_blocks: Cached blocks of full attention, at the end, in the fullest cache.
    """

    hit_tokens: Numbers
    replica: npt.NDArray[np.int64]
    evicted_blocks: int
    max_cached_blocks: int


def work_of(trace: BlockTrace, cost: StepCost) -> ReplicaWork:
    """Return the work of a trace's requests without a cache."""
    inputs, outputs = (
        each.astype(np.float64) for each in (trace.input_tokens, trace.output_tokens)
    )
    return ReplicaWork(cost.prefill_s(inputs, np.zeros(len(trace))), cost.decode_s(inputs, outputs))


def replay_routed(
    trace: BlockTrace,
    pools: Pools,
    num_replicas: int,
    routing: Routing,
    policy: PolicyName,
    work: ReplicaWork,
) -> RoutedResult:
    """Serve a trace from several replicas, one request after another.

    Each replica has a cache of these pools; the router balances ``work``.
    """
    caches = [SerialCache(pools, policy, trace.num_distinct) for _ in range(num_replicas)]
    router = _PrefixRouter(trace, caches, work) if routing == "affinity" else None
    arrivals, outputs = trace.arrival_s.tolist(), trace.output_tokens.tolist()
    hits, chosen = [0] * len(trace), [0] * len(trace)
    for number, path in enumerate(each_path(trace)):
        replica = number % num_replicas if router is None else router.choose(number, path)
        cache = caches[replica]
        hits[number] = cache.serve(cache.key(path), arrivals[number], outputs[number])
        chosen[number] = replica
        if router is not None:
            router.served(number, replica, hits[number])
    evicted = sum(cache.stats.evicted_blocks for cache in caches)
    max_cached = max(cache.manager.pool.num_evictable for cache in caches)
    return RoutedResult(hit_tokens(trace, hits), np.array(chosen, np.int64), evicted, max_cached)


class _PrefixRouter:
    """A router that remembers which replicas were sent which blocks, and balances their load."""

    def __init__(self, trace: BlockTrace, caches: list[SerialCache], work: ReplicaWork) -> None:
        self._caches = caches
        self._sent_to = [0] * trace.num_distinct  # by block, the replicas that had it, as bits
        self._loads = [0.0] * len(caches)
        self._now_s = 0.0
        self._arrivals = trace.arrival_s.tolist()
        self._blocks = np.maximum(1, trace.input_tokens / trace.block_tokens).tolist()
        self._prefill_s, self._decode_s = work.prefill_s.tolist(), work.decode_s.tolist()
        self._mean_s = work.total_s / max(1, len(trace))
        self._path = trace.path

    def choose(self, number: int, path: "array[int]") -> int:
        """Return the replica for a request."""
        self._age(self._arrivals[number])
        loads = self._loads
        bound = LOAD_FACTOR * sum(loads) / len(loads) + self._mean_s
        allowed = sum(1 << place for place, load in enumerate(loads) if load <= bound)
        holders = 0
        for block in reversed(path):
            holders = self._sent_to[block] & allowed
            if holders:
                break
        places = range(len(loads))
        best = [place for place in places if holders >> place & 1] or list(places)
        if len(best) == 1:
            return best[0]
        return min(
            best, key=lambda place: (-self._cached_tokens(place, path, holders), loads[place])
        )

    def served(self, number: int, replica: int, num_hits: int) -> None:
        """Note where a request went and what is left to compute of it."""
        missed = max(0.0, 1 - num_hits / self._blocks[number])
        self._loads[replica] += self._prefill_s[number] * missed + self._decode_s[number]
        bit = 1 << replica
        for block in self._path(number).tolist():
            self._sent_to[block] |= bit

    def _cached_tokens(self, place: int, path: "array[int]", holders: int) -> int:
        """Return a replica's cached blocks of a prompt, if it was ever sent the last of them."""
        if not holders:
            return 0
        cache = self._caches[place]
        return len(cache.manager.match(cache.key(path[:])).blocks)

    def _age(self, now_s: float) -> None:
        kept = exp((self._now_s - now_s) / _LOAD_WINDOW_S)
        self._loads = [load * kept for load in self._loads]
        self._now_s = now_s
