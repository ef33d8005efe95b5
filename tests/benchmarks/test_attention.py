"""The benchmark of attention runs, and reading once is never slower than reading per request."""

import json
import sys
import time
from functools import partial
from statistics import median

import pytest
import torch

from benchmarks.attention import Scene, contestants, main
from benchmarks.command_line import by_turns
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


def test_instruction_sets_formats_and_settings_take_turns(tmp_path, capsys, monkeypatch):
    figures = tmp_path / "found.json"
    ways = ["--isa", "AVX2", "--kv-dtype", "int8", "--read-once", "never"]
    how = ["--scene", "prefill 32", "--rounds", "1", "--threads", "1", "--json", str(figures)]
    monkeypatch.setattr(sys, "argv", ["attention", *ways, *how])
    main()
    [scene] = json.loads(figures.read_text()).values()
    assert set(scene) == {"AVX2", "AVX2, int8 KV", "AVX2, never", "tiled", "sdpa"}
    assert all(milliseconds > 0 for milliseconds in scene.values())
    assert "AVX2, int8 KV" in capsys.readouterr().out


@pytest.mark.nightly
@pytest.mark.parametrize("isa", [isa for isa in (Isa.AMX, Isa.AVX512) if isa in ISAS])
@pytest.mark.parametrize("shared", [16, 64, 128, 512])
@pytest.mark.parametrize("own", [16, 64])
@pytest.mark.parametrize("num_sequences", [2, 4, 16])
def test_auto_is_never_slower_than_never(isa, shared, own, num_sequences):
    """CPU time of one thread, medians of ratios taken round by round; a tenth is noise."""
    torch.set_num_threads(1)
    scene = Scene("decode", num_sequences, shared, own, 1)
    runs = contestants(scene, torch.bfloat16, [isa], read_once="never")
    both = {
        name: partial(run, time.thread_time)
        for name, run in runs.items()
        if name.startswith(isa.name)
    }
    auto, never = by_turns(both, 41).values()
    assert median(one / other for one, other in zip(auto, never, strict=True)) <= 1.1
