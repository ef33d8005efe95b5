"""Figures are drawn in units that people read."""

import pytest

from ostinato.core.config import SchedulerConfig
from ostinato.lab.plan.plan import HourlyRates, ReplicaSetup, make_plan
from ostinato.lab.simulate.plots import hit_ratio_plot, occupancy_plot, plan_plot
from ostinato.lab.simulate.simulation import simulate
from ostinato.lab.simulate.timed_replay import replay_timed
from ostinato.lab.size.quantities import write_bytes
from ostinato.lab.work.cost_model import CostModel
from ostinato.lab.work.kv_groups import KVGroups
from ostinato.settings import PrefixCacheConfig
from tests.lab.traces.small_traces import drawn_trace


def texts(axes) -> list[str]:
    return [text.get_text() for text in axes.texts]


def ticks(axes) -> list[str]:
    axes.figure.canvas.draw()
    return [label.get_text() for label in axes.get_xticklabels() if label.get_text()]


@pytest.mark.parametrize(
    ("token_bytes", "label", "marked"),
    [
        (None, "blocks of 8 tokens", ["1k", "2.5k", "5.56k"]),
        (16, "memory", ["125 KiB", "312 KiB", "695 KiB"]),
        (2**28, "memory", ["1.95 TiB", "4.88 TiB", "10.9 TiB"]),
    ],
)
def test_sizes_are_marked_as_tables_write_them(token_bytes, label, marked):
    kv = None if token_bytes is None else KVGroups(token_bytes)
    found = simulate(drawn_trace(1), (1000, 2500, 5560), ("lru",), kv=kv)
    [axes] = hit_ratio_plot(found).axes
    assert label in axes.get_xlabel()
    assert sorted(ticks(axes)) == sorted(marked)


def test_a_plan_names_its_points_by_their_memory():
    setup = ReplicaSetup(
        CostModel(0.0, 0.05, 0.0), KVGroups(2**26), HourlyRates(1.0, 0.001), policy="lru"
    )
    plan = make_plan(drawn_trace(2), setup, 5)
    axes, bill = plan_plot(plan, "t", "EUR").axes
    names = {text.split(":")[0]: text for text in texts(axes)}
    assert set(names) <= {"the knee", "the lowest bill", "the knee and the lowest bill"}
    assert write_bytes(plan.knee.memory_bytes) in " ".join(names.values())
    assert set(ticks(axes)) <= {write_bytes(option.memory_bytes) for option in plan.options}
    assert "EUR" in bill.get_ylabel()


@pytest.mark.parametrize(("slowdown", "unit"), [(1e-6, "milliseconds"), (0.1, "seconds"),
                                                (1.0, "minutes"), (100.0, "hours")])  # fmt: skip
def test_time_is_told_in_a_unit_that_fits(slowdown, unit):
    trace, cost = drawn_trace(3), CostModel(1e-6, 1e-7, 0.0)
    cache = PrefixCacheConfig(num_blocks=200, block_size=8, seal_tails=False)
    scheduling = SchedulerConfig(max_num_batched_tokens=512)
    result = replay_timed(trace, cache, scheduling, cost, slowdown=slowdown)
    assert occupancy_plot(result, "t").axes[0].get_xlabel() == unit
