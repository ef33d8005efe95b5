"""The benchmarks run, and what does not depend on the machine depends on the seed alone."""

import random

import pytest

from benchmarks import heart, orders


@pytest.fixture
def small_traffic(monkeypatch):
    """Send less, so that a run takes a moment."""
    rng = random.Random(3)
    documents = [orders.draw(rng, 600) for _ in range(6)]

    def make_traffic(scene, rng):
        for number in range(30):
            question = documents[number % 6] + orders.draw(rng, 20)
            yield orders.Turn("rag", question, 5, number / 100)
        yield orders.Turn("chat", orders.draw(rng, 50), 5, 0.0, [orders.draw(rng, 20)])

    monkeypatch.setattr(orders, "make_traffic", lambda *how: list(make_traffic(*how)))
    monkeypatch.setattr(orders, "NUM_BLOCKS", 100)


@pytest.mark.parametrize("order", ["fcfs", "longest_prefix", "depth_first", "fair_share"])
def test_the_same_seed_gives_the_same_figures(order, small_traffic):
    first, second = (orders.measure(order, "mixed", seed=1) for _ in range(2))
    for figures in (first, second):
        assert figures.pop("plan_ms_per_step") > 0
    assert first == second
    assert 0 < first["ttft_mean_s"] < first["end_s"]
    assert set(first["ttft_by_tenant_s"]) == {"rag", "chat"}


def test_grouping_documents_computes_less_where_the_pool_is_small(small_traffic):
    computed = {
        order: orders.measure(order, "mixed", seed=1)["computed_tokens"]
        for order in ("fcfs", "depth_first")
    }
    assert computed["depth_first"] < computed["fcfs"]


def test_the_heart_is_measured_in_every_scene(monkeypatch):
    small = {"LONG": 64, "REPEATS": 2, "CHATS": 2, "TURNS": 2, "DECODES": 2, "STEPS": 3}
    for name, value in small.items():
        monkeypatch.setattr(heart, name, value)
    figures = heart.measure_all()
    for index in ("radix", "hash"):
        for scene in heart.SCENES:
            assert figures[f"{index} {scene} all"] > 0
