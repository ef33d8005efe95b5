"""No step is far above its time because something in it was never measured before.

Each scene brings work of a kind that the engine's steps have not had, in simulated time.
"""

from collections.abc import Callable
from dataclasses import replace

import pytest

from ostinato.assembly import build_cache
from ostinato.scheduling.learned_prices import MAX_LATE, LearnedPrices, max_certain_tokens
from ostinato.scheduling.step_prices import StepPrices, Work, prompt_pairs
from ostinato.settings import PrefixCacheConfig, StateConfig
from tests.support.cache.timed_scheduler import PRICES, TimedScheduler

DEEP = replace(PRICES, pair_s=2e-6)
"""Behind 2,000 tokens attention costs as much as the rest of a token, behind 13,000 six times."""


def settled(true_prices: StepPrices = PRICES, **config: object) -> TimedScheduler:
    """Return a scheduler that has measured a stream, short prompts, and nothing else."""
    timed = TimedScheduler(False, true_prices, **config)
    timed.add("stream", 1, max_tokens=10_000)
    for number in range(8):
        timed.add(f"short {number}", 150)
        while timed.scheduler.num_waiting or len(timed.plan.sequences) > 1:
            timed.step()
    return timed


def check_steps(timed: TimedScheduler, slowdown: float = 1.0, num_steps: int = 80) -> None:
    """Run steps, and compare each with the limit that it has where all prices are known."""
    for number in range(num_steps):
        computed = timed.step(slowdown)
        bound_s = MAX_LATE * max(timed.limit_s, 0.250)
        assert timed.took_s <= bound_s, f"step {number} computed {computed}"


@pytest.mark.parametrize("prices", [PRICES, DEEP], ids=["flat", "deep"])
def test_cold_start(prices):
    timed = TimedScheduler(False, prices)
    timed.add("stream", 1, max_tokens=10_000)
    timed.add("long", 13_000)
    check_steps(timed)


def test_after_an_hour_without_requests():
    timed = settled()
    timed.scheduler.cancel(next(iter(timed.scheduler.requests.live)))
    timed.now_s += 3_600.0
    timed.add("stream again", 1, max_tokens=10_000)
    timed.add("long", 4_000)
    check_steps(timed, num_steps=40)


def test_after_many_steps_that_only_decode():
    """The prices of prompts are as they were measured, whatever decodes say since."""
    timed = settled()
    for number in range(200):
        timed.step(slowdown=0.9 + 0.2 * (number * 37 % 100) / 100)
    timed.add("long", 4_000)
    for _ in range(20):
        timed.step()
        assert timed.took_s <= 1.15 * timed.limit_s


def test_more_sequences_than_ever():
    timed = settled(max_num_seqs=64)
    for number in range(60):
        timed.add(f"stream {number}", 3, max_tokens=10_000)
    timed.add("long", 4_000)
    check_steps(timed, num_steps=40)


def test_a_longer_prompt_than_ever():
    timed = settled(DEEP)
    timed.add("long", 5_000)
    check_steps(timed, num_steps=150)


def test_a_hit_behind_more_keys_than_ever():
    """The prefix comes from a tier or another engine: its 13,000 tokens were not computed here."""
    before = TimedScheduler(True, DEEP)
    before.serve("computed elsewhere", 0, first="P" * 13_000)
    timed = settled(DEEP, cache=before.cache)
    timed.add("hit", 100, first="P" * 13_000)
    check_steps(timed)
    assert timed.scheduler.num_running == 1, "it is served"


@pytest.mark.parametrize("num_tokens", [2_048, 13_000])
def test_a_hit_waits_for_no_other_prompt_though_only_its_prefix_was_computed(num_tokens):
    """No other steps had as many keys, and those of the prefix took longer than a step may now."""
    timed = TimedScheduler(False, StepPrices(0.17, 8.5e-3, 3e-7), max_num_seqs=16)
    timed.serve("prefix", 0, first="P" * num_tokens)
    for number in range(4):
        timed.add(f"stream {number}", 64, max_tokens=10_000)
    check_steps(timed, num_steps=40)
    timed.add("long", 6_000)
    check_steps(timed, num_steps=3)
    timed.add("hit", 32, first="P" * num_tokens)
    check_steps(timed, num_steps=3)
    assert "hit" not in timed.scheduler.requests.live


