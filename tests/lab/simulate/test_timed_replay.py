"""With a clock in place of the model, the real scheduler serves a trace at its times."""

import pytest

from ostinato.core.config import SchedulerConfig
from ostinato.lab.replay.serial_replay import replay_serially
from ostinato.lab.simulate.timed_replay import TimedResult, replay_timed, slowed_to_fit
from ostinato.lab.work.cost_model import CostModel
from ostinato.settings import PrefixCacheConfig
from tests.lab.traces.small_traces import drawn_trace, trace_of

SECOND_PER_TOKEN = CostModel(0.0, 1.0, 0.0)


def timed(trace, num_blocks=64, cost=SECOND_PER_TOKEN, enabled=True, **how) -> TimedResult:
    cache = PrefixCacheConfig(
        num_blocks=num_blocks,
        block_size=trace.block_tokens,
        enable_prefix_caching=enabled,
        seal_tails=False,
    )
    scheduling = SchedulerConfig(max_num_batched_tokens=64, max_num_seqs=16)
    return replay_timed(trace, cache, scheduling, cost, **how)


def test_the_first_token_comes_when_what_was_not_cached_is_computed():
    """Nine tokens at a second each; then five, since one block of four is there."""
    result = timed(trace_of("AB", "AC", gap_s=100.0))
    assert result.first_token_s == [9.0, 5.0]
    assert (result.hit_tokens, result.input_tokens) == (4, 18)
    assert timed(trace_of("AB", "AC", gap_s=100.0), enabled=False).first_token_s == [9.0, 9.0]


def test_requests_far_apart_find_what_the_serial_replay_finds():
    trace = drawn_trace(5, 120)
    alone = timed(trace, num_blocks=trace.num_distinct + 50, slowdown=1e6)
    assert alone.hit_tokens == replay_serially(trace, trace.num_distinct + 1).total_hit_tokens
    assert alone.num_preemptions == 0 and len(alone.first_token_s) == len(trace)


def test_a_crowd_waits_and_the_moments_show_it():
    crowd = timed(drawn_trace(6, 100), num_blocks=40, cost=CostModel(0.01, 0.05, 0.0))
    assert crowd.percentile(50) > 1 and max(m.num_waiting for m in crowd.moments) > 3
    for moment in crowd.moments:
        assert 0 <= moment.held_blocks + moment.evictable_blocks <= 40
    assert crowd.busy_s <= crowd.ended_s


def test_a_prompt_that_can_never_fit_is_counted_and_the_others_are_served():
    told = []
    result = timed(trace_of("AB", "CDEFGH", "AC"), num_blocks=4, progress=told.append)
    assert result.num_refused == 1 and len(result.first_token_s) == 2 and sum(told) == 3


def test_arrivals_are_slowed_down_until_one_engine_can_serve_them():
    trace = drawn_trace(8, 200)
    cost = CostModel(0.01, 0.05, 1e-5)
    slowdown = slowed_to_fit(trace, cost)
    result = timed(trace, 5000, cost, enabled=False, slowdown=slowdown)
    assert slowdown > 2 and 0.5 < result.busy_s / result.ended_s <= 1
    assert slowed_to_fit(trace, CostModel(1e-9, 0, 0)) == 1


def test_known_answers_are_found_by_the_next_turn():
    """A trace that knows the blocks of answers lets them be sampled."""
    trace = trace_of("AB", "ABC", gap_s=1000.0, output_tokens=8)
    trace.prompt_blocks[0], trace.input_tokens[0] = 1, 4  # "B" is the first one's answer
    assert timed(trace).hit_tokens == 8
    assert pytest.approx(timed(trace).hit_ratio) == 8 / (4 + 13)
