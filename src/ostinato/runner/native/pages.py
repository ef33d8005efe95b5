"""Allocates memory pages for keys and values at the start.

The kernel allocates and zeroes each page of a mapping when it is first written, and in a virtual
machine the host may have to do so as well, at seconds per gigabyte. The first prompts would wait
for that in each layer. So the pages of the first blocks, which these prompts fill, are allocated at
the start, as many as a time limit allows. All others are allocated when they are written: a pool
may be as large as half of the memory, and most never fill it.

Source: ``MADV_POPULATE_WRITE``, madvise(2), Linux 5.14; older kernels allocate pages when they are
written.
"""

import ctypes
import errno
import os
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from ostinato.runner.huge_pages import PAGE_BYTES, memory_calls

_POPULATE_WRITE = 23

PATIENCE = 2.0
"""Time limit, in seconds."""


@dataclass(frozen=True, slots=True)
class Area:
    """A mapping.

    Attributes:
        address: Its address, at the start of a page.
        num_bytes: Its size.
        num_parts: Number of parts of equal size, each of which is used from its start.
        first_bytes: Bytes to allocate at the start of each part.
    """

    address: int
    num_bytes: int
    num_parts: int
    first_bytes: int


def take_pages(areas: Sequence[Area], num_threads: int, patience: float = PATIENCE) -> int:
    """Allocate zeroed pages until those of all areas are there, or time is up.

    Args:
        areas: The mappings.
        num_threads: Number of threads that wait for the kernel.
        patience: Time limit, in seconds.

    Returns:
        Number of bytes allocated; 0 if the kernel does not support it.

    Raises:
        MemoryError: The kernel has no memory left.
    """
    deadline = time.monotonic() + patience
    pieces, lock, taken = _pieces(areas), threading.Lock(), [0] * num_threads

    def work(thread: int) -> None:
        while time.monotonic() < deadline:
            with lock:
                address, num_bytes = next(pieces, (0, 0))
            if not num_bytes or not _populate(address, num_bytes):
                return
            taken[thread] += num_bytes

    with ThreadPoolExecutor(num_threads) as threads:
        for done in [threads.submit(work, thread) for thread in range(num_threads)]:
            done.result()
    return sum(taken)


def _pieces(areas: Sequence[Area]) -> Iterator[tuple[int, int]]:
    """Yield huge pages: the first of every part, then the second of every part."""
    max_bytes = max((area.first_bytes for area in areas), default=0)
    for step in range(0, max_bytes + PAGE_BYTES, PAGE_BYTES):
        for area in areas:
            end, part_bytes = area.address + area.num_bytes, area.num_bytes // area.num_parts
            for start in range(area.address, end, max(part_bytes, 1)):
                page = (start + step) // PAGE_BYTES * PAGE_BYTES
                first, last = max(area.address, page), min(end, page + PAGE_BYTES)
                if first < min(start + area.first_bytes, last):
                    yield first, last - first


def _populate(address: int, num_bytes: int) -> bool:
    """Allocate the pages of a range; False if the kernel does not support it."""
    calls = memory_calls()
    if calls is None:
        return False
    if calls.madvise(address, num_bytes, _POPULATE_WRITE) == 0:
        return True
    code = ctypes.get_errno()
    if code == errno.ENOMEM:
        raise MemoryError(f"{num_bytes:,} bytes: {os.strerror(code)}")
    return False
