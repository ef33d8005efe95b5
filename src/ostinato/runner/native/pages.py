"""Allocates memory pages for keys and values before they are written.

The kernel allocates and zeroes each page of a mapping when it is first written, and in a virtual
machine the host may have to do so as well, at seconds per gigabyte. Each part of the memory (a head
of a layer) crosses into a new page at the same block, and a step that wrote there first would wait
for hundreds of pages at once. So a thread allocates those of the first blocks from the start on,
and later those of the blocks that come next. No more than that: a pool may be as large as half of
the memory, and most never fill it.

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
from dataclasses import dataclass

from ostinato.runner.huge_pages import PAGE_BYTES, memory_calls

logger = logging.getLogger(__name__)

_POPULATE_WRITE = 23

SPAN = 8_192
"""Slots whose pages are allocated together: of 128 numbers of 16 bits, a huge page has so many."""

REST = 9.0
"""Times as long as it works that the thread rests once steps write."""


@dataclass(frozen=True, slots=True)
class Area:
    """A mapping.

    Attributes:
        address: Its address, at the start of a page.
        num_bytes: Its size.
        num_parts: Number of parts of equal size, each with a row for every slot.
    """

    address: int
    num_bytes: int
    num_parts: int


class PagesAhead:
    """Allocates the pages of the slots behind those that are written, on a thread of its own."""

    def __init__(self, areas: Sequence[Area], num_slots: int) -> None:
        """Begin with none of the pages allocated that hold ``num_slots`` slots."""
        self._areas, self._num_slots = areas, num_slots
        self._num_taken = self._target = 0
        self._rest = 0.0
        self._thread: threading.Thread | None = None
        self._is_closed = threading.Event()

    def begin(self, num_slots: int) -> None:
        """Allocate the pages of the first slots, if they fill any; rest once any is written."""
        if sum(area.num_bytes for area in self._areas) >= PAGE_BYTES:
            self._extend(num_slots)

    def reach(self, slot: int) -> None:
        """Note that a slot is about to be written: all up to the next ``SPAN`` are allocated."""
        self._rest = REST
        if self._target < min(slot + SPAN, self._num_slots):
            self._extend(self._target + SPAN)

    def close(self) -> None:
        """Stop, before the memory goes."""
        self._is_closed.set()
        self.wait()

    def wait(self) -> None:
        """Wait until what was asked for is allocated."""
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def _extend(self, target: int) -> None:
        self._target = min(target, self._num_slots)
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._take, name="ostinato-pages", daemon=True)
            self._thread.start()

    def _take(self) -> None:
        try:
            while self._num_taken < self._target:
                end = min(self._num_taken + SPAN, self._num_slots)
                for address, num_bytes in self._pieces(self._num_taken, end):
                    begin_s = time.monotonic()
                    if self._is_closed.is_set() or not _populate(address, num_bytes):
                        return
                    self._is_closed.wait(self._rest * (time.monotonic() - begin_s))
                self._num_taken = end
        except MemoryError as error:
            logger.warning("the kernel has no memory for the next keys and values: %s", error)
            self._target = self._num_slots

    def _pieces(self, begin: int, end: int) -> Iterator[tuple[int, int]]:
        """Yield the huge pages of some slots: the first of every part, then the second of each."""
        row_bytes = [area.num_bytes // area.num_parts // self._num_slots for area in self._areas]
        first = min(row_bytes, default=0) * begin // PAGE_BYTES * PAGE_BYTES
        for step in range(first, max(row_bytes, default=0) * end + PAGE_BYTES, PAGE_BYTES):
            for area, size in zip(self._areas, row_bytes, strict=True):
                last = area.address + area.num_bytes
                for part in range(area.address, last, area.num_bytes // area.num_parts):
                    page = (part + step) // PAGE_BYTES * PAGE_BYTES
                    low, high = max(area.address, page), min(last, page + PAGE_BYTES)
                    if low < part + size * end and high > part + size * begin and low < high:
                        yield low, high - low


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
