"""The benchmark of reading once runs, and reading once is never slower than reading per request."""

import json
import sys

import pytest
import torch

from benchmarks import planning, read_once
from ostinato.runner.native.library import Isa, current_isa, library, use_isa
from tests.support.instruction_sets import ISAS, needs_library

pytestmark = needs_library


@pytest.fixture(autouse=True)
def settings_of_the_process():
    """Threads and instructions are put back."""
    native, num_threads = library(), torch.get_num_threads()
    isa = None if native is None else current_isa(native)
    yield
    torch.set_num_threads(num_threads)
    if native is not None and isa is not None:
        use_isa(native, isa)


def sweep(monkeypatch: pytest.MonkeyPatch, *options: str) -> None:
    monkeypatch.setattr(sys, "argv", ["read_once.py", "--sweep", "--threads", "1", *options])
    read_once.main()


def test_a_sweep_prints_draws_and_keeps_its_figures(tmp_path, capsys, monkeypatch):
    figures, plot = tmp_path / "found.json", tmp_path / "found.png"
    small = ["--decodes", "1,3", "--shared", "16,64", "--own", "16", "--layers", "1"]
    kept = ["--rounds", "2", "--json", str(figures), "--plot", str(plot)]

    sweep(monkeypatch, *small, *kept)

    results = json.loads(figures.read_text())
    assert set(results) == {f"{n} on {shared}, 16 own" for n in (1, 3) for shared in (16, 64)}
    for scene in results.values():
        low, middle, high = scene["attention"]["native"]["auto / never"]
        assert 0 < low <= middle <= high
    assert plot.stat().st_size > 1000
    assert "slowest of auto / never" in capsys.readouterr().out


def test_what_planning_takes_is_measured(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["planning.py", "--rounds", "2"])
    planning.main()
    assert "16 on 2,048" in capsys.readouterr().out


@pytest.mark.nightly
@pytest.mark.parametrize("isa", [isa for isa in (Isa.AMX, Isa.AVX512) if isa in ISAS])
def test_auto_is_never_slower_than_never_beyond_what_never_differs_from_itself(
    tmp_path, monkeypatch, isa
):
    """CPU time of one thread, medians of ratios taken round by round; a twentieth is noise."""
    figures = tmp_path / "found.json"
    scenes = ["--decodes", "2,4,16", "--shared", "16,64,128,512", "--own", "16,64"]
    how = ["--clock", "cpu", "--rounds", "41", "--isa", isa.name, "--json", str(figures)]

    sweep(monkeypatch, *scenes, *how)

    rows = [scene["attention"]["native"] for scene in json.loads(figures.read_text()).values()]
    auto = max(row["auto / never"][1] for row in rows)
    itself = max(row["never again / never"][1] for row in rows)
    assert auto <= max(itself, 1.0) + 0.05
