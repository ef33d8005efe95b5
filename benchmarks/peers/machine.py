"""Describes the machine, and what else it does during a measurement."""

import datetime
import os
import platform
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.peers.engines import ROOT

TICKS = os.sysconf("SC_CLK_TCK")
FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")
"""What decides how fast bfloat16 can be, from old to new."""


def stamp(threads: int) -> dict[str, Any]:
    """Say where, when, from what and how a run was made."""
    model, flags = _processor()
    commit = _git("rev-parse", "--short", "HEAD")
    if _git("status", "--porcelain", "--untracked-files=no"):
        commit += " with changes"
    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "command": " ".join(["python", *map(without_folders, sys.argv)]),
        "commit": commit,
        "processor": model,
        "cores": os.cpu_count(),
        "flags": [flag for flag in FLAGS if flag in flags],
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": f"{platform.system()} {platform.machine()}, Python {platform.python_version()}",
        "threads": threads,
        "bandwidth_gb_s": round(read_bandwidth(threads), 1),
        "load_average": os.getloadavg()[0],
    }


def without_folders(argument: str) -> str:
    """Return an argument of the command without the folders that only this machine has."""
    return re.sub(r"(^|=)/\S*/", r"\1", argument)


def read_bandwidth(threads: int, num_bytes: int = 2**29, rounds: int = 5) -> float:
    """Read a large array with all threads, again and again; returns the best GB/s."""
    parts = np.array_split(np.ones(num_bytes // 8, np.int64), threads)
    best = 0.0
    with ThreadPoolExecutor(threads) as pool:  # NumPy releases the lock while it reads
        for _ in range(rounds):
            start = time.perf_counter()
            list(pool.map(np.bitwise_or.reduce, parts))
            best = max(best, num_bytes / (time.perf_counter() - start) / 1e9)
    return best


def touch_memory(gib: float) -> float:
    """Write to so much memory once, and free it; returns the seconds that took.

    What no program has touched since a virtual machine started has no memory of its host's behind
    it yet, and costs many times as much at the first touch: engines that set their KV aside
    without writing to it would pay for that while they are measured, and others would not.
    """
    start = time.perf_counter()
    held = [np.ones(2**28, np.uint8) for _ in range(int(4 * gib))]
    del held
    return time.perf_counter() - start


def available_gib() -> float:
    """Memory that is free or can be freed."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable"):
            return int(line.split()[1]) / 2**20
    return float("inf")


@dataclass(frozen=True)
class Moment:
    """Readings of the clocks: seconds of all cores together since the machine started."""

    wall_s: float
    busy_s: float
    stolen_s: float

    @staticmethod
    def read() -> "Moment":
        """Read ``/proc/stat``."""
        numbers = [int(word) for word in Path("/proc/stat").read_text().split("\n")[0].split()[1:9]]
        user, nice, system, _, _, irq, softirq, stolen = numbers
        busy = user + nice + system + irq + softirq
        return Moment(time.perf_counter(), busy / TICKS, stolen / TICKS)

    def taken_until(self, end: "Moment") -> float:
        """CPU seconds that were spent between two moments, by any process, or stolen."""
        return end.busy_s - self.busy_s + end.stolen_s - self.stolen_s


def _processor() -> tuple[str, list[str]]:
    model, flags = platform.processor() or "unknown", []
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            model = value.strip()
        elif key.strip() == "flags":
            flags = value.split()
    return model, flags


def _git(*arguments: str) -> str:
    answer = subprocess.run(
        ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return answer.stdout.strip() or ("" if answer.returncode == 0 else "unknown")
