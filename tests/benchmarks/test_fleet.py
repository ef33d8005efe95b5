"""Replicas behind a router, in simulated time."""

import math
from dataclasses import replace

import pytest

from benchmarks.router.fleet import FleetConfig, LibraryDispatcher, Outage, replay_fleet
from ostinato.core.config import SchedulerConfig
from ostinato.lab.simulate.timed_replay import replay_timed
from ostinato.lab.work.cost_model import CostModel
from ostinato.router import RouterConfig
from ostinato.settings import PrefixCacheConfig
from tests.lab.traces.small_traces import trace_of

COST = CostModel(0.01, 0.001, 0.0)
CACHE = PrefixCacheConfig(block_size=4, num_blocks=64, keep_event_batches=16)
FLEET = FleetConfig(2, CACHE, SchedulerConfig(max_num_batched_tokens=256), COST)


def conversations():
    """Eight conversations of four turns each, one turn a second; each repeats all before it."""
    turns = [
        "".join(chr(1000 + 100 * chat + block) for block in range(4 * turn + 4))
        for turn in range(4)
        for chat in range(8)
    ]
    return trace_of(*turns, gap_s=1.0)


def serve(fleet=FLEET, policy="cache_state", num_routers=1):
    trace = conversations()
    config = RouterConfig(policy)
    routers = LibraryDispatcher(trace, fleet.num_replicas, config, num_routers)
    return replay_fleet(trace, fleet, routers)


def test_one_replica_behind_a_router_serves_as_one_without():
    trace, fleet = conversations(), replace(FLEET, num_replicas=1)
    alone = replay_timed(trace, CACHE, fleet.scheduling, COST)
    routed = serve(fleet)
    assert routed.first_token_s == pytest.approx(alone.first_token_s)
    assert routed.hit_ratio == alone.hit_ratio
    assert routed.busy_s == pytest.approx([alone.busy_s])


def test_conversations_stay_where_they_are_cached():
    """Both replicas serve, and each turn hits the turns before it; in turn, half of them miss."""
    routed, in_turn = serve(), serve(replace(FLEET, num_replicas=3), "round_robin")
    assert routed.hit_ratio == pytest.approx((16 + 32 + 48) / (17 + 33 + 49 + 65))
    assert routed.imbalance < 1.3
    assert in_turn.hit_ratio < 0.5


@pytest.mark.parametrize(("late_s", "num_routers"), [(0.5, 1), (5.0, 1), (0.0, 2)])
def test_late_events_and_a_second_router_cost_few_hits(late_s, num_routers):
    assert serve(replace(FLEET, late_s=late_s), num_routers=num_routers).hit_ratio > 0.5


def test_nothing_is_lost_with_a_worker():
    """Its requests are routed anew, and it comes back with nothing cached."""
    results = serve(replace(FLEET, outages=(Outage(0, 8.001, 16.5), Outage(1, 17.001, 20.0))))
    assert not any(map(math.isnan, results.first_token_s))
    assert {0, 1} == set(results.replica)
    assert results.num_retries > 0
