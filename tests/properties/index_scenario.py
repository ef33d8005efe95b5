"""Two caches that get the same calls: one with the hash index, one with the radix index.

The discipline is the scheduler's: a step is a plan (running sequences that continue, admissions,
forks) and then commit or fail, of all of its tables; a match is admitted at once; a sequence that
is preempted while a step is planned has published nothing in it. Cancelling one that has published
waits for the end of the step.

The caches differ once content is computed twice, since the hash index keeps both copies. Until
then they must agree in everything, and on equal content in every match.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import get_args

from ostinato.core.identity import Identity, ImageSpan, PrefixKey
from ostinato.indexes.block_hash import DigestFunction
from ostinato.settings import FreeOrder, IndexName, PolicyName, PrefixCacheConfig
from tests.properties.draw import Choices, Draw, Event, draw_event, rarely, weighted
from tests.properties.drawn_cache import DrawnCache, Waiting
from tests.support.cache.cache_views import letters
from tests.support.cache.wrong_calls import make_wrong_call

PLACEHOLDER = "B"
"""The token at an image's places; text has it too, so that tokens alone tell nothing."""

MAX_SEQUENCES = 5
"""More would only make the pool look smaller."""


@dataclass(frozen=True)
class IndexSettings:
    """Settings of both caches.

    Attributes:
        policy: Which block is evicted; under LRU alone both caches choose the same one.
        digest_bits: Bits of a digest that differ; 0 makes all contents collide.
    """

    num_blocks: int
    block_size: int
    free_order: FreeOrder = "unused_first"
    seal_tails: bool = True
    enable_prefix_caching: bool = True
    digest_bits: int = 256
    policy: PolicyName = "lru"

    def config(self, index: IndexName) -> PrefixCacheConfig:
        """Return the settings of one cache."""
        return PrefixCacheConfig(
            num_blocks=self.num_blocks,
            block_size=self.block_size,
            index=index,
            free_order=self.free_order,
            eviction_policy=self.policy,
            seal_tails=self.seal_tails,
            enable_prefix_caching=self.enable_prefix_caching,
        )

    def digest(self) -> DigestFunction | None:
        """Return a digest function that collides as often as wanted."""
        if self.digest_bits >= 256:
            return None
        return lambda data: bytes([sum(data) % 2**self.digest_bits])


_LRU: PolicyName = "lru"
_POLICIES = (*[_LRU] * 5, *get_args(PolicyName))


def draw_index_settings(draw: Draw) -> IndexSettings:
    """Draw settings: mostly small, sometimes with caching off or digests that collide."""
    return IndexSettings(
        num_blocks=draw((1, 2, 3, 4, 5, 6, 8, 10, 12, 12)),
        block_size=draw((1, 2, 3, 4)),
        free_order=draw(get_args(FreeOrder)),
        seal_tails=draw((True, True, False)),
        enable_prefix_caching=not draw(rarely(0.05)),
        digest_bits=draw((256, 256, 256, 2, 0)),
        policy=draw(_POLICIES),
    )


def _draw_images(draw: Draw) -> list[tuple[int, int, bytes]]:
    """Draw start, length and content of images; they are left out where they do not fit."""
    num_images = draw((0, 0, 0, 0, 0, 1, 2))
    return [
        (draw(range(6)), draw((1, 2, 3, 4, 5)), draw((b"cat", b"dog"))) for _ in range(num_images)
    ]


WEIGHTS = {"go_on": 26, "commit": 24, "arrive": 22, "cancel": 13, "come_back": 5, "fork": 5}
WEIGHTS |= {"preempt": 4, "misuse": 4, "fail": 3, "reset": 1}

_NAMES, _NUMBER, _CHUNKS = weighted(WEIGHTS), range(1000), (100, 100, 1, 2, 3, 5)
_ARGUMENTS: Mapping[str, Mapping[str, Choices]] = {
    "arrive": {
        "base": _NUMBER,
        "cut": (*[-1] * 40, *range(40)),  # -1: all of it, as in the next turn of a chat
        "suffix": lambda draw: "".join(draw("AB") for _ in range(draw((0, 1, 1, 2, 2, 3, 4, 9)))),
        "chunk": _CHUNKS,
        "images": _draw_images,
        "identity": [
            *[Identity()] * 16,
            Identity(tenant=b"a tenant"),
            Identity(adapter=b"a tenant"),
            Identity(weights=b"others"),
        ],
        "reads": [not no for no in rarely(0.07)],
        "writes": [not no for no in rarely(0.07)],
    },
    "come_back": {"choice": _NUMBER, "chunk": _CHUNKS},
    "go_on": {"choice": _NUMBER, "chunk": _CHUNKS},
    "commit": {"bits": range(2**16)},
    **{name: {"choice": _NUMBER} for name in ("fork", "preempt", "cancel", "misuse")},
}


