"""A tiny cache as drawn scenarios use it: sequences wait, come back, and are cancelled at any time.

The discipline is the scheduler's: a step is a plan (running sequences that continue, admissions,
forks) and then commit or fail, of all of its tables; a sequence that is preempted while a step is
planned has published nothing in it. Cancelling one that has published waits for the step's end.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest

from ostinato.core.identity import PrefixKey
from ostinato.errors import CacheInUse
from ostinato.indexes.block_hash import DigestFunction
from ostinato.observe.counters import CacheStats, Histogram
from ostinato.observe.introspection import CachedBlock, cached_blocks
from ostinato.settings import PrefixCacheConfig
from tests.support.cache.tiny_cache import TinyCache

Content = tuple[bytes, bytes, bytes]
"""A published block's prefix, tokens and images."""


@dataclass(frozen=True)
class Waiting:
    """A sequence that holds no blocks; each cache has its own key, in which it remembers digests.

    Attributes:
        key: Its tokens so far.
        reads: Whether it may hit.
        writes: Whether it publishes.
        preempted: Whether it has run before.
    """

    key: PrefixKey
    reads: bool
    writes: bool
    preempted: bool = False


class DrawnCache(TinyCache):
    """A tiny cache whose sequences may wait, and be cancelled while a step is under way.

    Attributes:
        waiting: Those that hold no blocks, by name.
    """

    def __init__(self, config: PrefixCacheConfig, digest: DigestFunction | None) -> None:
        super().__init__(config, digest)
        self.waiting: dict[str, Waiting] = {}
        self._ran: dict[str, Waiting] = {}  # what those that run were when they waited
        self._cancelled: set[str] = set()

    def keys(self) -> dict[str, PrefixKey]:
        """Return all sequences, waiting or running."""
        running = {name: sequence.table.key for name, sequence in self.sequences.items()}
        return running | {name: waiting.key for name, waiting in self.waiting.items()}

    def is_complete(self, name: str) -> bool:
        """Whether the running step computes all tokens of a sequence so far."""
        sequence = self.sequences.get(name)
        if sequence is None or name in self._cancelled:
            return False
        return self.num_planned(name) == len(sequence.table.key)

    def try_to_admit(self, name: str, chunk: int) -> None:
        """Admit a waiting sequence if it fits, and plan its first chunk."""
        waiting = self.waiting[name]
        admitted = self.plan(
            name,
            waiting.key,
            chunk=chunk,
            reads=waiting.reads,
            writes=waiting.writes,
            preempted=waiting.preempted,
        )
        if admitted is not None:
            self._ran[name] = self.waiting.pop(name)

    def fork_off(self, name: str, child: str) -> None:
        """Make a second continuation, if it fits."""
        if self.fork(name, child) is not None:
            self._ran[child] = self._ran[name]

    def give_up(self, name: str, come_back: bool) -> None:
        """Preempt or cancel a sequence; one that has published waits for the step's end."""
        if name in self.sequences:
            if self.is_in_step(name):
                self._cancelled |= set() if come_back else {name}
                return
            key = self.sequences[name].table.key
            self.finish(name)
            self.waiting[name] = replace(self._ran.pop(name), key=key, preempted=True)
        if not come_back:
            del self.waiting[name]

    def run_step(self, token_of: Callable[[str, int], str]) -> None:
        """Run the step, and sample where a prompt is complete."""
        planned = [name for name in self.sequences if self.is_planned(name)]
        self.commit()
        for name in planned:
            sequence = self.sequences[name]
            if sequence.num_computed == len(sequence.table.key):
                self.generate(name, token_of(name, sequence.num_computed))
        for name in [name for name in planned if name in self._cancelled]:
            self.give_up(name, come_back=False)
        self._cancelled.clear()

    def run_failing_step(self) -> None:
        """Let the step raise: its sequences end."""
        self.fail()
        self._cancelled.clear()

    def preempt_all_and_reset(self) -> None:
        """Empty the cache, which is refused while anything runs."""
        if self.sequences:
            with pytest.raises(CacheInUse, match=f"{len(self.sequences)} running"):
                self.reset()
            self.check()
        for name in list(self.sequences):
            self.give_up(name, come_back=True)
        self.reset()

    def timeless_stats(self) -> CacheStats:
        """Return what was counted, but for times: a run of the radix index has only one."""
        return replace(self.prefix_cache.stats, residencies_s=Histogram())

    def contents(self) -> Counter[Content]:
        """Return all published contents with the number of their copies."""
        return Counter(_content(cached) for cached in cached_blocks(self.manager.index))

    def queue(self) -> list[Content | None]:
        """Return the free queue by content; None for a block without."""
        contents = {c.block: _content(c) for c in cached_blocks(self.manager.index)}
        return [contents.get(block) for block in self.manager.pool.free_order()]

    def held(self) -> Counter[tuple[Content, int]]:
        """Return all published contents with their reference counts."""
        return Counter((_content(c), c.ref_count) for c in cached_blocks(self.manager.index))


def _content(cached: CachedBlock) -> Content:
    return cached.parent, cached.tokens, cached.extra
