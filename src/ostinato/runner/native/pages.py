"""Takes memory for keys and values from the kernel.

A mapping is a promise: the kernel finds and zeroes each page when it is first written, and in a
virtual machine the host may have to find it first, at seconds per gigabyte. A prompt that
is the first to write to its blocks would wait for that in each layer. So the pages of the first
blocks, which the first prompts will fill, are taken at the start, as many as a bounded time
allows. All others are taken when they are written, as ever: a pool may be as large as half of the
memory, and most never fill it.

Source: ``MADV_POPULATE_WRITE``, madvise(2), Linux 5.14; older kernels take pages when they are
written.
"""

import ctypes
import errno
import functools
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

_POPULATE_WRITE = 23

HUGE_PAGE = 2 << 20
"""What is taken at a time, in bytes: as large as the larger of the usual pages."""

PATIENCE = 2.0
"""Seconds that a start may take longer for it."""


@dataclass(frozen=True, slots=True)
class Area:
    """A mapping.

    Attributes:
        address: Where it begins, a page's beginning.
        num_bytes: How long it is.
        num_parts: Of like size, whose beginnings are used first.
        num_wanted: Bytes of the beginning of each part that are to be taken.
    """

    address: int
    num_bytes: int
    num_parts: int
    num_wanted: int


def take_pages(areas: Sequence[Area], num_threads: int, patience: float = PATIENCE) -> int:
    """Have the kernel bring pages, zeroed, until all that are wanted are there or time is up.

    Args:
        areas: Which.
        num_threads: How many may wait for the kernel at once.
        patience: Seconds after which no more pages are asked for.

    Returns:
        Bytes that were asked for and brought; 0 where the kernel cannot be asked.

    Raises:
        MemoryError: The kernel has no memory left.
    """
    deadline = time.monotonic() + patience
    pieces, lock, taken = _pieces(areas), threading.Lock(), [0] * num_threads

    def work(thread: int) -> None:
        while time.monotonic() < deadline:
            with lock:
                address, num_bytes = next(pieces, (0, 0))
            if not num_bytes or not _bring(address, num_bytes):
                return
            taken[thread] += num_bytes

    with ThreadPoolExecutor(num_threads) as threads:
        for done in [threads.submit(work, thread) for thread in range(num_threads)]:
            done.result()
    return sum(taken)


def _pieces(areas: Sequence[Area]) -> Iterator[tuple[int, int]]:
    """Cut areas at huge pages: the first of every part, then the second of every part."""
    most = max((area.num_wanted for area in areas), default=0)
    for step in range(0, most + HUGE_PAGE, HUGE_PAGE):
        for area in areas:
            end, part_bytes = area.address + area.num_bytes, area.num_bytes // area.num_parts
            for start in range(area.address, end, max(part_bytes, 1)):
                page = (start + step) // HUGE_PAGE * HUGE_PAGE
                first, last = max(area.address, page), min(end, page + HUGE_PAGE)
                if first < min(start + area.num_wanted, last):
                    yield first, last - first


def _bring(address: int, num_bytes: int) -> bool:
    """Have the kernel bring the pages of a range; False where it does not know how."""
    if _madvise()(address, num_bytes, _POPULATE_WRITE) == 0:
        return True
    code = ctypes.get_errno()
    if code == errno.ENOMEM:
        raise MemoryError(f"{num_bytes:,} bytes: {os.strerror(code)}")
    return False


@functools.cache
def _madvise() -> Callable[[int, int, int], int]:
    """Return the C library's ``madvise``, which lets other threads run meanwhile."""
    function = ctypes.CDLL(None, use_errno=True).madvise
    function.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    function.restype = ctypes.c_int
    typed: Callable[[int, int, int], int] = function
    return typed
