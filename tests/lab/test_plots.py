"""Figures are drawn in units that people read."""

import pytest

from ostinato.core.config import CacheConfig, SchedulerConfig
from ostinato.lab.cost_model import CostModel
from ostinato.lab.plan import Prices, make_plan, plan_capacities
from ostinato.lab.plots import hit_ratio_plot, occupancy_plot, plan_plot
from ostinato.lab.serial_replay import replay_serially
from ostinato.lab.simulation import simulate
from ostinato.lab.timed_replay import replay_timed
from tests.lab.small_traces import drawn_trace


def texts(axes) -> list[str]:
    return [text.get_text() for text in axes.texts]


def ticks(axes) -> list[str]:
    axes.figure.canvas.draw()
    return [label.get_text() for label in axes.get_xticklabels() if label.get_text()]


@pytest.mark.parametrize(
    ("token_bytes", "label", "first"),
    [(None, "blocks of 8 tokens", "10"), (16, "KiB", "1.25"), (2**20, "MiB", "80"),
     (2**28, "GiB", "20")],
)  # fmt: skip
def test_sizes_are_marked_where_they_are(token_bytes, label, first):
    found = simulate(drawn_trace(1), (10, 20, 50), ("lru",))
    [axes] = hit_ratio_plot(found, token_bytes).axes
    assert label in axes.get_xlabel()
    assert ticks(axes)[0] == first and len(ticks(axes)) == 3


@pytest.mark.parametrize(("token_bytes", "unit"), [(8, "KiB"), (2**14, "MiB"), (2**26, "GiB")])
def test_a_plan_names_its_points_in_the_unit_of_its_axis(token_bytes, unit):
    trace = drawn_trace(2)
    results = [replay_serially(trace, size) for size in plan_capacities(trace)]
    plan = make_plan(trace, results, token_bytes, CostModel(0.0, 0.01, 0.0), Prices(1.0, 0.0))
    axes, money = plan_plot(plan, "t", "EUR").axes
    assert axes.get_xlabel() == f"memory for the cache, {unit}"
    assert [text.split(":")[0] for text in texts(axes)] == ["the knee", "best buy"]
    assert all(f" {unit}, " in text for text in texts(axes))
    assert "EUR" in money.get_ylabel()


@pytest.mark.parametrize(("slowdown", "unit"), [(1e-6, "milliseconds"), (0.1, "seconds"),
                                                (1.0, "minutes"), (100.0, "hours")])  # fmt: skip
def test_time_is_told_in_a_unit_that_fits(slowdown, unit):
    trace, cost = drawn_trace(3), CostModel(1e-6, 1e-7, 0.0)
    cache = CacheConfig(num_blocks=200, block_size=8, seal_tails=False)
    scheduling = SchedulerConfig(max_num_batched_tokens=512)
    result = replay_timed(trace, cache, scheduling, cost, slowdown=slowdown)
    assert occupancy_plot(result, "t").axes[0].get_xlabel() == unit
