"""The last step of a lab, for real: its file behind the engine's own tables."""

from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from ostinato.cli import app
from ostinato.labs.course import lab_of
from ostinato.labs.real_layer import attend_alone, attend_here


def write_layer(folder: Path) -> Path:
    """Write a small layer: two sequences that share a block, two heads over one of keys."""
    draw = np.random.default_rng(0)
    path = folder / "layer.npz"
    np.savez(
        path,
        q=draw.normal(size=(2, 2, 4)),
        k=draw.normal(size=(3, 2, 1, 4)),
        v=draw.normal(size=(3, 2, 1, 4)),
        tables=np.array([[0, 1], [0, 2]]),
        lengths=np.array([4, 3]),
    )
    return path


def test_a_layer_is_computed_head_by_head_and_compared(tmp_path: Path):
    """Three blocks are read, not four, and nothing differs."""
    file = tmp_path / "read_once.py"
    file.write_text(lab_of(6).solution)
    result = attend_here(str(file), str(write_layer(tmp_path)))
    assert (result["num_read"], result["num_heads"]) == (3, 2)
    assert result["difference"] < 1e-12


def test_a_wrong_attention_differs(tmp_path: Path):
    """Scores that are not scaled are seen, and so is an exception."""
    file, text = tmp_path / "read_once.py", lab_of(6).solution
    file.write_text(text.replace(" / np.sqrt(q.shape[1])", ""))
    assert attend_here(str(file), str(write_layer(tmp_path)))["difference"] > 1e-3
    file.write_text("attend = None")
    assert "TypeError" in attend_here(str(file), str(write_layer(tmp_path)))["error"]


def test_attention_alone_is_a_softmax():
    """One key has all the weight."""
    v = np.array([[3.0, 4.0]])
    alone = attend_alone(np.ones((1, 2)), [[0]], [1], np.ones((1, 1, 2)), v[None])
    assert np.array_equal(alone, v)


@pytest.mark.nightly
def test_a_real_layer_is_read_once(tmp_path: Path):
    """The bundled model's first layer: as many blocks as the engine's own plan reads."""
    file = tmp_path / "read_once.py"
    file.write_text(lab_of(6).solution)
    result = CliRunner().invoke(app, ["labs", "layer", str(file)])
    assert result.exit_code == 0, result.output
    assert "read by your plan       64, by the engine's own plan 64" in result.output
