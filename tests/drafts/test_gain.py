"""How many rows are worth their price."""

from ostinato.drafts.gain import FIRST_ROW_SHARE, row_share, rows_worth
from ostinato.scheduling.step_prices import StepPrices, Work

PRICES = StepPrices(0.010, 0.0001, 0.0)


def test_a_row_is_added_while_its_gain_is_above_its_price():
    """At 20 % a row, drafts that are right in four of five cases: eight rows at most."""
    [few] = rows_worth([(0.3, 16)], 1.0, 0.2, 1)
    [many] = rows_worth([(0.8, 16)], 1.0, 0.2, 1)
    [all_of_them] = rows_worth([(0.99, 16)], 1.0, 0.2, 1)
    assert (few, many, all_of_them) == (1, 4, 16)


def test_nothing_is_added_for_guesses_that_are_hardly_ever_right():
    assert rows_worth([(0.05, 16), (0.1, 16)], 1.0, 0.2, 2) == [0, 0]


def test_a_large_batch_pays_for_certain_rows_alone():
    """Sixteen decodes at the price of three: a row costs nearly a sixteenth of the step."""
    likely, unlikely = rows_worth([(0.95, 4), (0.6, 4)], 3.0, 2.5 / 16, 16)
    assert likely > 0
    assert unlikely == 0


def test_rows_go_to_the_likeliest_drafts_first():
    first, second = rows_worth([(0.9, 16), (0.5, 16)], 1.0, 0.2, 2)
    assert first > second


def test_the_price_of_a_row_is_the_slope_between_small_steps():
    measured = [(Work(1, n, 0), 0.010 * (1 + 0.19 * (n - 1))) for n in (1, 3, 6)]
    assert abs(row_share(PRICES, measured) - 0.19) < 1e-9


def test_what_attention_takes_is_no_price_of_a_row():
    prices = StepPrices(0.010, 0.0001, 1e-6)
    measured = [(Work(1, n, 1000 * n), 0.010 * (1 + 0.1 * (n - 1)) + 1e-3 * n) for n in (1, 5)]
    assert abs(row_share(prices, measured) - 0.1) < 1e-9


def test_until_a_larger_step_was_measured_a_row_has_a_typical_price():
    assert row_share(PRICES, [(Work(1, 1, 0), 0.010)]) == FIRST_ROW_SHARE


def test_a_given_list_counts_as_it_is():
    assert abs(row_share(StepPrices(0.9, 0.1, 0.0), []) - 0.1) < 1e-9
