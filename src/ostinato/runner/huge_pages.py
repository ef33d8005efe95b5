"""Puts memory that every step reads into huge pages.

The processor translates the address of each page before reading it, and prefetches only up to its
end. Linux has pages of 2 MiB beside those of 4 KiB, on request (``madvise(2)``): untouched memory
is allocated in them, and used memory is copied into them (``MADV_COLLAPSE``, Linux 6.1). If there
are none, or the kernel refuses, small pages are used.
"""

import ctypes
import functools
import sys

_HUGEPAGE, _COLLAPSE = 14, 25  # linux/mman.h

PAGE_BYTES = 2 * 2**20
"""A huge page of x86, and of ARM with small pages of 4 KiB."""


def expect_block(num_bytes: int) -> None:
    """Give the next allocated block of memory huge pages from its first touch.

    Allocates such a block, advises the kernel, and frees it untouched: an allocator that keeps
    freed blocks returns the same one again, see ``malloc_tuning``; with others this has no effect.

    Args:
        num_bytes: Number of bytes of the block; below one page nothing is done.
    """
    calls = memory_calls()
    if calls is None or num_bytes < PAGE_BYTES:
        return
    block = calls.malloc(num_bytes + PAGE_BYTES)
    if block:
        _advise(calls, block, num_bytes + PAGE_BYTES, _HUGEPAGE)
        calls.free(block)


def into_huge_pages(address: int, num_bytes: int) -> None:
    """Put memory that is in use into huge pages; its address does not change.

    Args:
        address: Address of the memory.
        num_bytes: Number of bytes; below one page nothing is done.

    Cost: the kernel copies the memory once, unless it is in huge pages already.
    """
    calls = memory_calls()
    if calls is not None and num_bytes >= PAGE_BYTES:
        for advice in (_HUGEPAGE, _COLLAPSE):
            _advise(calls, address, num_bytes, advice)


def _advise(calls: ctypes.CDLL, address: int, num_bytes: int, advice: int) -> None:
    """Advise the kernel on all pages that memory has a part in, else on those that it fills."""
    last = address + num_bytes
    outer = address // PAGE_BYTES * PAGE_BYTES, -(-last // PAGE_BYTES) * PAGE_BYTES
    inner = -(-address // PAGE_BYTES) * PAGE_BYTES, last // PAGE_BYTES * PAGE_BYTES
    for first, end in (outer, inner):  # the outer ones may reach beyond what is mapped
        if end > first and calls.madvise(first, end - first, advice) == 0:
            return


@functools.cache
def memory_calls() -> ctypes.CDLL | None:
    """Return the C library with ``malloc``, ``free`` and ``madvise``; None without Linux."""
    if not sys.platform.startswith("linux"):
        return None
    library, pointer, size = ctypes.CDLL(None, use_errno=True), ctypes.c_void_p, ctypes.c_size_t
    for function, result, arguments in (
        (library.malloc, pointer, (size,)),
        (library.free, None, (pointer,)),
        (library.madvise, ctypes.c_int, (pointer, size, ctypes.c_int)),
    ):
        function.restype, function.argtypes = result, arguments
    return library
