"""A cost model adds up what a step computes, and is found again from what it measured."""

from array import array

import pytest

from ostinato.core.errors import ConfigError
from ostinato.core.ids import SequenceId
from ostinato.core.plan import ScheduledSequence, StepPlan
from ostinato.lab.work.cost_model import CostModel, error_of
from ostinato.scheduling.price_fit import fit
from ostinato.scheduling.step_prices import Work, plan_work


def prefill_work(num_tokens):
    """Return the work of a prompt that is computed in one step."""
    return Work(1, num_tokens, num_tokens * (num_tokens + 1) // 2)


def test_pairs_are_counted_one_by_one_and_keys_by_sequence():
    """Three tokens behind five: they see 6, 7 and 8 keys, which are read once."""
    tokens = array("I", [1, 2, 3])
    prefill = ScheduledSequence(SequenceId(0), tokens, 5, ())
    decode = ScheduledSequence(SequenceId(1), tokens[:1], 9, ())
    assert plan_work(StepPlan((prefill, decode))) == Work(1, 4, 6 + 7 + 8 + 10, 8 + 10)


def test_what_is_cached_need_not_be_paid_for():
    cost = CostModel(0.0, 2.0, 0.5)
    assert cost.prefill_s(8, 5) == 3 * 2.0 + 21 * 0.5
    assert cost.prefill_s(8, 0) == 8 * 2.0 + 36 * 0.5


@pytest.mark.parametrize("prices", [(0.01, 2e-4, 3e-8), (0.02, 1e-4, 0.0), (0.0, 1e-4, 1e-8)])
def test_prices_are_found_again(prices):
    true = CostModel(*prices)
    runs = [prefill_work(n) for n in (32, 128, 512, 2000)] + [
        Work(30, 30, 900),
        Work(30, 240, 9000),
    ]
    measured = [(work, true.seconds(work)) for work in runs]
    found = fit(measured, "measured")
    assert (found.fixed_s, found.token_s, found.pair_s) == pytest.approx(prices, abs=1e-12)
    assert error_of(found, measured) < 1e-6


def test_no_price_is_below_zero_whatever_was_measured():
    """Times that fall with the length can only be noise."""
    measured = [(prefill_work(n), s) for n, s in ((32, 0.2), (128, 0.15), (512, 0.11))]
    found = fit(measured, "noise")
    assert min(found.fixed_s, found.token_s, found.pair_s) == 0.0 and found.fixed_s > 0.1


def test_prices_and_measurements_that_cannot_be_are_refused():
    with pytest.raises(ConfigError, match=r"token_s=-1.*at least 0"):
        CostModel(1.0, -1.0, 0.0)
    with pytest.raises(ConfigError, match="not all 0"):
        CostModel(0.0, 0.0, 0.0)
    with pytest.raises(ConfigError, match="2 measured runs: at least 3"):
        fit([(prefill_work(4), 1.0)] * 2, "too few")
