"""Whatever happens to the scheduler, in whatever order: every law holds in every step.

Hypothesis looks for a short story in which it errs, and tells it; the random walk goes further.
"""

from typing import get_args

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from ostinato.core.config import WaitingOrder
from tests.sched.alone import answer_alone
from tests.sched.walk import walk
from tests.sched.world import Setting, Wish, World
from tests.support.fake_runner import toss_a_coin
from tests.support.tiny_scheduler import make_request, tiny_scheduler

choices = st.integers(0, 30)
letters = st.text("AB", max_size=9)
worlds = st.builds(
    Setting,
    num_blocks=st.integers(1, 14),
    block_size=st.integers(1, 4),
    index=st.sampled_from(["radix", "hash"]),
    free_order=st.sampled_from(["scratch_first", "classic"]),
    seal_tails=st.booleans(),
    enable_prefix_caching=st.sampled_from([True, True, True, False]),
    max_num_seqs=st.integers(1, 6),
    spare_budget=st.integers(0, 8),
    max_chunk_tokens=st.sampled_from([None, 1, 2, 3, 5]),
    max_model_len=st.sampled_from([2**31, 12]),
    order=st.sampled_from(get_args(WaitingOrder)),
    max_overtakes=st.integers(0, 3),
    windows=st.lists(st.tuples(st.integers(1, 7), st.integers(0, 5)), max_size=2).map(tuple),
)
plain = st.builds(Wish, max_tokens=st.sampled_from([1, 2, 5, None]))
special = st.builds(
    Wish,
    n=st.sampled_from([1, 2, 3, 6]),
    max_tokens=st.sampled_from([1, 2, 5, None]),
    min_tokens=st.sampled_from([0, 2]),
    priority=st.integers(-1, 1),
    tenant=st.integers(0, 3),
    reads=st.booleans(),
    writes=st.booleans(),
    prompt_logprobs=st.booleans(),
    eos=st.sampled_from(["", "B"]),
    ignore_eos=st.booleans(),
    stop=st.sampled_from(["", "A"]),
    image=st.none() | st.tuples(st.integers(0, 5), st.integers(1, 4)),
)


THINGS = {
    *("arrived", "refused", "steps", "answers", "prompt log-probs"),
    *("cancelled", "stopped", "failed", "preempted"),
    *("admitted", "came back", "shared", "copied", "forked", "sibling without room"),
    *("overtook", "waited for a prefill"),
}
"""What a long walk meets."""


class SchedulerMachine(RuleBasedStateMachine):
    """Traffic of which Hypothesis decides everything."""

    @initialize(setting=worlds)
    def begin(self, setting: Setting) -> None:
        """Make a world."""
        self.world = World(setting)

    @rule(base=choices, cut=st.integers(-1, 20), suffix=letters, wish=plain)
    def somebody_sends_text(self, base: int, cut: int, suffix: str, wish: Wish) -> None:
        self.world.arrive(base, cut, suffix, wish)

    @rule(base=choices, cut=st.integers(-1, 20), suffix=letters, wish=special)
    def somebody_has_special_wishes(self, base: int, cut: int, suffix: str, wish: Wish) -> None:
        self.world.arrive(base, cut, suffix, wish)

    @rule()
    def a_step_runs(self) -> None:
        self.world.step()

    @rule(num_steps=st.integers(2, 5))
    def some_steps_run(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.world.step()

    @rule()
    def a_step_fails(self) -> None:
        self.world.fail()

    @rule(choice=choices)
    def somebody_hangs_up(self, choice: int) -> None:
        self.world.cancel(choice)

    @rule(choice=choices)
    def a_stop_string_is_reached(self, choice: int) -> None:
        self.world.stop(choice)

    @rule()
    def everybody_is_preempted(self) -> None:
        self.world.preempt_all()

    @rule()
    def everything_is_forgotten(self) -> None:
        self.world.reset()

    def teardown(self) -> None:
        """Everybody gets to the end; then nothing may be held (law 9)."""
        if hasattr(self, "world"):
            self.world.finish()


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(
    max_examples=350,
    stateful_step_count=40,
    deadline=None,  # a busy machine is no bug
    suppress_health_check=[HealthCheck.too_slow],
    print_blob=True,
)


@pytest.mark.parametrize("seed", range(4))
def test_a_random_walk_meets_everything_and_breaks_nothing(seed: int):
    """7,000 events; a walk that stopped meeting something would test less than it says."""
    met = walk(seed, num_events=7_000)
    assert min(met[thing] for thing in THINGS) >= 20, met


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_a_very_long_random_walk():
    walk(seed=20_240, num_events=200_000)


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("wish", [{"max_tokens": 7}, {"max_tokens": None}, {"eos": "B"}])
def test_alone_on_a_large_pool_without_a_cache_the_answer_is_the_plain_loops(n: int, wish: dict):
    """So to compare with the loop is to compare with the scheduler when nothing is in its way."""
    wish = {"max_tokens": 7, **wish}
    tiny = tiny_scheduler(
        num_blocks=99, max_model_len=30, enable_prefix_caching=False, sample=toss_a_coin
    )
    tiny.add("one", "ABBABAB", n=n, **wish)
    tiny.run()
    request = make_request("one", "ABBABAB", n=n, **wish)
    for seed in range(n):
        answer, reason = answer_alone(request, seed, 30, toss_a_coin)
        name = f"one/{seed}" if seed else "one"
        assert (tiny.outputs[name], tiny.reasons[name]) == (answer, reason)