def test_a_hit_behind_many_keys_is_the_first_request():
    before = TimedScheduler(True, DEEP)
    before.serve("computed elsewhere", 0, first="P" * 13_000)
    timed = TimedScheduler(False, DEEP, before.cache)
    timed.add("stream", 1, max_tokens=10_000)
    timed.add("hit", 100, first="P" * 13_000)
    check_steps(timed)


@pytest.mark.parametrize("slowdown", [1.5, 1.9], ids=["adapters", "images ahead"])
def test_tokens_that_cost_more_than_those_that_were_measured(slowdown):
    """Adapters, an image's rest ahead: dearer from one step to the next, and learned in five."""
    timed = settled()
    timed.add("long", 4_000)
    for _ in range(10):
        timed.step()
    check_steps(timed, slowdown, num_steps=6)
    for _ in range(30):
        timed.step(slowdown)
        assert timed.took_s <= 1.2 * max(0.250, slowdown * timed.limit_s)


def test_states_keep_their_chunks_and_no_more():
    """A chunk of 64 tokens takes twice the limit: the elder and the shortest have one each."""
    states = StateConfig(num_slots=32, unit=64)
    cache = build_cache(PrefixCacheConfig(4_000, 4, states=states))
    timed = TimedScheduler(False, replace(PRICES, token_s=0.008), cache)
    timed.add("stream", 1, max_tokens=10_000)
    for number in range(3):
        timed.add(f"long {number}", 700)
    for _ in range(40):
        computed = timed.step()
        assert sum(computed.values()) <= 2 * 64 + 2, computed


def bound_of(prices: StepPrices, works: list[Work]) -> Callable[[float, Work, int], int]:
    """Return how many tokens are certain by measured works."""
    measured = [(work, prices.seconds(work)) for work in works]
    return lambda seconds, planned, start: max_certain_tokens(
        measured, seconds, planned, start, 10**6
    )


@pytest.mark.parametrize("start", [0, 100, 5_000])
@pytest.mark.parametrize(
    "prices",
    [
        StepPrices(0.01, 1e-3, 0.0),
        StepPrices(0.0, 0.0, 1e-6),
        StepPrices(0.01, 0.0, 1e-7, key_s=1e-5),
        StepPrices(0.04, 1e-3, 1e-6, key_s=1e-6, free_tokens=8),
    ],
)
def test_what_is_certain_is_within_the_time_if_a_key_costs_at_most_128_pairs(prices, start):
    works = [Work(1, 1, 300, 300), Work(1, 33, 900, 332), Work(1, 65, 70_000, 1_300)]
    certain = bound_of(prices, works)
    for seconds in (0.05, 0.5, 5.0):
        planned = Work(1, 4, 800, 800)
        num_tokens = certain(seconds, planned, start)
        work = Work(
            1,
            4 + num_tokens,
            800 + prompt_pairs(start, num_tokens),
            800 + (start + num_tokens if num_tokens else 0),
        )
        assert num_tokens == 0 or prices.seconds(work) <= seconds * (1 + 1e-9)


def test_a_slow_machine_is_known_within_five_steps_and_forgotten_in_as_many():
    learned = LearnedPrices()
    for number in range(60):
        work = Work(1, *((5, 1_000), (65, 3_000), (65, 9_000))[number % 3], 400)
        learned.note(work, PRICES.seconds(work))
    work = Work(1, 65, 3_000, 400)
    for slowdown, num_steps in ((4.0, 5), (1.0, 5), (1.0, 15)):
        for _ in range(num_steps):
            learned.note(work, slowdown * PRICES.seconds(work))
        assert learned.now is not None
        for other in (work, Work(1, 5, 1_000, 400)):
            expected_s = slowdown * PRICES.seconds(other)
            assert learned.now.seconds(other) == pytest.approx(expected_s, rel=0.1)


def test_decodes_of_a_slow_minute_do_not_make_prompts_look_cheap():
    """As in the first seconds of a process; what is measured later is faster, not the machine."""
    timed = TimedScheduler(knows_prices=False)
    timed.add("stream", 1, max_tokens=4_000)
    for _ in range(20):
        timed.step(slowdown=3.0)
    timed.serve("first", 600)
    for _ in range(10):
        timed.step()
    timed.add("long", 4_000)
    for _ in range(20):
        timed.step()
        assert timed.took_s <= 1.1 * timed.limit_s
