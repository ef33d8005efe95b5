"""An embedder's calls in any order: each is refused and changes nothing, or all KV stays right.

Unlike the scheduler it publishes a sequence several times in a step, forks between steps, admits
old matches, and releases what is under way.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from ostinato.cache.prefix_index import PrefixMatch
from ostinato.core.errors import CacheMisuse, PromptTooLong
from ostinato.settings import PrefixCacheConfig, StateConfig, WindowConfig, window_blocks
from tests.properties.draw import Choices, Draw, Event, draw_event, random_walk, weighted
from tests.support.cache_views import prefix_key
from tests.support.tiny_cache import Sequence, TinyCache
from tests.support.whole_state import whole_state


class AnyOrder(TinyCache):
    """A tiny cache, and matches that wait to be admitted; ``which`` chooses among what there is."""

    def __init__(self, settings: PrefixCacheConfig) -> None:
        super().__init__(settings)
        self.settings, self.calls.oracle = settings, None
        self._matches: list[PrefixMatch] = []
        self._states: dict[int, tuple[int, ...]] = {}  # by slot: the tokens that it comes from

    def look(self, prompt: str) -> None:
        """Match a prompt, to be admitted later."""
        self._matches.append(self.manager.match(prefix_key(prompt)))

    def admit_match(self, which: int, writes: bool) -> None:
        """Admit a match, however old."""
        if self._matches:
            match = self._matches.pop(which % len(self._matches))
            with self._refused():
                admitted = self.manager.admit(match.key, match, writes=writes)
                if admitted is not None:
                    name = f"s{admitted[0].table_id}"
                    self._begin(name, *admitted, admitted[0].num_cached_tokens)

    def publish(self, which: int, more: int) -> None:
        """Compute more tokens of a sequence in this step, perhaps none, or more than have slots."""
        if (sequence := self._some(which)) is not None:
            with self._refused():
                end = min(len(sequence.table.key), sequence.num_computed + more)
                self._publish(sequence, end)

    def extend(self, which: int, letter: str) -> None:
        """Append a token, if there is a slot for it."""
        sequence = self._some(which)
        if sequence and self.manager.grow(sequence.table, len(sequence.table.key) + 1):
            sequence.table.key.append(ord(letter))

    def split(self, which: int) -> None:
        """Fork a sequence."""
        if (sequence := self._some(which)) is not None:
            with self._refused():
                forked = self.manager.fork(sequence.table)
                if forked is not None:
                    self._begin(f"s{forked[0].table_id}", *forked, sequence.num_computed)
                    self.counts["forked"] += 1

    def release(self, which: int) -> None:
        """End a sequence, wherever it is."""
        if (sequence := self._some(which)) is not None:
            with self._refused():
                self.manager.release(sequence.table, sequence.num_computed)
                self._forget_ended()

    def commit_step(self) -> None:
        """Run the step; what is computed continues what is there."""
        loads, saves = self.manager.state_copies
        for copy in loads:
            self._states[copy.target] = self._states.get(copy.source, ())
        for sequence in self.sequences.values() if self.settings.states else ():
            slot, tokens = sequence.table.state_slot, tuple(sequence.table.key.tokens)
            if sequence.num_computed > sequence.num_written:
                assert self._states[slot] == tokens[: sequence.num_written], "another's state"
                self._states[slot] = tokens[: sequence.num_computed]
        for copy in saves:
            self._states[copy.target] = self._states[copy.source]
        self._run_step(fails=False)
        self.manager.commit()
        for sequence in self._step:
            sequence.num_written = sequence.num_computed
        self._step = []
        self.check()

    def fail_step(self) -> None:
        """Let the step raise."""
        self._run_step(fails=True)
        self._step = []
        self.manager.fail()
        self._forget_ended()
        self.check()
        self.counts["failed"] += 1

    def finish(self) -> None:  # type: ignore[override]
        """Run the step, and let every sequence end."""
        self.commit_step()
        while self.sequences:
            self.release(0)

    def _some(self, which: int) -> Sequence | None:
        names = [*self.sequences]
        return self.sequences[names[which % len(names)]] if names else None

    def _forget_ended(self) -> None:
        self.sequences = {n: s for n, s in self.sequences.items() if s.table.table_id >= 0}

    @contextmanager
    def _refused(self) -> Iterator[None]:
        """See that a refusal changes nothing."""
        before = whole_state(self.manager)
        try:
            yield
        except (CacheMisuse, PromptTooLong):
            assert whole_state(self.manager) == before, "a refusal changed something"
            self.counts["refused"] += 1
        self.prefix_cache.check()


def start(draw: Draw) -> AnyOrder:
    size = draw((2, 4))
    window, unit = draw((1, 3, 5, 9)), size * draw((1, 2))
    least = window_blocks(window, size)
    return AnyOrder(
        PrefixCacheConfig(
            num_blocks=draw((6, 9, 14)),
            block_size=size,
            index=draw(("radix", "hash")),
            windows=draw(((), (WindowConfig(window, least + draw((1, 4, 8))),))),
            states=draw((None, StateConfig(draw((3, 5, 9)), unit, draw((0, 1, 2))))),
        )
    )


def prompt(draw: Draw) -> str:
    """Draw a prompt that repeats itself, of at most 16 letters."""
    return (draw(("A", "AB", "AAB", "ABBB")) * 16)[: draw(range(1, 17))]


WHICH: dict[str, Choices] = {"which": range(8)}
ARGUMENTS: dict[str, dict[str, Choices]] = {
    "look": {"prompt": prompt},
    "admit_match": WHICH | {"writes": (True, True, False)},
    "publish": WHICH | {"more": (0, 1, 2, 4, 8, 16)},
    "extend": WHICH | {"letter": "AB"},
    "split": WHICH,
    "release": WHICH,
}
NAMES = weighted(
    {"look": 3, "admit_match": 4, "publish": 4, "extend": 2, "split": 1, "release": 2}
    | {"commit_step": 3, "fail_step": 1}
)


def next_event(scenario: AnyOrder, draw: Draw) -> Event:
    return draw_event(draw, NAMES, ARGUMENTS)


@pytest.mark.parametrize("seed", [1, 2])
def test_calls_in_any_order_are_refused_or_leave_all_kv_right(seed: int):
    counts = random_walk(start, next_event, seed, num_events=4_000)
    for thing in ("refused", "forked", "failed"):
        assert counts[thing] > 50, thing
