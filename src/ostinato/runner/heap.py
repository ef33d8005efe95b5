"""Keeps the memory of large temporaries.

glibc gives a large block back to the kernel when it is freed, and the kernel zeroes each page of it
when it is asked for again: tens of thousands of page faults in a step of 512 tokens. Told to keep
blocks of up to 32 MiB, the most that it can be told, it has them at hand for the next step.

This holds for the whole process. What is kept is bounded, and where glibc is told otherwise, by
``GLIBC_TUNABLES`` or a variable that begins with ``MALLOC_``, nothing is changed.
"""

import ctypes
import functools
import os
import platform

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h

LARGEST_KEPT_BYTES = 32 * 2**20
"""Larger blocks come from the kernel and go back to it: glibc's own limit, on 64 bits."""

MOST_KEPT_BYTES = 256 * 2**20
"""Free memory at the end of the heap that is kept for the next step."""


@functools.cache
def keep_large_blocks() -> bool:
    """Tell glibc to keep the memory of large temporaries, once per process.

    Returns:
        Whether it was told: not without glibc, nor where the environment settles it.
    """
    if platform.libc_ver()[0] != "glibc" or _is_settled(os.environ):
        return False
    mallopt = ctypes.CDLL(None).mallopt
    mallopt.argtypes, mallopt.restype = (ctypes.c_int, ctypes.c_int), ctypes.c_int
    kept = mallopt(_M_MMAP_THRESHOLD, LARGEST_KEPT_BYTES)
    return bool(kept and mallopt(_M_TRIM_THRESHOLD, MOST_KEPT_BYTES))


def _is_settled(environment: "os._Environ[str]") -> bool:
    """Whether the user has told glibc what to do."""
    tunables = environment.get("GLIBC_TUNABLES", "")
    return "glibc.malloc" in tunables or any(name.startswith("MALLOC_") for name in environment)