def draw_index_event(draw: Draw) -> Event:
    """Draw what happens next."""
    return draw_event(draw, _NAMES, _ARGUMENTS)


May = Callable[[DrawnCache, str], bool]
"""Whether something may be asked of a sequence in a cache."""


class IndexScenario:
    """Both caches, and the events that may happen to them; numbers choose among what there is."""

    def __init__(self, settings: IndexSettings) -> None:
        self.settings = settings
        self.hash, self.radix = self.caches = [
            DrawnCache(settings.config(index), settings.digest())
            for index in sorted(get_args(IndexName))
        ]
        self.alike = self.always_alike = settings.policy == "lru"
        self._num_duplicates = 0
        self._num_sequences = 0
        self._history = [""]

    @property
    def counts(self) -> Counter[str]:
        """What has happened so far, and how often, in both caches together."""
        counts = self.hash.counts + self.radix.counts
        for stats in [cache.prefix_cache.stats for cache in self.caches]:
            counts["evicted"] += stats.evicted_blocks
            counts["sealed"] += stats.sealed_tails
            counts["doubled"] += stats.duplicate_blocks
            counts["came back"] += stats.preempted.num_requests
        return counts

    # --- events ---

    def arrive(
        self,
        base: int,
        cut: int,
        suffix: str,
        chunk: int,
        images: list[tuple[int, int, bytes]],
        identity: Identity,
        reads: bool,
        writes: bool,
    ) -> None:
        """Send the beginning of a known prompt and a new end; it waits if it does not fit."""
        known = self._history[base % len(self._history)]
        text = (known[: cut % (len(known) + 1)] + suffix)[: self._num_slots + 2] or "A"
        shown, spans = _with_images(text, images)
        self._history = [*self._history[-20:], shown]
        name = self._new_name()
        for cache in self.caches:
            key = PrefixKey(identity, map(ord, shown), spans)
            cache.waiting[name] = Waiting(key, reads, writes)
        self._admit(name, chunk)
        if name in self._names():  # what can never fit does not wait
            too_long = any(len(c.keys()[name]) > self._num_slots for c in self._with(name))
            if too_long or len(self._names()) > MAX_SEQUENCES:
                self._cancel(name)
        self.check()

    def come_back(self, choice: int, chunk: int) -> None:
        """Try to admit a waiting sequence."""
        for name in self._choose(choice, lambda cache, name: name in cache.waiting):
            self._admit(name, chunk)
        self.check()

    def go_on(self, choice: int, chunk: int) -> None:
        """Plan more tokens of a running sequence that is not planned yet."""

        def may(cache: DrawnCache, name: str) -> bool:
            return name in cache.sequences and not cache.is_planned(name)

        for name in self._choose(choice, may):
            for cache in self._with(name, may):
                cache.grow(name, chunk)
        self.check()

    def fork(self, choice: int) -> None:
        """Fork a sequence whose tokens this step completes."""
        if len(self._names()) < MAX_SEQUENCES:
            for name in self._choose(choice, DrawnCache.is_complete):
                child = self._new_name()
                for cache in self._with(name, DrawnCache.is_complete):
                    cache.fork_off(name, child)
        self.check()

    def preempt(self, choice: int) -> None:
        """Take a running sequence's blocks back."""

        def runs(cache: DrawnCache, name: str) -> bool:
            return name in cache.sequences

        for name in self._choose(choice, runs):
            for cache in self._with(name, runs):
                cache.give_up(name, come_back=True)
        self.check()

    def cancel(self, choice: int) -> None:
        """End a sequence, running or waiting."""
        for name in self._choose(choice):
            self._cancel(name)
        self.check()

    def misuse(self, choice: int) -> None:
        """Make a call that is wrong now; what is compared afterwards sees that it was refused."""
        for cache in self.caches:
            live = [sequence.table for sequence in cache.sequences.values()]
            misused = make_wrong_call(cache.manager, live, cache.released[-2:], choice)
            cache.counts["misused"] += misused
        self.check()

    def commit(self, bits: int) -> None:
        """Run the step; ``bits`` are the tokens that are sampled."""
        for cache in self.caches:
            cache.run_step(lambda name, end: "AB"[bits >> (int(name) * 5 + end) % 16 & 1])
        self.check()

    def fail(self) -> None:
        """Let the step fail."""
        for cache in self.caches:
            cache.run_failing_step()
        self.check()

    def reset(self) -> None:
        """Preempt everything and empty the caches; not while a step is under way."""
        if not any(cache.is_planned(n) for cache in self.caches for n in cache.sequences):
            for cache in self.caches:
                cache.preempt_all_and_reset()
            mine, other = (
                {name: key.tokens for name, key in cache.keys().items()} for cache in self.caches
            )
            self.alike = mine == other and self.settings.policy == "lru"
            self._num_duplicates = self.radix.prefix_cache.stats.duplicate_blocks
        self.check()

    def finish(self) -> None:
        """End the step and every sequence; then nothing is held (law 9)."""
        self.commit(0)
        for name in self._names():
            self._cancel(name)
        self.check()
        for cache in self.caches:
            assert cache.manager.num_live_tables == 0
            assert cache.manager.pool.num_free == self.settings.num_blocks

    # --- what is compared ---

    def check(self) -> None:
        """Check each cache, and the one against the other."""
        for cache in self.caches:
            assert cache.calls.oracle is not None, "others have changed the cache"
            cache.check()
        if self.radix.prefix_cache.stats.duplicate_blocks != self._num_duplicates:
            self.alike = self.always_alike = False
        if not self.alike:
            return
        assert self.hash.queue() == self.radix.queue(), "orders of eviction"
        assert self.hash.held() == self.radix.held(), "references"
        if self.always_alike:
            assert self.hash.timeless_stats() == self.radix.timeless_stats()

    # --- helpers ---

    @property
    def _num_slots(self) -> int:
        return self.settings.num_blocks * self.settings.block_size

    def _new_name(self) -> str:
        self._num_sequences += 1
        return str(self._num_sequences)

    def _admit(self, name: str, chunk: int) -> None:
        """Look up in both caches, compare, and admit."""
        waiting = [cache for cache in self.caches if name in cache.waiting]
        keys = [cache.waiting[name].key for cache in waiting]
        if len(keys) == 2 and keys[0].tokens == keys[1].tokens:
            found = [c.look_up(key).num_tokens for c, key in zip(waiting, keys, strict=True)]
            if self.hash.contents() == self.radix.contents():  # with what the look-up published
                assert found[0] == found[1], "equal content, equal hits"
        for cache in waiting:
            cache.try_to_admit(name, chunk)

    def _cancel(self, name: str) -> None:
        for cache in self._with(name):
            self._history = [*self._history[-20:], letters(cache.keys()[name].tokens)]
            cache.give_up(name, come_back=False)

    def _names(self) -> list[str]:
        return sorted(
            {name for cache in self.caches for name in [*cache.sequences, *cache.waiting]}, key=int
        )

    def _with(self, name: str, may: May = lambda cache, name: True) -> list[DrawnCache]:
        """Return the caches that have a sequence, of which something may be asked there."""
        return [
            cache
            for cache in self.caches
            if name in {**cache.sequences, **cache.waiting} and may(cache, name)
        ]

    def _choose(self, choice: int, may: May = lambda cache, name: True) -> list[str]:
        """Pick a sequence of which something may be asked in a cache, if there is one."""
        names = [name for name in self._names() if self._with(name, may)]
        return [names[choice % len(names)]] if names else []


def _with_images(
    text: str, images: list[tuple[int, int, bytes]]
) -> tuple[str, tuple[ImageSpan, ...]]:
    """Return a text with the placeholders of those images that fit, and these."""
    spans: list[ImageSpan] = []
    for start, length, content in sorted(images):
        free_from = spans[-1].end if spans else 0
        if free_from <= start and start + length <= len(text):
            spans.append(ImageSpan(content, start, length))
    for span in spans:
        text = text[: span.start] + PLACEHOLDER * span.length + text[span.end :]
    return text, tuple(spans)
