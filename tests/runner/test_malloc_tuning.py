"""Large temporaries stay in the process, unless the environment configures malloc."""

import os
import platform
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="there is no glibc here")

COUNT = """
import resource
from ostinato.runner.malloc_tuning import keep_large_blocks
import numpy as np

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        blocks = [np.empty(20 * 2**20, np.uint8) for _ in range(3)]
        for block in blocks:
            block.fill(1)
        del blocks, block
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

told = keep_large_blocks()
faults()
print(told, faults())
"""


def run(**environment: str) -> tuple[bool, int]:
    """Whether glibc was told, and the page faults of ten rounds with 60 MiB of temporaries."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("MALLOC_", "GLIBC_"))}
    done = subprocess.run(
        [sys.executable, "-c", COUNT], env=clean | environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    told, faults = done.stdout.split()
    return told == "True", int(faults)


def test_the_second_step_finds_the_memory_of_the_first():
    told, faults = run()
    assert told
    assert faults < 1000


@pytest.mark.parametrize(
    "environment",
    [{"MALLOC_TRIM_THRESHOLD_": "65536"}, {"GLIBC_TUNABLES": "glibc.malloc.trim_threshold=65536"}],
)
def test_who_has_settled_it_is_left_alone(environment: dict[str, str]):
    told, faults = run(**environment)
    assert not told
    assert faults > 10_000


GROW = """
import ctypes, resource
import torch
from ostinato.runner.malloc_tuning import returning_large_blocks

def own_mib():
    rows = [row.split() for row in open("/proc/self/status") if row.startswith("RssAnon")]
    return int(rows[0][1]) // 1024

before, kept = own_mib(), []
with returning_large_blocks():
    for index in range(40):
        block = torch.ones(20 * 2**20, dtype=torch.uint8)
        kept.append(torch.ones(64 * 2**10, dtype=torch.uint8))  # behind it, on the heap
        del block
print(own_mib() - before)
"""


def test_a_load_returns_what_it_packed_and_wrote():
    """Whatever stays is small; without it, blocks of 20 MiB leave holes between what stays."""
    done = subprocess.run([sys.executable, "-c", GROW], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 40
