"""The benchmark of forwards measures what it says, on a model that takes a moment."""

import json
import sys

from benchmarks import forward
from benchmarks.peers.checkpoint import make_checkpoint
from benchmarks.peers.shapes import SMALL


def test_the_three_forwards_take_turns(tmp_path, monkeypatch, capsys):
    checkpoint = make_checkpoint(tmp_path / "model", SMALL)
    results = tmp_path / "found.json"
    options = ["--rounds", "2", "--threads", "1", "--scenes", "decode-1,decode-16"]
    monkeypatch.setattr(
        sys,
        "argv",
        ["forward", str(checkpoint), *options, "--clock", "cpu", "--json", str(results)],
    )

    forward.main()

    seconds = json.loads(results.read_text())["seconds"]
    assert set(seconds) == {"decode-1", "decode-16"}
    for scene in seconds.values():
        assert {name: len(rounds) for name, rounds in scene.items()} == {
            "auto": 2,
            "packed": 2,
            "plain": 2,
        }
    assert "decode-16" in capsys.readouterr().out
