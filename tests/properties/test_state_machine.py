"""Hypothesis looks for a short story in which a cache errs, and tells it.

The rules are those of ``World``; the random walk next door goes further, this one shrinks.
"""

from typing import get_args

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from ostinato.core.config import PolicyName
from tests.properties.world import IDENTITIES, Setting, World

choices = st.integers(0, 30)
chunks = st.sampled_from([1, 2, 3, 100])
tokens = st.lists(st.integers(0, 1), max_size=9)
pictures = st.tuples(st.integers(0, 5), st.integers(1, 5), st.sampled_from([b"cat", b"dog"]))


class CacheMachine(RuleBasedStateMachine):
    """Hash index, radix index and oracle, side by side."""

    @initialize(
        setting=st.builds(
            Setting,
            num_blocks=st.integers(1, 12),
            block_size=st.integers(1, 4),
            free_order=st.sampled_from(["scratch_first", "classic"]),
            seal_tails=st.booleans(),
            enable_prefix_caching=st.sampled_from([True, True, True, False]),
            digest_bits=st.sampled_from([256, 2, 0]),
            policy=st.sampled_from(["lru"] * 3 + list(get_args(PolicyName)[1:])),
        )
    )
    def begin(self, setting: Setting) -> None:
        """Make a world."""
        self.world = World(setting)

    @rule(base=choices, cut=st.integers(-1, 20), suffix=tokens, chunk=chunks)
    def somebody_sends_text(self, base: int, cut: int, suffix: list[int], chunk: int) -> None:
        self.world.arrive(self.world.prompt(self.world.compose(base, cut, suffix)), chunk)

    @rule(
        base=choices,
        cut=st.integers(-1, 20),
        suffix=tokens,
        chunk=chunks,
        spans=st.lists(pictures, max_size=2),
        identity=st.sampled_from(IDENTITIES),
        reads=st.booleans(),
        writes=st.booleans(),
    )
    def somebody_sends_something_special(
        self, base, cut, suffix, chunk, spans, identity, reads, writes
    ) -> None:
        prompt_tokens = self.world.compose(base, cut, suffix)
        prompt = self.world.prompt(prompt_tokens, spans, identity, reads, writes)
        self.world.arrive(prompt, chunk)

    @rule(choice=choices, chunk=chunks)
    def somebody_comes_back(self, choice: int, chunk: int) -> None:
        self.world.come_back(choice, chunk)

    @rule(choice=choices, chunk=chunks)
    def somebody_goes_on(self, choice: int, chunk: int) -> None:
        self.world.go_on(choice, chunk)

    @rule(choice=choices)
    def somebody_is_forked(self, choice: int) -> None:
        self.world.fork(choice)

    @rule(choice=choices)
    def somebody_is_preempted(self, choice: int) -> None:
        self.world.preempt(choice)

    @rule(choice=choices)
    def somebody_leaves(self, choice: int) -> None:
        self.world.cancel(choice)

    @rule(bits=st.integers(0, 2**16 - 1))
    def the_step_runs(self, bits: int) -> None:
        self.world.commit(bits)

    @precondition(lambda self: any(side.step for side in self.world.sides))
    @rule()
    def the_step_fails(self) -> None:
        self.world.fail()

    @precondition(lambda self: not any(side.step for side in self.world.sides))
    @rule()
    def everything_is_forgotten(self) -> None:
        self.world.reset()

    @rule(choice=choices)
    def something_is_called_in_a_wrong_order(self, choice: int) -> None:
        self.world.misuse(choice)

    @invariant()
    def all_agree(self) -> None:
        self.world.check()

    def teardown(self) -> None:
        """Everybody leaves; then nothing may be held (law 9)."""
        if hasattr(self, "world"):
            self.world.finish()


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(
    max_examples=400,
    stateful_step_count=40,
    deadline=None,  # a busy machine is no bug
    suppress_health_check=[HealthCheck.too_slow],
    print_blob=True,
)
