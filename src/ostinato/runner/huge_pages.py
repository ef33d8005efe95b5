"""Memory that every step reads, in huge pages.

The processor translates the address of each page before reading it, and prefetches only up to its
end. Linux has pages of 2 MiB beside those of 4 KiB, on request (``madvise(2)``), where memory is
written for the first time. If there are none, or the kernel refuses, small pages are used.
"""

import ctypes
import functools
import mmap
import sys
from contextlib import suppress
from math import prod

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

PAGE_BYTES = 2 * 2**20
"""A huge page of x86, and of ARM with small pages of 4 KiB."""


def map_memory(num_bytes: int) -> NDArray[np.uint8]:
    """Map zeros that the kernel allocates page by page when they are written.

    Raises:
        MemoryError: The kernel does not map as many bytes.
    """
    try:
        memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"{num_bytes:,} bytes") from error
    with suppress(OSError, AttributeError):  # without huge pages (macOS), small ones are used
        memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, dtype=np.uint8)


def zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return zeros, in huge pages if they fill any."""
    num_bytes = prod(shape) * dtype.itemsize
    if num_bytes < PAGE_BYTES:
        return torch.zeros(shape, dtype=dtype)
    return torch.from_numpy(map_memory(num_bytes)).view(dtype).view(shape)


@functools.cache
def memory_calls() -> ctypes.CDLL | None:
    """Return the C library with ``madvise``; None without Linux."""
    if not sys.platform.startswith("linux"):
        return None
    library = ctypes.CDLL(None, use_errno=True)
    library.madvise.restype = ctypes.c_int
    library.madvise.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    return library
