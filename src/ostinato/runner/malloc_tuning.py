"""Keeps the memory of large temporaries for the next step (malloc settings).

By default glibc returns a large freed block to the kernel, which zeroes each page when it is
allocated again: tens of thousands of page faults in a step of 512 tokens. Here it is configured to
keep blocks of up to 32 MiB, its maximum, in steps, and to return all of a megabyte during a load.

This affects the whole process. The kept memory is bounded, and nothing is changed if the user
configured glibc by ``GLIBC_TUNABLES`` or a variable that begins with ``MALLOC_``.
"""

import ctypes
import functools
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h

LARGEST_KEPT_BYTES = 32 * 2**20
"""Larger blocks are always returned to the kernel: glibc's own limit, on 64 bits."""

MAX_KEPT_BYTES = 256 * 2**20
"""Maximum free memory at the end of the heap that is kept."""

_RETURNED_BYTES = 2**20


def keep_large_blocks() -> bool:
    """Configure glibc to keep the memory of large temporaries.

    Returns:
        Whether it was configured: not without glibc, or if the environment configures it.
    """
    return _configure(LARGEST_KEPT_BYTES, MAX_KEPT_BYTES)


@contextmanager
def returning_large_blocks() -> Iterator[None]:
    """Return large blocks to the kernel at once within a block of code; keep them afterwards.

    For loading: weights are packed and written by the hundred, and glibc before 2.38 places an
    aligned block behind free memory of the very same size, so that the heap grew by a gigabyte.
    """
    _configure(_RETURNED_BYTES, _RETURNED_BYTES)
    try:
        yield
    finally:
        keep_large_blocks()


def _configure(mmap_threshold: int, trim_threshold: int) -> bool:
    if not _is_glibc() or _is_configured(os.environ):
        return False
    mallopt = ctypes.CDLL(None).mallopt
    mallopt.argtypes, mallopt.restype = (ctypes.c_int, ctypes.c_int), ctypes.c_int
    is_set = mallopt(_M_MMAP_THRESHOLD, mmap_threshold)
    return bool(is_set and mallopt(_M_TRIM_THRESHOLD, trim_threshold))


@functools.cache
def _is_glibc() -> bool:
    return platform.libc_ver()[0] == "glibc"


def _is_configured(environment: "os._Environ[str]") -> bool:
    """Return whether the user has configured glibc."""
    tunables = environment.get("GLIBC_TUNABLES", "")
    return "glibc.malloc" in tunables or any(name.startswith("MALLOC_") for name in environment)
