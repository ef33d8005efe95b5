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

from ostinato.core.identity import Identity, ImageSpan
from ostinato.indexes.block_hash import DigestFunction
from ostinato.settings import FreeOrder, IndexName, PolicyName, PrefixCacheConfig
from tests.properties.cache_oracle import KvValues
from tests.properties.cache_under_test import CacheUnderTest, LiveSequence, Prompt
from tests.properties.draw import Choices, Draw, Event, draw_event, rarely, weighted

PLACEHOLDER = 1
"""Token id at an image's places; text has it too, so that tokens alone tell nothing."""

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
            policy=self.policy,
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
        "suffix": lambda draw: [draw((0, 1)) for _ in range(draw((0, 1, 1, 2, 2, 3, 4, 9)))],
        "chunk": _CHUNKS,
        "images": _draw_images,
        "identity": [
            *[Identity()] * 16,
            Identity(tenant=b"a tenant"),
            Identity(adapter=b"a tenant"),
            Identity(epoch=1),
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


class IndexScenario:
    """Both caches, and the events that may happen to them; numbers choose among what there is."""

    def __init__(self, settings: IndexSettings) -> None:
        self.settings = settings
        values, digest = KvValues(), settings.digest()
        self.hash, self.radix = self.caches = [
            CacheUnderTest(settings.config(index), values, digest)
            for index in sorted(get_args(IndexName))
        ]
        self.alike = self.always_alike = settings.policy == "lru"
        self._num_duplicates = 0
        self._next_number = 0
        self._history: list[tuple[int, ...]] = [()]

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
        suffix: list[int],
        chunk: int,
        images: list[tuple[int, int, bytes]],
        identity: Identity,
        reads: bool,
        writes: bool,
    ) -> None:
        """Send the beginning of a known prompt and a new end; it waits if it does not fit."""
        known = self._history[base % len(self._history)]
        tokens = (*known[: cut % (len(known) + 1)], *suffix)[: self._num_slots + 2] or (0,)
        shown, spans = _with_images(tokens, images)
        self._history = [*self._history[-20:], shown]
        number = self._take_number()
        for cache in self.caches:
            cache.arrive(number, Prompt(shown, spans, identity, reads, writes))
        self._admit(number, chunk)
        for _, live in self._in_caches(number):  # what can never fit does not wait
            if len(self._numbers()) > MAX_SEQUENCES or len(live.key) > self._num_slots:
                self._cancel(number)
                break
        self.check()

    def come_back(self, choice: int, chunk: int) -> None:
        """Try to admit a waiting sequence."""
        if (number := self._choose(choice, lambda live: live.table is None)) is not None:
            self._admit(number, chunk)
        self.check()

    def go_on(self, choice: int, chunk: int) -> None:
        """Plan more tokens of a running sequence that is not planned yet."""
        for cache, live in self._chosen(
            choice, lambda live: live.table is not None and not live.in_step
        ):
            cache.go_on(live, chunk)
        self.check()

    def fork(self, choice: int) -> None:
        """Fork a sequence whose tokens this step completes."""
        if len(self._numbers()) < MAX_SEQUENCES and (parents := self._chosen(choice, _is_complete)):
            child = self._take_number()
            for cache, live in parents:
                cache.fork(live, child)
        self.check()

    def preempt(self, choice: int) -> None:
        """Take a running sequence's blocks back."""
        for cache, live in self._chosen(choice, lambda live: live.table is not None):
            cache.give_up(live, come_back=True)
        self.check()

    def cancel(self, choice: int) -> None:
        """End a sequence, running or waiting."""
        if (number := self._choose(choice, lambda live: True)) is not None:
            self._cancel(number)
        self.check()

    def misuse(self, choice: int) -> None:
        """Make a call that is wrong now."""
        for cache in self.caches:
            cache.misuse(choice)
        self.check()

    def commit(self, bits: int) -> None:
        """Run the step; ``bits`` are the tokens that are sampled."""
        for cache in self.caches:
            cache.commit(lambda live: bits >> (live.number * 5 + len(live.key)) % 16 & 1)
        self.check()

    def fail(self) -> None:
        """Let the step fail."""
        for cache in self.caches:
            cache.fail()
        self.check()

    def reset(self) -> None:
        """Preempt everything and empty the caches; not while a step is under way."""
        if not any(cache.step for cache in self.caches):
            for cache in self.caches:
                cache.reset()
            mine, other = (
                {number: live.key.tokens.tobytes() for number, live in cache.sequences.items()}
                for cache in self.caches
            )
            self.alike = mine == other and self.settings.policy == "lru"
            self._num_duplicates = self.radix.prefix_cache.stats.duplicate_blocks
        self.check()

    def finish(self) -> None:
        """End the step and every sequence; then nothing is held (law 9)."""
        self.commit(0)
        for number in self._numbers():
            self._cancel(number)
        self.check()
        for cache in self.caches:
            assert cache.manager.num_live_tables == 0
            assert cache.manager.pool.num_free == self.settings.num_blocks

    # --- what is compared ---

    def check(self) -> None:
        """Check each cache, and the one against the other."""
        for cache in self.caches:
            cache.check()
        if self.radix.prefix_cache.stats.duplicate_blocks != self._num_duplicates:
            self.alike = self.always_alike = False
        if not self.alike:
            return
        assert self.hash.queue() == self.radix.queue(), "orders of eviction"
        assert self.hash.held() == self.radix.held(), "references"
        if self.always_alike:
            assert self.hash.prefix_cache.stats == self.radix.prefix_cache.stats

    # --- helpers ---

    @property
    def _num_slots(self) -> int:
        return self.settings.num_blocks * self.settings.block_size

    def _take_number(self) -> int:
        self._next_number += 1
        return self._next_number

    def _admit(self, number: int, chunk: int) -> None:
        """Look up in both caches, compare, and admit."""
        waiting = [(cache, live) for cache, live in self._in_caches(number) if live.table is None]
        matches = [cache.look_up(live) for cache, live in waiting]
        if len(matches) == 2 and self.hash.contents() == self.radix.contents():
            keys = [live.key.tokens.tobytes() for _, live in waiting]
            if keys[0] == keys[1]:
                assert matches[0].num_tokens == matches[1].num_tokens, "equal content, equal hits"
        for (cache, live), match in zip(waiting, matches, strict=True):
            cache.admit(live, match, chunk)

    def _cancel(self, number: int) -> None:
        for cache, live in self._in_caches(number):
            self._history = [*self._history[-20:], tuple(live.key.tokens)]
            cache.give_up(live, come_back=False)

    def _numbers(self) -> list[int]:
        return sorted({number for cache in self.caches for number in cache.sequences})

    def _in_caches(self, number: int) -> list[tuple[CacheUnderTest, LiveSequence]]:
        caches = [cache for cache in self.caches if number in cache.sequences]
        return [(cache, cache.sequences[number]) for cache in caches]

    def _choose(self, choice: int, may: Callable[[LiveSequence], bool]) -> int | None:
        """Pick a sequence of which something may be asked in one cache at least."""
        numbers = [n for n in self._numbers() if any(may(live) for _, live in self._in_caches(n))]
        return numbers[choice % len(numbers)] if numbers else None

    def _chosen(
        self, choice: int, may: Callable[[LiveSequence], bool]
    ) -> list[tuple[CacheUnderTest, LiveSequence]]:
        """Pick a sequence, in those caches in which it may be asked for something."""
        number = self._choose(choice, may)
        found = [] if number is None else self._in_caches(number)
        return [(cache, live) for cache, live in found if may(live)]


def _is_complete(live: LiveSequence) -> bool:
    """Whether the running step computes all tokens of a sequence so far."""
    return live.in_step and live.planned == len(live.key) and not live.is_cancelled


def _with_images(
    tokens: tuple[int, ...], images: list[tuple[int, int, bytes]]
) -> tuple[tuple[int, ...], tuple[ImageSpan, ...]]:
    """Return tokens with the placeholders of those images that fit, and these."""
    spans: list[ImageSpan] = []
    for start, length, content in sorted(images):
        free_from = spans[-1].end if spans else 0
        if free_from <= start and start + length <= len(tokens):
            spans.append(ImageSpan(content, start, length))
    shown = list(tokens)
    for span in spans:
        shown[span.start : span.end] = [PLACEHOLDER] * span.length
    return tuple(shown), tuple(spans)
