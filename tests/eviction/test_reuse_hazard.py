"""The parts of reuse hazard: what an index is, and what lives teach."""

from array import array
from itertools import pairwise

import numpy as np
import pytest

from ostinato.cache.eviction import RequestSummary
from ostinato.cache.radix_index import RadixNode
from ostinato.core.identity import Identity
from ostinato.eviction.hazard_table import EDGES_S, NUM_BINS, HazardTable, gittins
from ostinato.eviction.lifetimes import LifetimeStats
from ostinato.eviction.reuse_hazard import ReuseHazard


def test_the_index_is_the_best_ratio_of_hits_to_seconds_over_all_times_to_give_up():
    """By the definition, sum for sum."""
    rng = np.random.default_rng(1)
    hazards = rng.uniform(0.001, 0.5, (3, NUM_BINS))
    widths = [min(b, 6144.0) - a for a, b in pairwise(EDGES_S)]
    index = gittins(hazards)
    for kind in range(3):
        for first in range(NUM_BINS):
            alive, hits, seconds, best = 1.0, 0.0, 0.0, 0.0
            for place in range(first, NUM_BINS):
                reused = alive * hazards[kind, place]
                hits, seconds = hits + reused, seconds + (alive - reused / 2) * widths[place]
                alive, best = alive - reused, max(best, hits / seconds)
            assert index[kind, first] == pytest.approx(best, rel=1e-9)


def test_what_is_seldom_used_again_is_worth_less_once_that_is_known():
    table = HazardTable((2,))
    assert table.index[0] == table.index[NUM_BINS]
    for _ in range(100):
        table.lives[0] += 100
        table.reused[0] += 50
        table.lives[NUM_BINS] += 100
        table.reused[NUM_BINS] += 1
    table.fit()
    assert table.index[0] > 5 * table.index[NUM_BINS]


def test_lives_count_each_bin_that_they_reach():
    """30 lives of one turn; 12 end in the second bin, between half a second and a second."""
    table = HazardTable((1,))
    lives = LifetimeStats(table)
    cohort = lives.begin(0, now_s=0.0)
    cohort.num_begun = cohort.num_open = 30
    lives.advance(0.6)
    cohort.num_open -= 12
    cohort.num_reused += 12
    lives.advance(2.5)
    assert table.lives[:4].tolist() == pytest.approx([1.0, 1.0, 0.6, 0.0])
    assert table.reused[:4].tolist() == pytest.approx([0.0, 0.4, 0.0, 0.0])


def test_the_index_is_fitted_when_a_victim_is_asked_for_and_not_while_all_fits(
    monkeypatch: pytest.MonkeyPatch,
):
    fits, fit = list[None](), HazardTable.fit
    monkeypatch.setattr(HazardTable, "fit", lambda table: fits.append(fit(table)))
    policy = ReuseHazard(num_blocks=8, clock=lambda: 0.0, requests_per_fit=2)
    for number in range(4):
        entry = RadixNode(None, Identity())
        entry.append(b"", array("i", [number]))
        policy.add([entry], RequestSummary())
    assert not fits

    policy.victim()
    assert fits
    policy.check()
