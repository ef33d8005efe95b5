"""The hits of a cache of a given size and policy on a trace.

One request after another goes through the real ``CacheManager``: match, admit, publish, release,
at the recorded arrival, with nothing else running. Blocks of the cache hold one token each, and
the tokens are the trace's block ids, so a hit ends where the ids differ. A sliding window of 1,024
tokens is one of 3 blocks of 512: its own token's and those that the 1,023 before it may touch. Each
path ends with one more block, never published, for the partial last block of the prompt; the cache
has one block more than asked for to hold it.

Only the current request holds blocks: this measures the value of memory, not the behaviour under
load, which ``timed_replay`` simulates.
"""

from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Literal

import numpy as np

from ostinato.assembly import build_cache
from ostinato.cache.eviction import PolicyFactory
from ostinato.core.identity import Identity, PrefixKey
from ostinato.eviction import make_policy
from ostinato.lab.replay.tier_model import DiskModel, SimulatedDisk
from ostinato.lab.traces.block_trace import BlockTrace, Numbers
from ostinato.settings import PolicyName, PrefixCacheConfig, StateConfig, WindowConfig

REQUESTS_PER_REPORT = 256
"""Requests between two reports of progress."""

USUAL_POLICY: PolicyName = "reuse_hazard"
"""The default of ``EngineConfig.eviction_policy``; a test compares them."""

_PARTIAL_BLOCK = 2**32 - 1
_IDENTITY = Identity()


@dataclass(frozen=True, slots=True, eq=False)
class SerialResult:
    """The hits of one cache.

    Attributes:
        policy: Policy of the cache; ``custom`` for one that the product does not have.
        num_blocks: Number of blocks of the cache, in blocks of the trace.
        hit_tokens: Prompt tokens that hit, shape (num_requests,).
        evicted_blocks: Blocks that were evicted.
        num_cut: Requests with more blocks than the cache, of which the first alone are used.
        total_input_tokens: Tokens of all prompts.
        loaded_tokens: Hit tokens that came from a disk.
        written_blocks: Blocks that were written to the disk.
    """

    policy: PolicyName | Literal["custom"]
    num_blocks: int
    hit_tokens: Numbers
    evicted_blocks: int
    num_cut: int
    total_input_tokens: int
    loaded_tokens: int = 0
    written_blocks: int = 0

    @property
    def total_hit_tokens(self) -> int:
        """Prompt tokens that need not be computed."""
        return int(self.hit_tokens.sum())

    @property
    def hit_ratio(self) -> float:
        """Share of all prompt tokens that hit, 0 to 1."""
        total = self.total_input_tokens
        return self.total_hit_tokens / total if total else 0.0


@dataclass(frozen=True, slots=True)
class Pools:
    """Sizes of a cache, in blocks of the trace.

    Attributes:
        full: Blocks for full attention.
        windows: What layers with a sliding window have, in blocks of the trace too.
        states: What layers that keep states have; their unit is a block of the trace.
    """

    full: int
    windows: tuple[WindowConfig, ...] = ()
    states: StateConfig | None = None


