"""Files of real sizes start within the memory that the docs promise, and engines share them."""

import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from benchmarks.peers.checkpoint import make_checkpoint, make_gguf
from benchmarks.peers.shapes import SHAPES as CHECKPOINTS
from benchmarks.start import measure
from tests.support.instruction_sets import needs_library

pytestmark = [pytest.mark.nightly, needs_library]

GIB = 2**30
OWN_OF_SECOND = GIB
"""What a second start may take besides what is mapped."""

ENGINE = """
import sys
from ostinato import LLM, SamplingParams
llm = LLM(sys.argv[1], dtype="bfloat16", num_blocks=16)
params = SamplingParams(max_tokens=2, temperature=0, detokenize=False)
print(llm.generate([[5, 6, 7]], params, use_tqdm=False)[0].outputs[0].token_ids, flush=True)
sys.stdin.read()
"""


class Shape(NamedTuple):
    """A model, its settings, and what it may take at its peak, mapped files included."""

    name: str
    gguf: str | None
    settings: tuple[str, ...]
    limit: int
    disk: int
    """Bytes of its files, and of its packed weights."""


SHAPES = (
    Shape("qwen3-4b", "Q4_0", (), 4 * GIB, 5 * GIB),
    Shape("qwen3-4b", "Q4_K_M", (), 5 * GIB, 6 * GIB),
    Shape("llama-3.1-8b", None, ("--quantization", "int8"), 12 * GIB, 25 * GIB),
    Shape("qwen3-30b-a3b", "Q4_0", ("--tokens", "21504"), 21 * GIB, 35 * GIB),  # 2 GiB of KV
)


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"{shape.name}-{shape.gguf}")
def test_a_model_of_real_size_starts_within_its_memory(shape: Shape, tmp_path: Path):
    """Pages that are mapped from files included, at the peak, in both starts."""
    if shutil.disk_usage(tmp_path).free < shape.disk + GIB:
        pytest.skip(f"{shape.name} takes {shape.disk / GIB:.0f} GiB of disk")
    if shape.gguf is None:
        model = make_checkpoint(tmp_path, CHECKPOINTS[shape.name])
    else:
        model = make_gguf(tmp_path, shape.name, shape.gguf)

    first, second = (measure([str(model), *shape.settings], tmp_path / "cache") for _ in range(2))

    assert first["token"] == second["token"]
    assert max(first["total"], second["total"]) <= shape.limit
    assert second["own"] <= OWN_OF_SECOND + 2 * GIB * bool(shape.settings)


def test_four_engines_share_one_copy_of_the_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Proportional set sizes count a page of four processes as a quarter for each."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    model = make_gguf(tmp_path, "qwen3-0.6b", "Q8_0")
    command = [sys.executable, "-c", ENGINE, str(model)]
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL, capture_output=True)
    [weights] = (tmp_path / "cache").rglob("weights.bin")
    engines = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) for _ in range(4)
    ]
    try:
        answers = {engine.stdout.readline() for engine in engines if engine.stdout is not None}
        assert len(answers) == 1 and answers != {b""}
        shares = [proportional_bytes(engine.pid, weights) for engine in engines]
    finally:
        for engine in engines:
            engine.kill()
            engine.communicate()

    resident = sum(rss for rss, _, _ in shares)
    assert resident > 2 * weights.stat().st_size, "each engine has most of the file"
    assert sum(pss for _, pss, _ in shares) <= weights.stat().st_size + 2**20
    assert sum(own for _, _, own in shares) == 0, "none has a page of its own"


def proportional_bytes(pid: int, file: Path) -> tuple[int, int, int]:
    """Return a process's resident, proportional and own bytes of a mapped file."""
    sums = {"Rss:": 0, "Pss:": 0, "Anonymous:": 0}
    is_of_file = False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        name, *rest = line.split()
        if not name.endswith(":"):
            is_of_file = line.endswith(str(file))
        elif is_of_file and name in sums:
            sums[name] += int(rest[0]) * 1024
    return sums["Rss:"], sums["Pss:"], sums["Anonymous:"]
