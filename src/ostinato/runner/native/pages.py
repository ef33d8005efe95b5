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
from collections.abc import Sequence
from dataclasses import dataclass

from ostinato.runner.huge_pages import PAGE_BYTES, memory_calls

logger = logging.getLogger(__name__)

_POPULATE_WRITE = 23

SPAN = 8_192
"""Slots ahead of the last written one whose pages are allocated."""

REST = 9.0
"""Times as long as it works that the thread rests while steps write far behind it."""

CLOSE = SPAN // 2
"""Slots between the thread and the last written one below which it does not rest."""

IDLE_S = 1.0
"""Seconds after the last write from which on it does not rest either."""


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
        self._pages = self._by_slot()
        self._target = self._last_slot = 0
        self._written_s = float("-inf")
        self._thread: threading.Thread | None = None
        self._is_closed = threading.Event()

    def begin(self, num_slots: int) -> None:
        """Allocate the pages of the first slots, if they fill any."""
        if sum(area.num_bytes for area in self._areas) >= PAGE_BYTES:
            self._extend(num_slots)

    def reach(self, slot: int) -> None:
        """Note that a slot is about to be written: the pages of ``SPAN`` more are allocated."""
        self._last_slot, self._written_s = max(slot, self._last_slot), time.monotonic()
        if self._target < min(slot + SPAN * 3 // 4, self._num_slots):
            self._extend(slot + SPAN)

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
            while self._pages and self._pages[-1][0] < self._target:
                slot, address, num_bytes = self._pages.pop()
                begin_s = time.monotonic()
                if self._is_closed.is_set() or not _populate(address, num_bytes):
                    return
                now_s = time.monotonic()
                if slot >= self._last_slot + CLOSE and now_s < self._written_s + IDLE_S:
                    self._is_closed.wait(REST * (now_s - begin_s))
        except MemoryError as error:
            logger.warning("the kernel has no memory for the next keys and values: %s", error)
            self._target = self._num_slots

    def _by_slot(self) -> list[tuple[int, int, int]]:
        """List the huge pages: the first slot in each, address and bytes; that of slot 0 last."""
        pages = list[tuple[int, int, int]]()
        for area in self._areas:
            part_bytes = area.num_bytes // area.num_parts
            low, end = area.address, area.address + area.num_bytes
            while low < end:
                high = min((low // PAGE_BYTES + 1) * PAGE_BYTES, end)
                within = (low - area.address) % part_bytes
                begins_part = not within or within + high - low > part_bytes
                slot = 0 if begins_part else within * self._num_slots // part_bytes
                pages.append((slot, low, high - low))
                low = high
        return sorted(pages, reverse=True)


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
