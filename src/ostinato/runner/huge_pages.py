"""Puts memory that every step reads into huge pages.

The processor translates the address of each page before reading it, and prefetches only up to its
end. Linux has pages of 2 MiB beside those of 4 KiB, on request (``madvise(2)``): untouched memory
is allocated in them, and touched memory is copied into them (``MADV_COLLAPSE``, Linux 6.1).

Without such pages, or if the kernel refuses, small ones are used.
"""

import ctypes
import functools
import sys
from collections.abc import Callable
from typing import Any

_HUGEPAGE, _COLLAPSE = 14, 25  # linux/mman.h

PAGE_BYTES = 2 * 2**20
"""A large page of x86, and of ARM with small pages of 4 KiB."""


def expect_block(num_bytes: int) -> None:
    """Give the next allocated block of memory huge pages from its first touch.

    Allocates such a block, advises the kernel, and frees it untouched: an allocator that keeps
    freed blocks returns the same one again, see ``malloc_tuning``; with others this has no effect.

    Args:
        num_bytes: Number of bytes of the block; below one page nothing is done.
    """
    calls = _calls()
    if calls is None or num_bytes < PAGE_BYTES:
        return
    block = calls.malloc(num_bytes + PAGE_BYTES)
    if block:
        _advise(calls, block, num_bytes + PAGE_BYTES, _HUGEPAGE)
        calls.free(block)


def into_huge_pages(address: int, num_bytes: int) -> None:
    """Put memory into large pages, as far as it fills them with what is beside it.

    Args:
        address: Address of memory that is in use, and stays where it is.
        num_bytes: How much; below one page nothing is done.

    Cost: little where it is there already; else the kernel copies it once.
    """
    calls = _calls()
    if calls is not None and num_bytes >= PAGE_BYTES:
        for advice in (_HUGEPAGE, _COLLAPSE):
            _advise(calls, address, num_bytes, advice)


class _Calls:
    """The functions of the C library that are needed here."""

    malloc: Callable[[int], int | None]
    free: Callable[[int], None]
    madvise: Callable[[int, int, int], int]

    def __init__(self) -> None:
        library, pointer, size = ctypes.CDLL(None), ctypes.c_void_p, ctypes.c_size_t
        self.malloc = _declare(library.malloc, pointer, size)
        self.free = _declare(library.free, None, pointer)
        self.madvise = _declare(library.madvise, ctypes.c_int, pointer, size, ctypes.c_int)


def _advise(calls: _Calls, address: int, num_bytes: int, advice: int) -> None:
    """Advise the kernel on all pages that memory has a part in, else on those that it fills."""
    last = address + num_bytes
    outer = address // PAGE_BYTES * PAGE_BYTES, -(-last // PAGE_BYTES) * PAGE_BYTES
    inner = -(-address // PAGE_BYTES) * PAGE_BYTES, last // PAGE_BYTES * PAGE_BYTES
    for first, end in (outer, inner):  # the outer ones may reach beyond what is mapped
        if end > first and calls.madvise(first, end - first, advice) == 0:
            return


@functools.cache
def _calls() -> _Calls | None:
    return _Calls() if sys.platform.startswith("linux") else None


def _declare(function: Any, result: Any, *arguments: Any) -> Any:
    function.restype, function.argtypes = result, arguments
    return function
