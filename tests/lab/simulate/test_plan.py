"""A plan says how many replicas serve the traffic, and how much memory for the cache pays."""

import pytest

from ostinato.core.errors import ConfigError
from ostinato.lab.plan.plan import GIB, HourlyRates, ReplicaSetup, make_plan
from ostinato.lab.plan.plan_words import in_words
from ostinato.lab.plan.replicas import work_of
from ostinato.lab.work.cost_model import CostModel
from ostinato.lab.work.kv_groups import KVGroups
from tests.lab.traces.small_traces import drawn_trace, trace_of

SLOW = CostModel(0.0, 0.05, 0.0)


def planned(trace, prices=None, cost=SLOW, points=6, **setup):
    """Plan with an eighth of a GiB per token: a block of eight is one GiB."""
    prices = HourlyRates(1.0, 0.0) if prices is None else prices
    return make_plan(
        trace, ReplicaSetup(cost, KVGroups(GIB // 8), prices, policy="lru", **setup), points
    )


def words(plan):
    return " ".join(in_words(plan, "EUR"))


def test_replicas_are_whole_and_no_busier_than_they_may_be():
    trace = drawn_trace(1, 150)
    plan = planned(trace, utilisation=0.5)
    hours_of_work = work_of(trace, SLOW).total_s / trace.duration_s
    assert plan.without.num_replicas == -(-hours_of_work // 0.5) > 2
    for option in plan.options:
        for fleet in (option.affinity, option.round_robin):
            assert isinstance(fleet.num_replicas, int) and fleet.busy_share <= 0.5
            assert fleet.busiest_share >= fleet.busy_share
        assert option.affinity.hit_ratio >= option.round_robin.hit_ratio
        assert option.affinity.num_replicas <= option.round_robin.num_replicas


def test_the_bill_is_of_whole_machines_each_with_its_own_memory():
    """2 GPUs a replica at 3 EUR; 4 of its GiB come with them, the others cost 0.5 each."""
    plan = planned(drawn_trace(1, 150), HourlyRates(3.0, 0.5), num_gpus=2, own_bytes=4 * GIB)
    for option in plan.options:
        fleet, bought = option.affinity, max(0, option.memory_bytes / GIB - 4)
        assert fleet.money == pytest.approx(fleet.num_replicas * (2 * 3.0 + 0.5 * bought))
    assert plan.without.money == plan.without.num_replicas * 6.0
    assert 4 * GIB in {option.memory_bytes for option in plan.options}


def test_the_largest_size_is_the_least_at_which_nothing_is_evicted():
    plan = planned(drawn_trace(3, 150), points=8)
    assert not plan.ceiling.affinity.evicts
    assert all(option.affinity.evicts for option in plan.options[:-1])


def test_free_memory_is_bought_where_it_saves_machines_and_dear_memory_not_at_all():
    trace = drawn_trace(2, 150)
    free = planned(trace)
    assert free.best is not None and free.best.affinity.money < free.without.money
    dear = planned(trace, HourlyRates(1.0, 1e6))
    assert dear.best is None
    assert "Buy no memory for this cache alone" in words(dear) and "would pay below" in words(dear)


def test_of_equal_bills_the_one_with_more_hits_is_best():
    plan = planned(drawn_trace(2, 150))
    same = [o for o in plan.options if o.affinity.money == plan.best.affinity.money]
    assert plan.best.affinity.hit_ratio == max(option.affinity.hit_ratio for option in same)


def test_the_words_of_a_plan_are_those_of_a_sum_by_hand():
    """Four prompts of 9 tokens, ten minutes apart: the last three find 8 of their tokens.

    At 100 s a token 3,600 s in half an hour are two machines that are always busy, or three at
    70 %. With hits 1,200 s are left, which is one machine at 67 %. Two blocks of 4 tokens of an
    eighth of a GiB are one GiB.
    """
    trace = trace_of("AB", "AB", "AB", "AB", gap_s=600, output_tokens=0)
    plan = planned(trace, HourlyRates(9.0, 0.5), CostModel(0.0, 100.0, 0.0), points=2)
    assert words(plan) == (
        "Give each replica 1 GiB for the cache, and route requests by their prefix: 1 replica "
        "serves this traffic instead of 3, for 9.50 instead of 27.00 EUR per hour. The cache finds "
        "66.7% of all prompt tokens and saves 66.7% of the prefill work; a replica is busy 67% of "
        "the time. One replica is enough, so routing makes no difference. No memory finds more "
        "than 66.7%: the other 33.3% are seen for the first time. From 1 GiB per replica on, "
        "nothing is evicted."
    )


def test_what_routing_is_worth_is_said():
    said = words(planned(drawn_trace(1, 150), HourlyRates(1.0, 0.001), CostModel(0.0, 0.2, 0.0)))
    assert "route requests by their prefix" in said
    assert "If requests are sent to the replicas round robin, the same memory finds" in said
    assert "and one cache for all" in said


def test_a_plan_with_windows_says_that_they_still_evict():
    setup = ReplicaSetup(
        SLOW, KVGroups(2**20, ((9, 2**20),), 2), HourlyRates(1.0, 0.0), policy="lru"
    )
    said = words(make_plan(drawn_trace(1, 150), setup, 3))
    assert "full attention evicts nothing" in said and "so more memory finds more" in said


def test_traffic_without_prefixes_is_told_so():
    plan = planned(trace_of("A", "B", "C"))
    assert words(plan).startswith("No prompt of this trace begins like another one")


def test_what_cannot_be_planned_is_refused():
    with pytest.raises(ConfigError, match="spans 0 s"):
        planned(trace_of("A"))
    with pytest.raises(ConfigError, match="memory_price=-1"):
        HourlyRates(1.0, -1.0)
    with pytest.raises(ConfigError, match="points=1"):
        planned(trace_of("A", "B"), points=1)
    with pytest.raises(ConfigError, match=r"utilisation=1.5"):
        planned(trace_of("A", "B"), utilisation=1.5)
