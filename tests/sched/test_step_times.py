"""Steps are bounded by time, hits go before misses, and long prompts keep a share."""

import pytest

from ostinato.core.ids import RequestId
from ostinato.scheduling.learned_prices import FIRST_TOKENS
from ostinato.scheduling.step_prices import StepPrices, Work
from tests.support.cache.timed_scheduler import PRICES, TimedScheduler
from tests.support.cache.tiny_scheduler import tiny_scheduler


def test_beside_a_stream_a_step_takes_the_limit_and_alone_what_is_fastest():
    timed = TimedScheduler()
    timed.add("stream", 1, max_tokens=100)
    timed.step()
    timed.add("long", 4_000)
    assert timed.step() == {"stream": 1, "long": 55}
    assert 0.240 < timed.took_s <= 0.250
    timed.scheduler.cancel(RequestId("stream"))
    assert timed.step() == {"long": PRICES.tokens_for_rate(0.97, 55, 2048)}


@pytest.mark.parametrize("max_step_ms", [1, 20, 100])
def test_a_step_is_no_shorter_than_what_keeps_nine_tenths_of_the_prompt_rate(max_step_ms):
    """Forty tokens a step, of which four are free: 0.04 / (0.04 + 36 * 0.004) is overhead."""
    timed = TimedScheduler(max_step_ms=max_step_ms)
    timed.add("stream", 1, max_tokens=100)
    timed.step()
    timed.add("long", 1_000)
    num_tokens = timed.step()["long"]
    rate = num_tokens / timed.took_s
    assert rate >= 0.85 / PRICES.token_s
    assert timed.took_s <= max(max_step_ms / 1000, 8 * 0.040)


def test_settings_of_tokens_stay_upper_limits():
    timed = TimedScheduler(max_num_batched_tokens=24, max_num_seqs=8, max_chunk_tokens=16)
    timed.add("stream", 1, max_tokens=100)
    timed.step()
    timed.add("long", 1_000)
    timed.add("other", 1_000)
    assert timed.step() == {"stream": 1, "long": 16, "other": 7}


def test_an_engine_that_has_measured_nothing_takes_small_steps_and_then_the_right_ones():
    timed = TimedScheduler(knows_prices=False)
    timed.add("stream", 1, max_tokens=1_000)
    timed.add("long", 4_000)
    sizes = [timed.step().get("long", 0) for _ in range(30)]
    assert max(sizes[:2]) <= FIRST_TOKENS
    assert all(after <= 2 * max(sizes[:place]) + 2 for place, after in enumerate(sizes) if place)
    assert all(0.200 < 0.040 + size * 0.004 < 0.290 for size in sizes[-5:])


@pytest.mark.parametrize("num_cached", [0, 30, 6_000])
def test_one_request_after_the_other_is_enough_to_measure_by(num_cached: int):
    """Nothing runs beside it, and attention to what is cached is a part of each first step."""
    fast, warm = StepPrices(0.010, 0.001, 1e-7, free_tokens=4), TimedScheduler()
    warm.serve("before", 1, first="W" * num_cached)
    timed = TimedScheduler(knows_prices=False, true_prices=fast, cache=warm.cache)
    timed.add("first", 200, max_tokens=3, first="W" * num_cached)
    assert max(timed.step().values()) <= FIRST_TOKENS
    while timed.scheduler.has_work:
        timed.step()
    timed.add("second", 1_000, first="W" * num_cached)
    assert timed.step()["second"] > 2 * FIRST_TOKENS


def test_a_busy_minute_does_not_spoil_the_prices():
    """Steps take thrice as long for a while: they are predicted soon, and soon again as before."""
    timed = TimedScheduler(knows_prices=False)
    timed.add("stream", 1, max_tokens=4_000)
    timed.add("long", 12_000)
    before = [timed.step() for _ in range(40)][-1]["long"]
    for _ in range(3):  # single slow steps change nothing
        timed.step(slowdown=20.0)
        assert timed.step()["long"] == pytest.approx(before, rel=0.1)
    for slowdown in (3.0, 1.0):
        for _ in range(10):
            timed.step(slowdown)
        assert timed.prices.now is not None
        assert timed.prices.now.token_s == pytest.approx(slowdown * PRICES.token_s, rel=0.1)
        expected_s = slowdown * PRICES.seconds(Work(1, 104, 5_050))
        assert timed.prices.prompt_s(0, 100) == pytest.approx(expected_s, rel=0.1)


def test_a_hit_is_served_in_the_next_step_and_a_long_miss_goes_on_beside_it():
    timed = TimedScheduler()
    timed.add("warm", 0, first="W" * 400)
    while timed.scheduler.has_work:
        timed.step()
    timed.add("long", 4_000)
    timed.step()
    timed.add("hit", 30, first="W" * 400)
    computed = timed.step()
    assert computed["hit"] == 30 and computed["long"] >= 10


def test_a_step_in_which_a_prompt_ends_is_filled_to_its_half():
    """Of the 210 ms beside the weights, prompts that go on leave 105 unused."""
    timed = TimedScheduler()
    timed.add("long", 4_000)
    timed.step()
    timed.add("short", 8)
    assert timed.step() == {"long": 22, "short": 8} and 0.140 < timed.took_s <= 0.145


def test_with_fcfs_a_later_hit_waits():
    timed = TimedScheduler(order="fcfs")
    timed.add("long", 1_000)
    timed.step()
    timed.add("short", 8)
    assert set(timed.step()) == {"long"}


def test_priority_goes_before_what_is_left():
    tiny = tiny_scheduler(num_blocks=64, budget=8, order="shortest_first")
    tiny.add("short", "abc", priority=1)
    tiny.add("urgent", "ABCDEFGHIJKLMNOPQRSTUVWX", priority=-1)
    assert tiny.step() == "urgent:ABCDEFGH"


def test_followers_of_a_prompt_take_nothing_from_it_while_they_wait():
    """The twin waits for the first one, so its share is not kept free."""
    tiny = tiny_scheduler(num_blocks=64, budget=8, order="shortest_first")
    tiny.add("first", "ABCDEFGHIJKLMNOPQRSTUVWX")
    assert tiny.step() == "first:ABCDEFGH"
    tiny.add("twin", "ABCDEFGHIJKLMNOPxy")
    assert tiny.step() == "first:IJKLMNOP twin:................xy"[: len("first:IJKLMNOP")]


def test_the_eldest_prompt_has_a_quarter_of_the_time_beside_shorter_ones():
    """Of the 210 ms beside the weights it has 52: 13 tokens of 4 ms, and the four that are free."""
    timed = TimedScheduler()
    timed.add("long", 4_000)
    timed.step()
    timed.add("short", 200)
    timed.add("other", 200)
    for _ in range(3):
        computed = timed.step()
        assert computed["long"] == 17 and 0.240 < timed.took_s <= 0.250
