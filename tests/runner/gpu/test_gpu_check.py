"""``scripts/gpu-check``: a rehearsal of the same code on a CPU, and nothing without a GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from ostinato.runner.gpu.availability import INTERPRETER_VARIABLE
from tests.support.triton import needs_triton

pytestmark = needs_triton

SCRIPT = Path(__file__).parents[3] / "scripts/gpu-check"


def run(folder: Path, *options: str) -> tuple[subprocess.CompletedProcess[str], Path]:
    output = folder / "report.json"
    environment = {k: v for k, v in os.environ.items() if k != INTERPRETER_VARIABLE}
    done = subprocess.run(
        [str(SCRIPT), "--output", str(output), *options],
        capture_output=True,
        text=True,
        env={**environment, "PYTHON": sys.executable},
        check=False,
    )
    return done, output


def rehearsed(folder: Path, *options: str) -> dict[str, Any]:
    done, output = run(folder, "--rehearse", *options)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(output.read_text())
    assert report["is_rehearsal"] and report["device"] == "cpu, interpreted"
    for row in report["table"]:
        assert row["ours_ms"] > 0 and row["sdpa_difference"] < 1e-4
    return report


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_nothing_is_run(tmp_path: Path):
    done, output = run(tmp_path)

    assert (done.returncode, output.exists()) == (0, False)
    assert done.stdout.startswith("There is no GPU here: nothing was run.")


def test_a_part_of_the_rehearsal_compares_attention_with_torch(tmp_path: Path):
    report = rehearsed(tmp_path, "--only", "row_bits")

    assert [check["result"] for check in report["checks"]] == ["passed"]
    assert [row["case"] for row in report["table"]] == ["decode of 1", "decode of 2", "prefill"]
    assert report["versions"]["triton"] != "none"


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_the_rehearsal_passes(tmp_path: Path):
    """A family beside ``transformers``, a hit, tiers with a killed process, cancelled requests."""
    report = rehearsed(tmp_path)

    names = ["row_bits", "families", "hit_bits", "tiers", "requests"]
    assert [check["check"] for check in report["checks"]] == names
    requests = report["checks"][-1]
    assert requests["finished"] == 4 and requests["cancelled"] == 2
