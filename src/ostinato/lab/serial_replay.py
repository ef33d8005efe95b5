"""What would a cache of a given size and policy have found of a trace?

One request after another goes through the real ``CacheManager``: match, admit, publish, release,
at the recorded arrival, with nobody else running. Blocks of the cache hold one token each, and
the tokens are the trace's block ids: a hit ends where the ids part, which is all that a trace of
blocks can tell. One more block, which is never published, stands behind each path for the partial
last block of the prompt; the cache has one block more than asked for to hold it.

Nothing runs at once, so nothing is held but the request that is served: the question is what the
memory is worth, not how the load behaves. For that there is ``timed_replay``.
"""

from array import array
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ostinato.cache.manager import CacheManager
from ostinato.core.config import CacheConfig
from ostinato.core.identity import Identity, PrefixKey
from ostinato.lab.block_trace import BlockTrace, Numbers
from ostinato.lab.policies import SimulatedPolicyName, policy_factory

REQUESTS_PER_REPORT = 256
"""Requests between two reports of progress."""

_PARTIAL_BLOCK = 2**32 - 1


@dataclass(frozen=True, slots=True, eq=False)
class SerialResult:
    """What one cache found.

    Attributes:
        policy: Of the cache.
        num_blocks: Of the cache, in blocks of the trace.
        hit_tokens: Prompt tokens that hit, shape (num_requests,).
        cached_blocks: Blocks with content after each request, shape (num_requests,).
        evicted_blocks: Blocks that were given away for other content.
        num_cut: Requests with more blocks than the cache, of which the first alone are used.
        total_input_tokens: Tokens of all prompts.
    """

    policy: SimulatedPolicyName
    num_blocks: int
    hit_tokens: Numbers
    cached_blocks: Numbers
    evicted_blocks: int
    num_cut: int
    total_input_tokens: int

    @property
    def total_hit_tokens(self) -> int:
        """Prompt tokens that need not be computed."""
        return int(self.hit_tokens.sum())

    @property
    def hit_ratio(self) -> float:
        """Share of all prompt tokens that hit, 0 to 1."""
        total = self.total_input_tokens
        return self.total_hit_tokens / total if total else 0.0


def replay_serially(
    trace: BlockTrace,
    num_blocks: int,
    policy: SimulatedPolicyName = "lru",
    progress: Callable[[int], None] | None = None,
) -> SerialResult:
    """Serve a trace from one cache, a request at a time.

    Args:
        trace: The traffic.
        num_blocks: Blocks of the cache, of the trace's size.
        policy: Which cached block is worth least.
        progress: Is told of requests that were served, some at a time.

    Cost: about a microsecond per block under LRU, and tens of them per request.
    """
    now_s = [0.0]
    config = CacheConfig(
        num_blocks=min(num_blocks, trace.num_distinct + 1) + 1,  # no trace can fill more
        block_size=1,
        seal_tails=False,
        keep_explanations=0,
        ghost_blocks=0,
    )
    manager = CacheManager(config, lambda: now_s[0], policy=policy_factory(policy))
    hits, cached, num_cut = [0] * len(trace), [0] * len(trace), 0
    identity, pool = Identity(), manager.pool
    bounds, arrivals = trace.offsets.tolist(), trace.arrival_s.tolist()
    outputs = trace.output_tokens.tolist()
    for number, arrival_s in enumerate(arrivals):
        now_s[0] = arrival_s
        path = array("I", trace.ids[bounds[number] : bounds[number + 1]].tobytes())
        if len(path) > num_blocks:  # an engine of that size could not serve it at all
            del path[num_blocks:]
            num_cut += 1
        length = len(path)
        path.append(_PARTIAL_BLOCK)
        key = PrefixKey(identity, path)
        admitted = manager.admit(key, manager.match(key))
        assert admitted is not None, "nobody else holds a block, and its path was cut to the pool"
        table, _ = admitted
        hits[number] = table.num_shared_tokens
        manager.publish(table, length)
        manager.commit([table])
        manager.release(table, length, outputs[number])
        cached[number] = pool.num_evictable
        if progress is not None and number % REQUESTS_PER_REPORT == REQUESTS_PER_REPORT - 1:
            progress(REQUESTS_PER_REPORT)
    if progress is not None:
        progress(len(trace) % REQUESTS_PER_REPORT)
    # At least one token of a prompt is computed (law 4), and answers are no part of it.
    found = np.minimum(np.array(hits, np.int64), trace.prompt_blocks) * trace.block_tokens
    return SerialResult(
        policy,
        num_blocks,
        np.minimum(found, np.maximum(trace.input_tokens - 1, 0)),
        np.array(cached, np.int64),
        manager.stats.evicted_blocks,
        num_cut,
        trace.total_input_tokens,
    )
