"""Calls in any order, with any arguments: each is served or refused, and nothing is corrupted."""

from collections import Counter

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.properties.careless_calls import draw_careless_event, draw_careless_settings
from tests.properties.careless_embedder import CarelessEmbedder
from tests.properties.draw import NIGHTLY_SEEDS, Draw, Event, random_walk, run_drawn_by_hypothesis

REQUIRED = {
    *("admit: done", "admit: StaleMatch", "publish: done", "publish: TableOverrun"),
    *("publish: ReleasedTable", "release: done", "release: StepInProgress", "fork: done"),
    *(
        "pin: done",
        "pin: StepInProgress",
        "unpin: ReleasedTable",
        "fail: done",
        "erase: CacheInUse",
    ),
}
"""What a walk must come by: one that stopped doing so would prove little."""


def start(draw: Draw) -> CarelessEmbedder:
    return CarelessEmbedder(draw_careless_settings(draw))


def next_event(embedder: CarelessEmbedder, draw: Draw) -> Event:
    return draw_careless_event(draw)


def walk(seed: int, num_events: int, show_progress: bool = False) -> Counter[str]:
    return random_walk(start, next_event, seed, num_events, show_progress)


@settings(suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(st.data())
def test_hypothesis_finds_no_order_of_calls_that_corrupts_a_cache(data: st.DataObject):
    run_drawn_by_hypothesis(start, next_event, data)


def test_a_random_walk_of_calls_corrupts_nothing():
    counts = walk(3, num_events=8_000)
    assert {thing: counts[thing] for thing in REQUIRED if counts[thing] < 5} == {}


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", NIGHTLY_SEEDS)
def test_two_hundred_thousand_calls_corrupt_nothing(seed: int):
    counts = walk(seed, num_events=200_000)
    assert {thing: counts[thing] for thing in REQUIRED if counts[thing] < 50} == {}
