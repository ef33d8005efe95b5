"""Counters that cannot lie, in memory that does not grow."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ostinato.observe.counters import MAX_TENANTS, CacheStats, Histogram
from ostinato.tenants.terms import PINNED
from tests.support.cache.cache_views import prefix_key
from tests.support.cache.tiny_cache import tiny_cache

# --- hits ---------------------------------------------------------------------------------


def test_random_prompts_show_no_hits(index):
    """Two hundred prompts of letters drawn from a thousand; none begins like another."""
    draw = random.Random(0)
    firsts = draw.sample(range(1000, 2000), 200)
    cache = tiny_cache(16, index=index)
    for first in firsts:
        cache.serve(chr(first) + "".join(chr(draw.randrange(1000, 2000)) for _ in range(15)))
    stats = cache.prefix_cache.stats
    assert (stats.first.num_requests, stats.first.query_tokens) == (200, 3200)
    assert stats.first.hit_tokens == 0
    assert stats.first.hit_ratio == 0.0


def test_preempted_requests_that_come_back_are_not_counted_as_new_hits(cache):
    """Preempted nine times, each time finding all of itself: the hit ratio stays zero."""
    cache.serve("ABCDEFGHIJ", tenant=b"t")
    for _ in range(9):
        cache.serve("ABCDEFGHIJ", tenant=b"t", preempted=True)
    stats = cache.prefix_cache.stats
    assert (stats.first.num_requests, stats.first.hit_ratio) == (1, 0.0)
    assert (stats.preempted.num_requests, stats.preempted.hit_tokens) == (9, 81)
    assert stats.tenants[b"t"].num_requests == 1, "nor in a tenant's counts"


def test_look_ups_leases_and_refusals_count_nothing(index):
    """Only admission counts, once."""
    cache = tiny_cache(4, index=index)
    cache.serve("ABCDEFGH")
    counted = repr(cache.prefix_cache.stats.first)
    for _ in range(3):
        cache.match("ABCDEFGHI")
        cache.prefix_cache.admin.lease(prefix_key("ABCDEFGH"), PINNED)
        assert cache.admit("too long", "ABCDEFGHIJKLMNOPQRSTU") is None
    assert repr(cache.prefix_cache.stats.first) == counted


def test_each_tenant_is_counted_by_itself(index):
    """One repeats itself, the other never does; the sum is the whole."""
    cache = tiny_cache(32, index=index)
    for number in range(4):
        cache.serve("ABCDEFGHI", tenant=b"repeats")
        cache.serve(chr(1000 + number) * 9, tenant=b"scans")
    stats = cache.prefix_cache.stats
    repeats, scans = stats.tenants[b"repeats"], stats.tenants[b"scans"]
    assert (repeats.shared_tokens, repeats.copied_tokens, repeats.query_tokens) == (24, 0, 36)
    assert repeats.hit_ratio == 24 / 36
    assert scans.hit_ratio == 0.0
    assert stats.first.query_tokens == repeats.query_tokens + scans.query_tokens
    assert stats.first.hit_tokens == repeats.hit_tokens + scans.hit_tokens


def test_the_number_of_tenants_is_bounded_and_no_count_is_lost():
    """The tenant that was not seen for longest goes into one sum with others."""
    stats = CacheStats()
    for number in range(MAX_TENANTS + 10):
        stats.count_lookup(b"%d" % number, 10, 4, 1, preempted=False)
        stats.count_lookup(b"regular", 10, 4, 1, preempted=False)
    assert len(stats.tenants) == MAX_TENANTS
    assert b"regular" in stats.tenants and b"0" not in stats.tenants
    assert stats.other_tenants.num_requests == 11
    counted = [*stats.tenants.values(), stats.other_tenants]
    for name in ("num_requests", "query_tokens", "shared_tokens", "copied_tokens"):
        assert sum(getattr(c, name) for c in counted) == getattr(stats.first, name)


# --- how long, how far --------------------------------------------------------------------


def test_residency_age_and_distance_of_a_worked_example(index):
    """The clock counts steps; three blocks, and who comes and goes when.

    ::

        step     0      1      2      3
        ABCD     born   idle   used   idle    one block was given away before its reuse
        EFGH            born   idle   evicted by five tokens, which take the third block too
    """
    cache = tiny_cache(3, index=index)
    cache.serve("ABCD")  # published at 0, idle at 1
    cache.serve("EFGH")  # published at 1, idle at 2
    cache.serve("ABCDX", writes=False)  # holds ABCD at 2, idle again at 3
    stats = cache.prefix_cache.stats
    assert (stats.reuse_distances.num_values, stats.reuse_distances.total) == (1, 1.0)
    assert stats.evicted_blocks == 0
    cache.serve("12345", writes=False)  # at 3: an unused block, and EFGH's
    assert cache.match("EFGH!").num_tokens == 0
    assert (stats.evicted_blocks, stats.residencies_s.num_values) == (1, 1)
    assert (stats.residencies_s.total, stats.eviction_ages_s.total) == (3 - 1, 3 - 2)


def test_a_reuse_distance_says_which_pool_would_have_lost_the_block(index):
    """Seven blocks are given away between two uses of ABCD: a pool of seven loses it."""
    for num_blocks, hits in ((9, 4), (8, 4), (7, 0)):
        cache = tiny_cache(num_blocks, index=index)
        cache.serve("ABCD")
        cache.serve("12345678901234567890123456", tenant=b"other")
        cache.serve("ABCDE", writes=False)
        assert cache.prefix_cache.stats.first.shared_tokens == hits
        distances = cache.prefix_cache.stats.reuse_distances
        assert distances.total == (7 if hits else 0)


def test_a_histogram_never_grows():
    histogram = Histogram()
    for number in range(10_000):
        histogram.add(1.5 ** (number % 200) - 1.0)
    assert len(histogram.counts) == 64
    assert histogram.num_values == 10_000


@given(st.floats(0, 2.0**60))
def test_a_value_lies_below_the_bound_of_its_bucket_and_not_below_the_one_before(value):
    histogram = Histogram()
    histogram.add(value)
    bucket = histogram.counts.index(1)
    assert value < histogram.bound(bucket) or bucket == 63
    assert bucket == 0 or value >= histogram.bound(bucket - 1)


@given(st.lists(st.tuples(st.floats(1e-5, 1e9), st.integers(1, 5)), min_size=1, max_size=20),
       st.floats(0.01, 1.0))  # fmt: skip
def test_quantiles_are_right_to_within_a_factor_of_two(values, share):
    """Against a sorted list of all values."""
    histogram = Histogram()
    everything = []
    for value, count in values:
        histogram.add(value, count)
        everything += [value] * count
    everything.sort()
    rank = next(i for i in range(len(everything)) if i + 1 >= share * len(everything))
    assert everything[rank] <= histogram.quantile(share) <= 2 * everything[rank]
    assert histogram.total == pytest.approx(sum(everything))


def test_without_values_a_quantile_is_zero():
    assert Histogram().quantile(0.5) == 0.0
