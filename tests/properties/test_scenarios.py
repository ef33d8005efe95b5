"""A scheduler, its cache and everything around them: every law holds in every step.

Hypothesis looks for a short scenario that fails; the random walks go further.
"""

from collections import Counter

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.properties.draw import NIGHTLY_SEEDS, Draw, Event, random_walk, run_drawn_by_hypothesis
from tests.properties.scenario import Scenario
from tests.properties.serial_reference import answer_alone
from tests.properties.settings import draw_scheduler_event, draw_settings
from tests.support.cache.fake_runner import toss_a_coin
from tests.support.cache.tiny_scheduler import make_request, tiny_scheduler

REQUIRED = {
    *("arrived", "refused", "steps", "answers", "prompt log-probs"),
    *("cancelled", "stopped", "failed", "preempted", "overtook", "waited for a prefill"),
    *("admitted", "came back", "shared", "copied", "forked", "sibling without room"),
    *("left the window", "hit through a window", "hit a state", "computed again"),
    "guarantee held",
    *("lease accepted", "lease clipped", "lease rejected", "lease ended", "lease expired"),
    *("lease refreshed", "epochs", "ran on under old weights", "wrote nothing"),
    *("misused", "explained", "erased", "erasure refused", "resets"),
    *("publication accepted", "publication rejected", "unpublished", "continues a public prefix"),
}
"""What a walk must come by: one that stopped doing so would test less than it says."""


def start(draw: Draw) -> Scenario:
    return Scenario(draw_settings(draw))


def next_event(scenario: Scenario, draw: Draw) -> Event:
    return draw_scheduler_event(scenario.settings, draw)


def walk(seed: int, num_events: int, show_progress: bool = False) -> Counter[str]:
    return random_walk(start, next_event, seed, num_events, show_progress)


@settings(suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(st.data())
def test_hypothesis_finds_no_scenario_that_breaks_a_law(data: st.DataObject):
    run_drawn_by_hypothesis(start, next_event, data)


def test_a_random_walk_meets_everything_and_breaks_nothing():
    counts = walk(seed=5, num_events=2_000)
    assert {thing: counts[thing] for thing in REQUIRED if not counts[thing]} == {}


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", NIGHTLY_SEEDS)
def test_two_hundred_thousand_events_break_nothing(seed: int):
    counts = walk(seed, num_events=200_000)
    assert {thing: counts[thing] for thing in REQUIRED if counts[thing] < 50} == {}


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("wish", [{"max_tokens": 7}, {"max_tokens": None}, {"eos": "B"}])
def test_alone_on_a_large_pool_without_a_cache_the_answer_is_the_plain_loops(n: int, wish: dict):
    """So to compare with the loop is to compare with the scheduler when nothing is in its way."""
    wish = {"max_tokens": 7, **wish}
    tiny = tiny_scheduler(
        num_blocks=99, max_model_len=30, enable_prefix_caching=False, sample=toss_a_coin
    )
    tiny.serve("one", "ABBABAB", n=n, **wish)
    request = make_request("one", "ABBABAB", n=n, **wish)
    for seed in range(n):
        answer, reason = answer_alone(request, seed, 30, toss_a_coin)
        name = f"one/{seed}" if seed else "one"
        assert (tiny.outputs[name], tiny.reasons[name]) == (answer, reason)
