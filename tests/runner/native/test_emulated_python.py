"""The wheel for ARM under an emulated Python: it is imported, and computes the golden bits.

Needs, beside the cross compiler, a Python for 64-bit ARM with the project's dependencies, torch
among them, and a command that runs it here, named by ``OSTINATO_ARM_PYTHON``; docs/platforms.md
says how to get one.
"""

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.cli.terminal import Terminal, terminal
from tests.exactness.test_portable_bits import CASES, GOLDEN
from tests.support.models.portable_weights import save_portable_checkpoint

__all__ = ["terminal"]

ROOT = Path(__file__).resolve().parents[3]
PYTHON = os.environ.get("OSTINATO_ARM_PYTHON", "")

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.timeout(7200),
    pytest.mark.skipif(not PYTHON, reason="OSTINATO_ARM_PYTHON names no Python for ARM"),
    pytest.mark.skipif(
        shutil.which("aarch64-linux-gnu-g++") is None, reason="needs g++-aarch64-linux-gnu"
    ),
]

PROGRAM = """
import json, sys
from pathlib import Path
from ostinato.runner.native.library import current_isa, library
from tests.exactness.test_portable_bits import CASES, answers_of, open_llm
answers = answers_of(open_llm(Path(sys.argv[1]), **CASES[sys.argv[2]][2]))
print(json.dumps({"isa": current_isa(library()).name, **answers}))
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the contents of a wheel that was compiled for ARM, from a copy of the tree."""
    folder = tmp_path_factory.mktemp("arm")
    tree, wheels = folder / "tree", folder / "wheels"
    ignored = shutil.ignore_patterns("*.so", "build", ".git", "__pycache__")
    shutil.copytree(ROOT, tree, ignore=ignored)
    environment = {**os.environ, "CMAKE_TOOLCHAIN_FILE": str(ROOT / "native/aarch64.cmake")}
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "-w", str(wheels), str(tree)]
    subprocess.run(command, env=environment, check=True)
    (wheel,) = wheels.glob("*.whl")
    assert wheel.name.endswith("_aarch64.whl"), wheel.name
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "site")
    return folder / "site"


def emulate(installed: Path, *arguments: str) -> str:
    """Run the Python for ARM with the wheel; returns what it says."""
    path = f"{installed}:{ROOT}"
    done = subprocess.run(
        [PYTHON, *arguments],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


def test_an_answer_of_this_machine_is_computed_again(
    installed: Path, terminal: Terminal, tmp_path: Path
):
    """From a log of the weights' digest, the settings, the seed and the prompt."""
    portable = ("--portable-bits", "--quantization", "w8a8", "--kv-cache-dtype", "int8")
    few = ("--seed", "1", "--max-tokens", "6", "--num-blocks", "64", "--json")
    result = terminal.run("generate", "ROMEO:", *few, *portable)
    assert result.exit_code == 0, result.output
    (tmp_path / "log.json").write_text(result.stdout)

    said = emulate(installed, "-m", "ostinato.cli", "replay", str(tmp_path / "log.json"))

    assert said == "answer 1: the same 6 tokens\n"


def test_a_forward_pass_has_the_bits_of_every_processor(installed: Path, tmp_path: Path):
    name = "qwen3"
    family, changes, _ = CASES[name]
    checkpoint = save_portable_checkpoint(tmp_path / "model", family, **changes)

    said = emulate(installed, "-c", PROGRAM, str(checkpoint), name)

    answers = json.loads(said.splitlines()[-1])
    assert answers.pop("isa").startswith("NEON")
    assert answers == json.loads(GOLDEN.read_text())[name]
