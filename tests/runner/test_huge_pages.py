"""Memory that every step reads lies in large pages, where the kernel has them."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ostinato.runner.huge_pages import PAGE_BYTES, map_memory, zeros
from ostinato.runner.native.packed import PackedWeight
from tests.support.instruction_sets import needs_library

ENABLED = Path("/sys/kernel/mm/transparent_hugepage/enabled")
has_pages = pytest.mark.skipif(
    not ENABLED.exists() or "[never]" in ENABLED.read_text(), reason="no large pages here"
)

HUGE = """
import sys, torch
from pathlib import Path
from ostinato.runner.native.packed import PackedWeight
weights = [PackedWeight([torch.zeros(2048, 1024).bfloat16()]) for _ in range(6)]
found = Path("/proc/self/smaps_rollup").read_text()
print(next(line.split()[1] for line in found.splitlines() if line.startswith("AnonHugePages")))
"""


@has_pages
@needs_library
def test_packed_weights_lie_in_large_pages():
    """In a process of its own: 24 MiB of weights."""
    done = subprocess.run([sys.executable, "-c", HUGE], capture_output=True, text=True, check=True)
    assert int(done.stdout) >= 20 * 1024


@pytest.mark.parametrize("shape", [(3,), (3, PAGE_BYTES // 4)])
def test_zeros_have_their_shape_and_may_be_written(shape: tuple[int, ...]):
    numbers = zeros(shape, torch.bfloat16)
    assert numbers.shape == shape and numbers.dtype == torch.bfloat16 and not numbers.any()
    numbers += 1
    assert numbers.eq(1).all()


def test_memory_that_the_kernel_does_not_map_is_refused():
    with pytest.raises(MemoryError, match="bytes"):
        map_memory(2**60)


@needs_library
def test_a_packed_weight_is_overwritten_in_place():
    """Programs point to it."""
    weight, rows = PackedWeight([torch.zeros(64, 64)]), torch.zeros(1, 64)
    before = weight.record(rows, None, rows).tiles
    weight.replace(0, torch.ones(64, 64))
    assert weight.record(rows, None, rows).tiles == before
    assert weight.plain().eq(1).all()
