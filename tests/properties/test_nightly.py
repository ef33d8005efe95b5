"""Two hundred thousand random steps, each checked: two walks through a thousand worlds and more."""

import pytest

from tests.properties import heart_walk
from tests.properties.test_heart import THINGS
from tests.properties.test_walk import INTERESTING
from tests.properties.walk import WEIGHTS, walk


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_two_hundred_thousand_random_steps_find_caches_and_oracle_of_one_mind():
    times = walk(seed=20_240, num_steps=200_000)
    assert set(times) == INTERESTING | set(WEIGHTS)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_two_hundred_thousand_events_with_everything_switched_on_break_nothing():
    """Windows, tenants, leases, epochs, erasure, events, failures, forks and images at once."""
    met = heart_walk.walk(seed=20_240, num_events=200_000)
    assert min(met[thing] for thing in THINGS) >= 100, met
