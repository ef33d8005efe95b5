"""The kernels compile for three GPUs on a machine without one, within their limits.

In a process of its own: in this one they are made for the interpreter.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ostinato.runner.gpu.availability import INTERPRETER_VARIABLE
from tests.support.triton import needs_triton

pytestmark = needs_triton

SCRIPT = Path(__file__).parents[3] / "scripts/gpu_compile.py"


def compiled(tmp_path: Path, *options: str) -> list[dict[str, Any]]:
    environment = {k: v for k, v in os.environ.items() if k != INTERPRETER_VARIABLE}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)  # compile, whatever was compiled before
    command = [sys.executable, str(SCRIPT), "--json", *options]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


TARGETS = ["sm_80", "sm_90", "gfx942"]


@pytest.mark.one_case_in(3)
@pytest.mark.parametrize("target", TARGETS)
def test_kernels_compile_without_spills_and_within_shared_memory(tmp_path: Path, target: str):
    """Plain, and over codes with every feature and sections; heads of 256 elements at night."""
    results = compiled(tmp_path, "--few", "--target", target)

    kernels = ["attend 16", "attend 128", "merge", "store", "attend 32", "merge", "store"]
    fused = ["add_norm", "turn_heads", "activate", "multiply int4"]
    assert [r["kernel"] for r in results] == [*kernels, *fused]
    assert all(r["is_within_limits"] and r["code_bytes"] > 0 for r in results)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("target", TARGETS)
def test_every_variant_compiles(tmp_path: Path, target: str):
    results = compiled(tmp_path, "--all", "--target", target)
    assert {r["target"] for r in results} == {target}
