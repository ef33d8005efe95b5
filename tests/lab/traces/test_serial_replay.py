"""The serial replay finds what a slow and obvious cache finds, and hits end where ids part."""

from itertools import pairwise
from typing import get_args

import pytest

from ostinato.lab.replay.serial_replay import replay_serially
from ostinato.lab.simulate.simulation import add_bounds, simulate, usual_capacities
from ostinato.settings import PolicyName
from tests.lab.traces.small_traces import drawn_trace, trace_of


def oracle_hits(trace, num_blocks: int) -> int:
    """Blocks that hit under LRU over leaves, one request after another."""
    last: dict[int, tuple[int, int]] = {}  # when a cached block was used, and how deep it is
    parents = {b: a for path in trace.paths() for a, b in pairwise(path)}
    hits = 0
    for now, path in enumerate(trace.paths()):
        del path[num_blocks:]
        found = next((i for i, block in enumerate(path) if block not in last), len(path))
        hits += found
        for depth, block in enumerate(path[:found]):
            last[block] = (now, -depth)
        needed = len(path) - found
        while len(last) + needed > num_blocks:
            inner = {parents[block] for block in last if block in parents}
            leaves = [b for b in last if b not in inner and b not in path[:found]]
            del last[min(leaves, key=lambda b: last[b])]
        for depth, block in enumerate(path):
            last[block] = (now, -depth)
    return hits


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("num_blocks", [12, 40, 90, 400])
def test_lru_finds_what_an_obvious_cache_finds(seed, num_blocks):
    trace = drawn_trace(seed, 200)
    found = replay_serially(trace, num_blocks, "lru")
    blocks = -(-found.hit_tokens // trace.block_tokens)  # of whole prompts a token is computed
    assert blocks.sum() == oracle_hits(trace, num_blocks)


def test_a_hit_ends_where_the_ids_part():
    found = replay_serially(trace_of("ABC", "ABD", "ABCE", "XBC"), 20)
    assert found.hit_tokens.tolist() == [0, 8, 12, 0]
    assert found.hit_ratio == 20 / (13 + 13 + 17 + 13)


def test_one_token_of_a_prompt_of_whole_blocks_is_computed():
    """Law 4: a prompt of three blocks of four finds eleven of its tokens."""
    trace = trace_of("ABC", "ABC")
    trace.input_tokens[:] = 12
    assert replay_serially(trace, 20).hit_tokens.tolist() == [0, 11]


def test_of_a_prompt_longer_than_the_cache_the_beginning_is_used():
    found = replay_serially(trace_of("AB", "CDEFGH", "CDEFGH", "ABX"), 5)
    assert found.hit_tokens.tolist() == [0, 0, 20, 0] and found.num_cut == 2


@pytest.mark.parametrize("policy", get_args(PolicyName))
def test_no_policy_exceeds_the_bounds(policy):
    found = simulate(drawn_trace(9), (10, 30, 100), [policy])
    add_bounds(found)
    leaves, bypass = found.bounds["Belady"], found.bounds["Belady, bypass"]
    for result, bound, looser in zip(found.results[policy], leaves, bypass, strict=True):
        assert 0 < result.hit_ratio <= bound + 1e-9 <= looser + 2e-9


@pytest.mark.parametrize("policy", get_args(PolicyName))
def test_every_policy_stays_below_a_cache_that_never_evicts(policy):
    trace = drawn_trace(7)
    told = []
    found = simulate(trace, (20, 80, trace.num_distinct + 1), [policy], told.append)
    ratios = [result.hit_ratio for result in found.results[policy]]
    assert all(0 < ratio <= found.unbounded.hit_ratio for ratio in ratios)
    assert ratios[-1] == found.unbounded.hit_ratio and ratios[0] < ratios[-1]
    assert sum(told) == 4 * len(trace)


def test_usual_capacities_end_where_nothing_is_evicted():
    trace = drawn_trace(3)
    sizes = usual_capacities(trace)
    assert sizes[-2] < sizes[-1] == trace.num_distinct
    assert all(str(size).strip("0") in ("1", "2", "5") for size in sizes[:-1])
    assert replay_serially(trace, sizes[-1], "lru").evicted_blocks == 0
    assert replay_serially(trace, sizes[-1] - 1, "lru").evicted_blocks > 0
    assert usual_capacities(trace_of("A")) == (1,)
