"""The benchmark of decode steps tells what is around the model, on a model that takes a moment."""

import json
import sys

import pytest
import torch

from benchmarks import decode
from benchmarks.peers.checkpoint import make_checkpoint
from benchmarks.peers.shapes import SMALL
from ostinato.runner.forward.program import Program


def test_each_part_of_a_step_is_counted_once(tmp_path, monkeypatch, capsys):
    checkpoint, results = make_checkpoint(tmp_path / "model", SMALL), tmp_path / "found.json"
    options = ["--cases", "1x32,3x64", "--rounds", "1", "--json", str(results)]
    options += ["--threads", str(torch.get_num_threads())]
    monkeypatch.setattr(sys, "argv", ["decode", str(checkpoint), *options])
    run = Program.run

    decode.main()

    assert Program.run is run
    cases = json.loads(results.read_text())
    assert set(cases) == {"1x32", "3x64"}
    for parts in cases.values():
        assert all(parts[part] > 0 for part in (*decode.PARTS, "model"))
        assert parts["around"] == pytest.approx(sum(parts[part] for part in decode.PARTS))
        assert parts["step"] > parts["model"]
    assert "3x64" in capsys.readouterr().out
