"""Allocates memory pages for keys and values before they are written.

The kernel allocates and zeroes each page of a mapping when it is first written, and in a virtual
machine the host may have to do so as well, at seconds per gigabyte. The first prompts would wait
for that in each layer. So the pages of the first blocks, which these prompts fill, are allocated at
the start, as many as a time limit allows, and later those of the blocks that come next: each part
of the memory (a head of a layer) crosses into a new page at the same block, and a step that wrote
there first would wait for hundreds of pages at once. No more than that: a pool may be as large as
half of the memory, and most never fill it.

Source: ``MADV_POPULATE_WRITE``, madvise(2), Linux 5.14; older kernels allocate pages when they are
written.
"""

import ctypes
import errno
import logging
import os
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from ostinato.runner.huge_pages import PAGE_BYTES, memory_calls

logger = logging.getLogger(__name__)

_POPULATE_WRITE = 23

PATIENCE = 2.0
"""Time limit, in seconds."""

SPAN = 8_192
"""Slots whose pages are allocated together: of 128 numbers of 16 bits, a huge page has so many."""

REST = 9.0
"""Times as long as it works that the thread which allocates pages ahead rests."""


@dataclass(frozen=True, slots=True)
class Area:
    """A mapping.

    Attributes:
        address: Its address, at the start of a page.
        num_bytes: Its size.
        num_parts: Number of parts of equal size, each of which is used from its start.
        first_bytes: Bytes to allocate at the start of each part.
        skipped_bytes: Bytes among them that are left out, at the start of each part.
    """

    address: int
    num_bytes: int
    num_parts: int
    first_bytes: int
    skipped_bytes: int = 0


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


class PagesAhead:
    """Allocates the pages of the slots behind those that are written, on a thread of its own."""

    def __init__(self, areas: Sequence[Area], num_slots: int, num_taken: int) -> None:
        """Begin with the pages of the first ``num_taken`` slots allocated, of ``num_slots``."""
        self._areas, self._num_slots = areas, num_slots
        self._num_taken = num_taken
        self._thread: threading.Thread | None = None
        self._is_closed = threading.Event()

    def reach(self, slot: int) -> None:
        """Note that a slot is about to be written: all up to the next ``SPAN`` are allocated."""
        if self._num_taken >= min(slot + SPAN, self._num_slots):
            return
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._take, name="ostinato-pages", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Stop, before the memory goes."""
        self._is_closed.set()

    def wait(self) -> None:
        """Wait until what was asked for is allocated."""
        if self._thread is not None:
            self._thread.join()

    def _take(self) -> None:
        end = self._num_taken + SPAN
        areas = [self._area(area, self._num_taken, end) for area in self._areas]
        try:
            for address, num_bytes in _pieces(areas):
                begin_s = time.monotonic()
                if self._is_closed.is_set() or not _populate(address, num_bytes):
                    end = self._num_slots
                    break
                self._is_closed.wait(REST * (time.monotonic() - begin_s))
        except MemoryError as error:
            logger.warning("the kernel has no memory for the next keys and values: %s", error)
            end = self._num_slots
        self._num_taken = end

    def _area(self, area: Area, begin: int, end: int) -> Area:
        slot_bytes = area.num_bytes // area.num_parts // self._num_slots
        first_bytes = min(end, self._num_slots) * slot_bytes
        return replace(area, first_bytes=first_bytes, skipped_bytes=begin * slot_bytes)


def _pieces(areas: Sequence[Area]) -> Iterator[tuple[int, int]]:
    """Yield huge pages: the first of every part, then the second of every part."""
    max_bytes = max((area.first_bytes for area in areas), default=0)
    min_bytes = min((area.skipped_bytes for area in areas), default=0) // PAGE_BYTES * PAGE_BYTES
    for step in range(min_bytes, max_bytes + PAGE_BYTES, PAGE_BYTES):
        for area in areas:
            end, part_bytes = area.address + area.num_bytes, area.num_bytes // area.num_parts
            for start in range(area.address, end, max(part_bytes, 1)):
                page = (start + step) // PAGE_BYTES * PAGE_BYTES
                first, last = max(area.address, page), min(end, page + PAGE_BYTES)
                if (
                    first < min(start + area.first_bytes, last)
                    and last > start + area.skipped_bytes
                ):
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
