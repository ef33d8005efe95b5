"""The parts of reuse hazard: what an index is, what lives teach, what LRU would have done."""

import random
from collections import OrderedDict
from itertools import pairwise

import numpy as np
import pytest

from ostinato.cache.manager import CacheManager
from ostinato.cache.policies.hazard_table import EDGES_S, NUM_BINS, HazardTable, gittins
from ostinato.cache.policies.lives import Lives
from ostinato.cache.policies.reuse_hazard import ReuseHazard
from ostinato.core.config import CacheConfig
from tests.support.tiny_cache import prefix_key


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
        table.count(0, 100, 50)
        table.count(NUM_BINS, 100, 1)
    table.fit()
    assert table.index[0] > 5 * table.index[NUM_BINS]


def test_lives_count_each_bin_that_they_reach():
    """30 lives of one turn; 12 end in the second bin, between half a second and a second."""
    table = HazardTable((1,))
    lives = Lives(table)
    cohort = lives.begin(0, now_s=0.0)
    cohort.num_begun = cohort.num_open = 30
    lives.advance(0.6)
    cohort.num_open -= 12
    cohort.num_reused += 12
    lives.advance(2.5)
    assert table._lives[:4] == pytest.approx([1.0, 1.0, 0.6, 0.0])
    assert table._reused[:4] == pytest.approx([0.0, 0.4, 0.0, 0.0])


def test_the_shadow_knows_what_lru_would_have_found():
    """Its score is the difference to a real LRU cache, block for block."""
    rng, now_s = random.Random(3), 0.0
    cache = CacheManager(
        CacheConfig(200, 4, policy="reuse_hazard", seal_tails=False), clock=lambda: now_s
    )
    lru: OrderedDict[int, None] = OrderedDict()
    difference = num_looked_up = 0
    for number in range(4_000):
        now_s += 0.7
        # A few are asked for often, some after a while, and many never again.
        kind = rng.random()
        name = rng.randrange(40) if kind < 0.3 else number % 190 if kind < 0.6 else number + 1_000
        key = prefix_key(chr(0x100 + name) * 4 + "?")
        match = cache.match(key)
        table, _ = cache.admit(key, match) or pytest.fail("it fits")
        cache.publish(table, 4)
        cache.commit([table])
        cache.release(table, 4)
        difference += len(match.blocks) - (name in lru)
        lru.pop(name, None)
        lru[name] = None
        if len(lru) > 200:
            lru.popitem(last=False)
        num_looked_up += 1
    policy = cache.pool.accounts.common.policy
    assert isinstance(policy, ReuseHazard)
    assert difference > 0.01 * num_looked_up, "it never parted from LRU"
    assert policy._shadow.score == pytest.approx(difference, abs=3)
    cache.check()


def test_it_is_lru_until_it_has_seen_what_comes_back():
    """The first three pools' worth of blocks go as LRU would have them go."""
    cache = CacheManager(CacheConfig(50, 4, policy="reuse_hazard", seal_tails=False))
    policy = cache.pool.accounts.common.policy
    assert isinstance(policy, ReuseHazard)
    for number in range(140):
        key = prefix_key(chr(0x100 + number) * 4 + "?")
        table, _ = cache.admit(key, cache.match(key)) or pytest.fail("it fits")
        cache.publish(table, 4)
        cache.commit([table])
        cache.release(table, 4)
        assert policy.follows_lru
        assert policy.victim() is policy._queue.head
    cache.check()
