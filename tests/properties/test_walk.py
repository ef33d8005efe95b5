"""Thousands of random steps, each checked; ``test_nightly`` goes further."""

import pytest

from tests.properties.walk import WEIGHTS, walk

INTERESTING = {
    *("admitted", "came back", "copied", "copy given up", "doubled", "evicted", "shared"),
    *("failed with followers", "forked", "no room to grow", "refused", "sealed", "misused"),
}
"""What ``Side`` and the statistics count."""


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_random_walk_finds_caches_and_oracle_of_one_mind(seed):
    """And it comes by everything that a cache can meet; else it would prove little."""
    times = walk(seed, num_steps=4_000)
    assert set(times) == INTERESTING | set(WEIGHTS)
    rare = {what: count for what, count in times.items() if count < 10}
    assert not rare
