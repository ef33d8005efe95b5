"""A plan weighs memory against what it saves, and says so."""

import pytest

from ostinato.core.errors import ConfigError
from ostinato.lab.cost_model import CostModel
from ostinato.lab.plan import GIB, Prices, in_words, make_plan, plan_capacities
from ostinato.lab.serial_replay import replay_serially
from tests.lab.small_traces import drawn_trace, trace_of

COST = CostModel(0.0, 0.01, 0.0)


def planned(trace, prices, cost=COST, token_bytes=GIB // 8):
    """Plan with blocks of a GiB for traces of blocks of eight."""
    results = [replay_serially(trace, size) for size in plan_capacities(trace)]
    return make_plan(trace, results, token_bytes, cost, prices)


def words(plan):
    return " ".join(in_words(plan, lambda n: f"{n / GIB:g} GiB", "EUR"))


def test_saved_work_is_that_of_the_tokens_that_hit():
    """Without attention, the share of work is the share of tokens."""
    plan = planned(drawn_trace(1), Prices(1.0, 0.0))
    for option in plan.options:
        assert option.saved_share == pytest.approx(option.hit_ratio)
        assert option.saved_s == pytest.approx(option.saved_tokens * 0.01)
        assert option.memory_bytes == option.num_blocks * GIB
    with_attention = planned(drawn_trace(1), Prices(1.0, 0.0), CostModel(0.0, 0.01, 0.001))
    last = with_attention.options[-1]
    assert 0 < last.saved_share < last.hit_ratio  # early tokens see few others


def test_free_memory_is_bought_to_the_end_and_dear_memory_not_at_all():
    trace = drawn_trace(2)
    free = planned(trace, Prices(1.0, 0.0))
    assert free.best is not None and free.best.hit_ratio == free.ceiling.hit_ratio
    dear = planned(trace, Prices(1.0, 1e6))
    assert dear.best is None and "none of the sizes pays" in words(dear)
    assert "Give the cache" in words(free) and "The curve bends before, at" in words(free)


def test_the_words_of_a_plan_are_those_of_a_sum_by_hand():
    """Two prompts of 9 tokens, half an hour apart, of which the second finds 8.

    At 100 s a token that is 900 s each: 3,600 s per hour, of which 1,600 s need not be. At 9 EUR
    an hour they are 4 EUR; two blocks of 4 tokens of GIB / 8 are one GiB, at 0.5 EUR.
    """
    trace = trace_of("AB", "AB", gap_s=1800)
    plan = planned(trace, Prices(9.0, 0.5), CostModel(0.0, 100.0, 0.0))
    assert plan.best is not None and plan.best.num_blocks == 2
    assert words(plan) == (
        "Give the cache 1 GiB, where the curve bends: it saves 4.00 EUR of compute per hour for "
        "0.50 EUR of memory. It finds 44.4% of all prompt tokens and saves 44.4% of the prefill "
        "work: prompts keep 0.6 machines busy instead of 1.0. No memory finds more than 44.4%, "
        "for which 1.5 GiB are enough: the other 55.6% are seen for the first time."
    )
    cheap = planned(trace, Prices(9.0, 0.001), CostModel(0.0, 100.0, 0.0))
    assert "4.00 EUR of compute per hour for less than 0.01 EUR of memory" in words(cheap)
    dear = planned(trace, Prices(9.0, 5.0), CostModel(0.0, 100.0, 0.0))
    assert "Memory would pay below 4 EUR for a GiB and hour." in words(dear)
    slow = planned(trace, Prices(9.0, 0.5), CostModel(0.0, 10.0, 0.0))
    assert "prompts keep a machine busy 5.6% of the time instead of 10.0%" in words(slow)


def test_a_knee_behind_the_best_buy_says_what_it_would_cost():
    prices = Prices(1.0, 0.32)
    plan = planned(drawn_trace(2), prices, CostModel(0.0, 1.0, 0.0))
    assert plan.best is not None and plan.best.num_blocks < plan.knee.num_blocks
    assert "The curve bends later, at" in words(plan) and " more than it saves" in words(plan)


def test_the_knee_stands_highest_above_the_straight_line():
    plan = planned(drawn_trace(3), Prices(1.0, 0.0))
    last = plan.options[-1]
    above = [
        o.hit_ratio / last.hit_ratio - o.memory_bytes / last.memory_bytes for o in plan.options
    ]
    assert plan.options[above.index(max(above))] == plan.knee
    assert plan.options[0].num_blocks < plan.knee.num_blocks < last.num_blocks


def test_traffic_without_prefixes_is_told_so():
    assert words(planned(trace_of("A", "B", "C"), Prices(1.0, 1.0))).startswith("No prompt of")


def test_what_cannot_be_planned_is_refused():
    with pytest.raises(ConfigError, match="spans 0 s"):
        planned(trace_of("A"), Prices(1.0, 1.0))
    with pytest.raises(ConfigError, match="memory_per_gib_hour=-1"):
        Prices(1.0, -1.0)
    with pytest.raises(ConfigError, match="points"):
        plan_capacities(trace_of("A"), 1)
