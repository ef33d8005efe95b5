"""Hash index, radix index and an oracle side by side, wrong calls included.

Hypothesis looks for a short scenario in which they disagree; the random walks go further.
"""

from collections import Counter

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.properties.draw import NIGHTLY_SEEDS, Draw, Event, random_walk, run_drawn_by_hypothesis
from tests.properties.index_scenario import IndexScenario, draw_index_event, draw_index_settings

REQUIRED = {
    *("admitted", "came back", "copied", "copy given up", "doubled", "evicted", "shared"),
    *("failed with followers", "forked", "no room to grow", "refused", "sealed", "misused"),
}
"""What a walk must come by: one that stopped doing so would prove little."""


def start(draw: Draw) -> IndexScenario:
    return IndexScenario(draw_index_settings(draw))


def next_event(scenario: IndexScenario, draw: Draw) -> Event:
    return draw_index_event(draw)


def walk(seed: int, num_events: int, show_progress: bool = False) -> Counter[str]:
    return random_walk(start, next_event, seed, num_events, show_progress)


@settings(suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(st.data())
def test_hypothesis_finds_no_scenario_in_which_indexes_and_oracle_disagree(data: st.DataObject):
    run_drawn_by_hypothesis(start, next_event, data)


@pytest.mark.one_case_in(2)
@pytest.mark.parametrize("seed", [1, 2])
def test_a_random_walk_finds_indexes_and_oracle_agree(seed: int):
    counts = walk(seed, num_events=4_000)
    assert {thing: counts[thing] for thing in REQUIRED if counts[thing] < 10} == {}


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", NIGHTLY_SEEDS)
def test_two_hundred_thousand_events_find_indexes_and_oracle_agree(seed: int):
    counts = walk(seed, num_events=200_000)
    assert {thing: counts[thing] for thing in REQUIRED if counts[thing] < 500} == {}
