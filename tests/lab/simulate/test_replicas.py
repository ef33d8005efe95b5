"""Replicas have caches of their own, and a router that follows prefixes keeps them useful."""

import numpy as np
import pytest

from ostinato.engine.settings.config import EngineConfig
from ostinato.lab.plan.replicas import LOAD_FACTOR, replay_routed, work_of
from ostinato.lab.replay.serial_replay import USUAL_POLICY, Pools, replay_serially
from ostinato.lab.work.cost_model import CostModel
from tests.lab.traces.small_traces import drawn_trace, trace_of

COST = CostModel(0.0, 0.01, 0.0)


def routed(trace, num_replicas, routing, size=10_000, policy="lru"):
    return replay_routed(trace, Pools(size), num_replicas, routing, policy, work_of(trace, COST))


@pytest.mark.parametrize("routing", ["affinity", "round_robin"])
@pytest.mark.parametrize("size", [30, 10_000])
def test_one_replica_is_one_cache(routing, size):
    trace = drawn_trace(1)
    alone = replay_serially(trace, size, "lru")
    assert routed(trace, 1, routing, size).hit_tokens.tolist() == alone.hit_tokens.tolist()


def test_in_turn_a_conversation_finds_only_what_its_replica_had():
    """Three chats on two replicas: every turn of a chat meets the other replica."""
    trace = trace_of("A", "B", "C", "AD", "BE", "CF")
    assert routed(trace, 2, "round_robin").hit_tokens.tolist() == [0] * 6
    found = routed(trace, 2, "affinity")
    assert found.hit_tokens.tolist() == [0, 0, 0, 4, 4, 4]
    assert found.replica[3:].tolist() == found.replica[:3].tolist()
    assert set(found.replica.tolist()) == {0, 1}  # the first ones were spread


def test_a_hot_prefix_is_spread_when_its_replica_has_more_than_its_share():
    """Every prompt begins alike; one replica cannot take them all."""
    trace = trace_of(*("AB" + letter for letter in "CDEFGHIJKLMNOPQRSTUVWXYZ" * 4), gap_s=0.1)
    found = routed(trace, 4, "affinity")
    work = np.bincount(found.replica, minlength=4)
    assert work.max() <= LOAD_FACTOR * work.mean() + 2
    assert found.hit_tokens.sum() >= (len(trace) - 4) * 8  # each replica computes it once


@pytest.mark.parametrize("seed", range(3))
def test_affinity_finds_more_than_turns_and_no_more_than_one_cache_for_all(seed):
    trace = drawn_trace(seed)
    for num_replicas in (2, 5):
        affinity = routed(trace, num_replicas, "affinity").hit_tokens.sum()
        in_turn = routed(trace, num_replicas, "round_robin").hit_tokens.sum()
        together = replay_serially(trace, 10_000, "lru").total_hit_tokens
        assert in_turn < affinity <= together


def test_the_lab_plans_with_the_policy_that_engines_have():
    assert EngineConfig().eviction_policy == USUAL_POLICY
