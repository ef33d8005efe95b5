"""Memory that every step reads lies in large pages, where the kernel has them."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ostinato.runner.huge_pages import PAGE_BYTES, expect_block, into_huge_pages
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
from ostinato.runner.malloc_tuning import keep_large_blocks
keep_large_blocks()
weights = [PackedWeight([torch.zeros(2048, 1024).bfloat16()]) for _ in range(6)]
found = Path("/proc/self/smaps_rollup").read_text()
print(next(line.split()[1] for line in found.splitlines() if line.startswith("AnonHugePages")))
"""


@has_pages
@needs_library
def test_packed_weights_lie_in_large_pages():
    """In a process of its own: 24 MiB of weights, whose first page may be another's as well."""
    done = subprocess.run([sys.executable, "-c", HUGE], capture_output=True, text=True, check=True)
    assert int(done.stdout) >= 20 * 1024


def test_numbers_stay_what_they_are():
    block = torch.arange(3 * PAGE_BYTES // 8)
    expect_block(block.nbytes)
    into_huge_pages(block.data_ptr(), block.nbytes)
    assert torch.equal(block, torch.arange(3 * PAGE_BYTES // 8))


def test_memory_that_fills_no_page_is_left_alone():
    """And so is an address where nothing is mapped: the kernel refuses, without an error."""
    expect_block(PAGE_BYTES - 1)
    into_huge_pages(PAGE_BYTES * 3 // 2, PAGE_BYTES - 1)
    into_huge_pages(PAGE_BYTES * 3 // 2, 4 * PAGE_BYTES)


@needs_library
def test_a_packed_weight_is_overwritten_in_place():
    """Programs point to it."""
    weight, rows = PackedWeight([torch.zeros(64, 64)]), torch.zeros(1, 64)
    before = weight.record(rows, None, rows).tiles
    weight.replace(0, torch.ones(64, 64))
    assert weight.record(rows, None, rows).tiles == before
    assert weight.plain().eq(1).all()
