"""Two caches that are told to do the same: one with the hash index, one with the radix index.

The discipline is the scheduler's: a step is a plan (sequences that go on, admissions, forks)
and then commit or fail, of all of its tables; a match is admitted at once; whoever is preempted
in the middle of a plan has published nothing in it. Cancelling somebody who has waits for the
end of the step.

The sides part ways when content is computed twice, since the hash index keeps both copies.
Until then they must agree in everything, and on equal content in every match.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import get_args

from ostinato.core.config import CacheConfig, FreeOrder, IndexName, PolicyName
from ostinato.core.identity import Identity, ImageSpan
from ostinato.indexes.block_hash import DigestFunction
from tests.properties.sequences import Live, Prompt
from tests.properties.side import Side
from tests.properties.values import Values

PLACEHOLDER = 1
"""Token id at an image's places; text has it too, so that tokens alone tell nothing."""

MAX_SEQUENCES = 5
"""More would only make the pool look smaller."""

IDENTITIES = (
    Identity(),
    Identity(tenant=b"a tenant"),
    Identity(adapter=b"a tenant"),
    Identity(epoch=1),
)


@dataclass(frozen=True)
class Setting:
    """What kind of world.

    Attributes:
        num_blocks: Blocks in the pool.
        block_size: Tokens per block.
        free_order: Which free block goes first.
        seal_tails: Whether partial last blocks are findable.
        enable_prefix_caching: Off, nothing is shared.
        policy: Who is evicted; only LRU goes by release alone, so only then the sides agree.
        digest_bits: Bits of a digest that differ; 0 makes all contents collide.
    """

    num_blocks: int
    block_size: int
    free_order: FreeOrder = "scratch_first"
    seal_tails: bool = True
    enable_prefix_caching: bool = True
    digest_bits: int = 256
    policy: PolicyName = "lru"

    def config(self, index: IndexName) -> CacheConfig:
        """Return the configuration of one side."""
        return CacheConfig(
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


class World:
    """Both sides, and what is asked of them; numbers choose among what there is."""

    def __init__(self, setting: Setting) -> None:
        """Make two empty caches."""
        self.setting = setting
        values, digest = Values(), setting.digest()
        self.hash_side, self.radix_side = self.sides = [
            Side(setting.config(index), values, digest) for index in sorted(get_args(IndexName))
        ]
        self.alike = self.always_alike = setting.policy == "lru"
        self._num_doubles = 0
        self._next_number = 0
        self._history: list[tuple[int, ...]] = [()]

    # --- what somebody may send ---

    def compose(self, base: int, cut: int, suffix: Iterable[int]) -> tuple[int, ...]:
        """Return the beginning of something sent before, and a new end."""
        known = self._history[base % len(self._history)]
        most = self.setting.num_blocks * self.setting.block_size + 2
        tokens = (*known[: cut % (len(known) + 1)], *suffix)[:most]
        return tokens or (0,)

    def prompt(
        self,
        tokens: tuple[int, ...],
        pictures: Iterable[tuple[int, int, bytes]] = (),
        identity: Identity = IDENTITIES[0],
        reads: bool = True,
        writes: bool = True,
    ) -> Prompt:
        """Return a prompt; pictures (start, length, content) that do not fit are left out."""
        spans: list[ImageSpan] = []
        for start, length, content in sorted(pictures):
            free_from = spans[-1].end if spans else 0
            if free_from <= start and start + length <= len(tokens):
                spans.append(ImageSpan(content, start, length))
        shown = list(tokens)
        for span in spans:
            shown[span.start : span.end] = [PLACEHOLDER] * span.length
        return Prompt(tuple(shown), tuple(spans), identity, reads, writes)

    # --- what can happen ---

    def arrive(self, prompt: Prompt, chunk: int) -> None:
        """Send a prompt; it is admitted if it fits, and waits if not."""
        number = self._take_number()
        self._history = [*self._history[-20:], prompt.tokens]
        for side in self.sides:
            side.arrive(number, prompt)
        self._admit(number, chunk)
        for live in self._both(number):  # nobody waits for what can never be
            if len(self._numbers()) > MAX_SEQUENCES or len(live.key) > self._num_slots:
                self.cancel_number(number)
                break

    def come_back(self, choice: int, chunk: int) -> None:
        """Try to admit somebody who waits."""
        if (number := self._choose(choice, lambda live: live.table is None)) is not None:
            self._admit(number, chunk)

    def go_on(self, choice: int, chunk: int) -> None:
        """Plan more tokens of somebody who runs and is not planned yet."""
        number = self._choose(choice, lambda live: live.table is not None and not live.in_step)
        for side, live in self._sides_of(number):
            if live.table is not None and not live.in_step:
                side.go_on(live, chunk)

    def fork(self, choice: int) -> None:
        """Fork somebody whose tokens this step completes."""
        number = self._choose(choice, _is_complete)
        if number is None or len(self._numbers()) >= MAX_SEQUENCES:
            return
        child = self._take_number()
        for side, live in self._sides_of(number):
            if _is_complete(live):
                side.fork(live, child)

    def preempt(self, choice: int) -> None:
        """Take somebody's blocks back."""
        number = self._choose(choice, lambda live: live.table is not None)
        for side, live in self._sides_of(number):
            if live.table is not None:
                side.give_up(live, come_back=True)

    def cancel(self, choice: int) -> None:
        """End somebody, wherever it stands."""
        if (number := self._choose(choice, lambda live: True)) is not None:
            self.cancel_number(number)

    def cancel_number(self, number: int) -> None:
        """End a sequence on both sides."""
        for side, live in self._sides_of(number):
            self._history = [*self._history[-20:], tuple(live.key.tokens)]
            side.give_up(live, come_back=False)

    def misuse(self, choice: int) -> None:
        """Call something in a wrong order."""
        for side in self.sides:
            side.misuse(choice)

    def commit(self, bits: int) -> None:
        """Run the step; ``bits`` are the tokens that are sampled."""
        for side in self.sides:
            side.commit(lambda live: bits >> (live.number * 5 + len(live.key)) % 16 & 1)

    def fail(self) -> None:
        """Let the step fail."""
        for side in self.sides:
            side.fail()

    def reset(self) -> None:
        """Preempt everybody and forget everything; not while a step is under way."""
        if any(side.step for side in self.sides):
            return
        for side in self.sides:
            side.reset()
        mine, other = ({n: live.key.packed for n, live in side.sequences.items()}
                       for side in self.sides)  # fmt: skip
        self.alike = mine == other and self.setting.policy == "lru"
        self._num_doubles = self.radix_side.prefix_cache.stats.duplicate_blocks

    def finish(self) -> None:
        """End the step and everybody in it; then nothing may be left (law 9)."""
        self.commit(0)
        for number in self._numbers():
            self.cancel_number(number)
        self.check()
        for side in self.sides:
            assert side.manager.num_live_tables == 0
            assert side.manager.pool.num_free == self.setting.num_blocks

    # --- what is compared ---

    def check(self) -> None:
        """Check each side, and the one against the other."""
        for side in self.sides:
            side.check()
        if self.radix_side.prefix_cache.stats.duplicate_blocks != self._num_doubles:
            self.alike = self.always_alike = False
        if not self.alike:
            return
        assert self.hash_side.queue() == self.radix_side.queue(), "orders of eviction"
        assert self.hash_side.held() == self.radix_side.held(), "references"
        if self.always_alike:
            assert self.hash_side.prefix_cache.stats == self.radix_side.prefix_cache.stats

    def met(self) -> Counter[str]:
        """Count what has happened so far, on both sides together."""
        met = self.hash_side.met + self.radix_side.met
        for side in self.sides:
            stats = side.prefix_cache.stats
            met["evicted"] += stats.evicted_blocks
            met["sealed"] += stats.sealed_tails
            met["doubled"] += stats.duplicate_blocks
            met["came back"] += stats.preempted.num_requests
        return met

    # --- small print ---

    @property
    def _num_slots(self) -> int:
        return self.setting.num_blocks * self.setting.block_size

    def _take_number(self) -> int:
        self._next_number += 1
        return self._next_number

    def _admit(self, number: int, chunk: int) -> None:
        """Look up on both sides, compare, and admit."""
        waiting = [(side, live) for side, live in self._sides_of(number) if live.table is None]
        matches = [side.look_up(live) for side, live in waiting]
        if len(matches) == 2 and self.hash_side.contents() == self.radix_side.contents():
            keys = [live.key.packed for _, live in waiting]
            if keys[0] == keys[1]:
                assert matches[0].num_tokens == matches[1].num_tokens, "equal content, equal hits"
        for (side, live), match in zip(waiting, matches, strict=True):
            side.admit(live, match, chunk)

    def _numbers(self) -> list[int]:
        return sorted({number for side in self.sides for number in side.sequences})

    def _both(self, number: int) -> list[Live]:
        return [live for _, live in self._sides_of(number)]

    def _sides_of(self, number: int | None) -> list[tuple[Side, Live]]:
        return [
            (side, side.sequences[number])
            for side in self.sides
            if number is not None and number in side.sequences
        ]

    def _choose(self, choice: int, may: Callable[[Live], bool]) -> int | None:
        """Pick a sequence of which something may be asked on one side at least."""
        numbers = [n for n in self._numbers() if any(may(live) for live in self._both(n))]
        return numbers[choice % len(numbers)] if numbers else None


def _is_complete(live: Live) -> bool:
    """Whether the running step computes all tokens of a sequence so far."""
    return live.in_step and live.planned == len(live.key) and not live.is_cancelled
