"""What would more memory bring, or another policy?

A ghost watches a sample of the traffic and replays it on small caches without memory behind
them: half, double and four times the size under the same policy, and the same size under every
other one. Index, pool and policy of the small caches are those of the large one, so whatever a
policy learns or remembers, it does there as well::

    prompt   b0 b1 b2 b3 | b4 b5 b6 b7 | b8 ..       a window of ``stride`` blocks each
    sample      b1       |          b7 |  ..         one block of each: a prompt of two "tokens"

Which block of a window is sampled depends on the window's first block. So prompts that begin
alike are sampled alike, and a cache of ``num_blocks / stride`` sees of them what the whole cache
sees of all. What sampling gets wrong, it gets wrong for every size alike: an estimate is the hit
ratio that was measured, plus what the small caches differ by.

Source: spatially hashed sampling: Waldspurger, Park, Garthwaite, Ahmad, Efficient MRC
construction with SHARDS, FAST 2015; many small caches: Waldspurger, Saemundsson, Ahmad, Park,
Cache modeling and optimization using miniature simulations, ATC 2017.
"""

from array import array
from collections.abc import Callable
from typing import get_args
from zlib import crc32

from ostinato.cache.accounts import Accounts
from ostinato.cache.policies import make_policy
from ostinato.cache.policies.contract import Turn
from ostinato.cache.pool import BlockPool
from ostinato.cache.radix_index import RadixIndex
from ostinato.cache.stats import GhostEstimate
from ostinato.core.config import CacheConfig, PolicyName
from ostinato.core.identity import PrefixKey

_SIZES = (0.5, 2.0, 4.0)


class Ghost:
    """A sample of the traffic, replayed on small caches."""

    def __init__(self, config: CacheConfig, clock: Callable[[], float]) -> None:
        """Watch a cache of that configuration.

        Args:
            config: Of the cache; ``ghost_blocks`` is the size of a small cache as large as it.
            clock: The cache's.
        """
        self._config = config
        self._clock = clock
        self._stride = max(1, config.num_blocks // config.ghost_blocks)
        wanted = [(config.num_blocks, config.policy)]
        wanted += [(int(size * config.num_blocks), config.policy) for size in _SIZES]
        others = [policy for policy in get_args(PolicyName) if policy != config.policy]
        self._wanted = wanted + [(config.num_blocks, policy) for policy in others]
        self.clear()

    def clear(self) -> None:
        """Start anew: the cache has forgotten something, or is about to."""
        self._num_sampled = 0
        self._caches = [
            _SmallCache(max(1, num_blocks // self._stride), policy, self._clock)
            for num_blocks, policy in self._wanted
        ]

    def saw(self, key: PrefixKey) -> None:
        """Look at an admitted prompt; most of them are looked at for two hashes only.

        Cost: O(num_tokens / stride), and where a block is sampled, a request per small cache.
        """
        names = self._sample(key)
        if names:
            self._num_sampled += len(names)
            sampled = PrefixKey(key.identity, names)
            for cache in self._caches:
                cache.serve(sampled)

    def estimates(self, hit_ratio: float) -> tuple[GhostEstimate, ...]:
        """Return what others would have found.

        Args:
            hit_ratio: What the cache itself has found.
        """
        if not self._num_sampled:
            return ()
        same, *others = self._caches
        found = []
        for (num_blocks, policy), cache in zip(self._wanted[1:], others, strict=True):
            differs = (cache.num_hits - same.num_hits) / self._num_sampled
            ratio = min(1.0, max(0.0, hit_ratio + differs))
            found.append(GhostEstimate(num_blocks, policy, ratio, self._num_sampled))
        return tuple(found)

    def _sample(self, key: PrefixKey) -> "array[int]":
        """Return the names of a prompt's sampled blocks, in order."""
        size, stride = self._config.block_size, self._stride
        num_blocks, names = len(key) // size, array("I")
        for first in range(0, num_blocks, stride):
            start = first * size
            place = first + crc32(key.packed_range(start, start + size)) % stride
            if place < num_blocks:
                start = place * size
                names.append(crc32(key.packed_range(start, start + size), place))
        return names


class _SmallCache:
    """A cache with blocks of one token and nothing behind them, one request at a time."""

    def __init__(self, num_blocks: int, policy: PolicyName, clock: Callable[[], float]) -> None:
        self.num_hits = 0
        self._num_blocks = num_blocks
        accounts = Accounts({}, lambda: make_policy(policy, num_blocks, clock))
        self._pool = BlockPool(num_blocks, accounts, "scratch_first", clock)
        self._index = RadixIndex(self._pool, 1)

    def serve(self, key: PrefixKey) -> None:
        """Look up, insert what is missing, and let go of it."""
        match = self._index.match(key, min(len(key), self._num_blocks))
        num_hits = len(match.blocks)
        self.num_hits += num_hits
        path, turn = self._index.acquire(key, match), Turn()
        last = self._index.last_entry(path)
        if last is not None:
            self._pool.note_gap(turn, last.uses, last.idle_since_s)
        missing = self._take(min(len(key), self._num_blocks) - num_hits)
        path, _ = self._index.publish(path, key, missing, turn)
        self._index.release(path, turn)

    def _take(self, num_blocks: int) -> "array[int]":
        """Take blocks, evicting what they hold."""
        blocks, account = array("i"), self._pool.accounts.common
        while (most := num_blocks - len(blocks)) > 0:
            victim = self._pool.next_victim(account)
            if victim is None:
                taken = self._pool.take_scratch(most)
            else:
                taken = self._index.evict(victim, most).blocks
            self._pool.charge(account, len(taken))
            blocks.extend(taken)
        return blocks