class SerialCache:
    """A cache that serves one request after another.

    Attributes:
        manager: The real one.
        stats: Its counters.
        num_cut: Requests with more blocks than the cache.
        disk: The disk behind it; None without one.
    """

    def __init__(
        self,
        pools: Pools,
        policy: PolicyName | PolicyFactory,
        num_distinct: int,
        disk: DiskModel | None = None,
    ) -> None:
        """Make an empty cache; ``num_distinct`` blocks of content are all that it may need."""
        self._now_s = 0.0
        self._max_blocks = pools.full
        self.num_cut = 0
        max_distinct = num_distinct + 1
        config = PrefixCacheConfig(
            num_blocks=min(pools.full, max_distinct) + 1,
            block_size=1,
            windows=tuple(
                replace(w, num_blocks=min(w.num_blocks, max_distinct + w.window))
                for w in pools.windows
            ),
            states=pools.states,
            seal_tails=False,
            keep_explanations=0,
            ghost_blocks=0,
        )
        spare = [window.num_blocks - window.window for window in config.windows]
        self._step_blocks = max(1, min(spare)) if spare else None
        self.disk: SimulatedDisk | None = None
        if disk is not None:
            self.disk = SimulatedDisk(disk, 1, config.windows, lambda: self._now_s)
        make = partial(make_policy, policy) if isinstance(policy, str) else policy
        more = () if self.disk is None else (self.disk,)
        cache = build_cache(config, lambda: self._now_s, policy=make, more_observers=more)
        self.manager, self.stats = cache.manager, cache.stats
        if self.disk is not None:
            self.disk.open(self.manager)

    def key(self, path: "array[int]") -> PrefixKey:
        """Return the key of a prompt: its blocks as far as the cache could hold them."""
        if len(path) > self._max_blocks:  # an engine of that size could not serve it at all
            del path[self._max_blocks :]
            self.num_cut += 1
        path.append(_PARTIAL_BLOCK)
        return PrefixKey(_IDENTITY, path)

    def serve(self, key: PrefixKey, arrival_s: float, num_output_tokens: int) -> int:
        """Serve a request; returns how many of its blocks hit."""
        self._now_s = arrival_s
        manager, length = self.manager, len(key.tokens) - 1
        admitted = manager.admit(key, manager.match(key), most_new=self._step_blocks)
        assert admitted is not None, "nothing else holds a block, and the path was cut to the pool"
        table, _ = admitted
        hits = table.num_shared_tokens
        done = table.num_slots
        if manager.chunk_unit is not None:  # a step per cut
            done = hits
            while (end := manager.end_of_chunk(table, done, length, ())) < length:
                manager.publish(table, end)
                manager.commit()
                done = end
        while self._step_blocks is not None and done <= length:
            manager.publish(table, done)
            manager.commit()
            done = manager.growable(table, min(length + 1, done + self._step_blocks))
            assert manager.grow(table, done)
        manager.publish(table, length)
        manager.commit()
        manager.release(table, length, num_output_tokens)
        return hits


def replay_serially(
    trace: BlockTrace,
    pools: Pools | int,
    policy: PolicyName | PolicyFactory = USUAL_POLICY,
    progress: Callable[[int], None] | None = None,
    disk: DiskModel | None = None,
) -> SerialResult:
    """Serve a trace from one cache, a request at a time.

    Args:
        trace: The traffic.
        pools: Sizes of the cache; a number is that of full attention, without windows.
        policy: Eviction policy, or what makes one.
        progress: Called with numbers of requests that were served.
        disk: The disk behind the cache; None for none.

    Cost: about a microsecond per block under LRU, and tens of them per request.
    """
    pools = Pools(pools) if isinstance(pools, int) else pools
    cache = SerialCache(pools, policy, trace.num_distinct, disk)
    hits, loaded = [0] * len(trace), 0
    arrivals, outputs = trace.arrival_s.tolist(), trace.output_tokens.tolist()
    for number, path in enumerate(each_path(trace)):
        hits[number] = cache.serve(cache.key(path), arrivals[number], outputs[number])
        if cache.disk is not None:
            hits[number] += cache.disk.last_hit_blocks
            loaded += cache.disk.last_hit_blocks
        if progress is not None and number % REQUESTS_PER_REPORT == REQUESTS_PER_REPORT - 1:
            progress(REQUESTS_PER_REPORT)
    if progress is not None:
        progress(len(trace) % REQUESTS_PER_REPORT)
    return SerialResult(
        policy if isinstance(policy, str) else "custom",
        pools.full,
        hit_tokens(trace, hits),
        cache.stats.evicted_blocks,
        cache.num_cut,
        trace.total_input_tokens,
        loaded * trace.block_tokens,
        0 if cache.disk is None else cache.disk.num_written,
    )


def each_path(trace: BlockTrace) -> Iterator["array[int]"]:
    """Yield the blocks of each request, in order of arrival."""
    for begin, end in pairwise(trace.offsets.tolist()):
        yield array("I", trace.ids[begin:end].tobytes())


def hit_tokens(trace: BlockTrace, hit_blocks: Sequence[int]) -> Numbers:
    """Return the prompt tokens that hit: at least one is computed (law 4), answers do not count."""
    cached_tokens = (
        np.minimum(np.array(hit_blocks, np.int64), trace.prompt_blocks) * trace.block_tokens
    )
    hits: Numbers = np.minimum(cached_tokens, np.maximum(trace.input_tokens - 1, 0))
    return hits
