"""The benchmarks run, and what does not depend on the machine depends on the seed alone."""

import json
import sys

import numpy as np
import pytest

from benchmarks import eviction, heart, hybrids, strangers


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
