"""The benchmarks run, and what does not depend on the machine depends on the seed alone."""

import json
import random
import sys

import numpy as np
import pytest

from benchmarks import eviction, explain, heart, hybrids, orders, strangers


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


@pytest.mark.parametrize(
    "order", ["fcfs", "shortest_first", "longest_prefix", "depth_first", "fair_share"]
)
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
    small = {"LONG": 64, "HITS": 2, "MISSES": 2, "CHATS": 2, "TURNS": 2, "DECODES": 2, "STEPS": 3}
    small |= {"PREFIX": 64, "REQUESTS": 3}
    for name, value in small.items():
        monkeypatch.setattr(heart, name, value)
    figures = heart.measure_all()
    for index in ("radix", "hash"):
        for scene in heart.SCENES:
            assert figures[f"{index} {scene} all"] > 0


def test_policies_are_compared_with_the_bound(tmp_path, capsys, monkeypatch):
    """A trace of two conversations by turns, and room for one and a block."""
    paths = [[10 * chat + turn for turn in range(1, 4)] for chat in (0, 1)] * 4
    ids = [block for path in paths for block in path]
    trace = tmp_path / "turns.npz"
    np.savez(
        trace,
        ts_ms=np.arange(len(paths)) * 1000,
        input_len=np.full(len(paths), 3 * 512),
        output_len=np.full(len(paths), 10),
        offsets=np.arange(len(paths) + 1) * 3,
        ids=np.array(ids),
    )
    results = tmp_path / "found.json"
    command = ["eviction.py", str(trace), "--blocks", "4", "--json", str(results)]
    monkeypatch.setattr(sys, "argv", command)
    eviction.main()
    figures = json.loads(results.read_text())
    assert figures["turns lru 4"][0] == 25.0, "the other conversation's first block is left"
    assert (figures["turns belady 4"][0], figures["turns belady_bypass 4"][0]) == (25.0, 50.0)
    assert "reuse_hazard" in capsys.readouterr().out


def test_remembering_and_explaining_are_measured(monkeypatch):
    for name, value in {"REQUESTS": 24, "PROMPT": 128, "OWN": 16, "ANSWER": 4, "ROUNDS": 1}.items():
        monkeypatch.setattr(explain, name, value)
    figures = explain.measure(num_blocks=16)
    assert set(figures) == {"off_us", "on_us", "explain_us"}
    assert all(0 < figure < float("inf") for figure in figures.values())


@pytest.mark.nightly
def test_hybrids_are_measured_beside_transformers(tmp_path):
    hybrids.main(["--small", "--rounds", "1", "--json", str(tmp_path / "figures.json")])

    figures = json.loads((tmp_path / "figures.json").read_text())
    assert set(figures) == {"first cold", "first warm", "16 shared", "decode 1", "decode 16"}
    assert all(milliseconds > 0 for row in figures.values() for milliseconds in row.values())


def test_the_simulated_scene_bounds_the_waits_of_hits_and_streams():
    """A small scene on the real scheduler, with a price list in place of a model."""
    scene = strangers.Scene(seconds=8, long=1_500, prefix=512, stream_answer=200, hit_gap_s=1)
    prices = [0.04, 0.004, 1e-7, "given", 0.0, 8]
    before = strangers.simulate(scene, prices)
    now = strangers.simulate(scene, prices, order="shortest_first", max_step_ms=250)
    assert max(before.hits) > 3 and max(before.gaps) > 3
    assert max(now.hits) < 3 * now.alone["hit"] + 0.25
    assert max(now.gaps) <= 0.3, "the first steps are unmeasured"
    assert now.num_tokens / now.seconds > 0.9 * before.num_tokens / before.seconds
    assert "| hits, first token p99 |" in strangers.table({"now": now, "before": before})
