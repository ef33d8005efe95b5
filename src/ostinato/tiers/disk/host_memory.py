"""``MemoryFolder``: the segments of a disk tier in host memory, below the pool of a GPU.

The log of segments serves memory as well as disks: no fragmentation, and one eviction policy.
Source: Rumble, Kejriwal, Ousterhout, Log-structured memory for DRAM-based storage, 2014.
"""

import errno
import mmap
import os
import threading
from collections.abc import Sequence

import numpy as np

from ostinato.tiers.port import Buffer


class MemoryFile:
    """A file in its own memory; the system allocates pages as they are written."""

    def __init__(self, capacity: int) -> None:
        """Map memory; OSError if the system has no address space left."""
        self._content = np.frombuffer(mmap.mmap(-1, capacity), np.uint8)
        self._size = 0

    def size(self) -> int:
        """Bytes in it."""
        return self._size

    def write(self, buffers: Sequence[Buffer], offset: int) -> None:
        """Write buffers one after the other; OSError if they exceed the capacity."""
        parts = [np.frombuffer(buffer, np.uint8) for buffer in buffers if len(buffer)]
        if offset + sum(map(len, parts)) > len(self._content):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        for part in parts:
            self._content[offset : offset + len(part)] = part
            offset += len(part)
        self._size = max(self._size, offset)

    def read(self, into: memoryview, offset: int) -> int:
        """Read until the memory is full or the file ends; returns the number of bytes."""
        count = max(0, min(len(into), self._size - offset))
        np.frombuffer(into, np.uint8)[:count] = self._content[offset : offset + count]
        return count

    def sync(self) -> None:
        """Return at once: memory is as durable as its process."""

    def truncate(self, size: int) -> None:
        """Cut off and overwrite all bytes from an offset on."""
        self._content[size : self._size] = 0
        self._size = min(size, self._size)


class MemoryFolder:
    """Files in memory, each of up to ``file_bytes``; lost with the process."""

    path = "memory"

    def __init__(self, file_bytes: int) -> None:
        self._file_bytes = file_bytes
        self._files: dict[str, MemoryFile] = {}
        self._lock = threading.Lock()

    def names(self) -> list[str]:
        """Names of the files, sorted."""
        with self._lock:
            return sorted(self._files)

    def create(self, name: str) -> MemoryFile:
        """Create a file."""
        file = MemoryFile(self._file_bytes)
        with self._lock:
            self._files[name] = file
        return file

    def open(self, name: str) -> MemoryFile:
        """Open a file."""
        return self._files[name]

    def remove(self, name: str) -> None:
        """Remove a file; its memory is freed after its last reader."""
        with self._lock:
            self._files.pop(name, None)

    def close(self) -> None:
        """Free the memory of all files."""
        with self._lock:
            self._files.clear()
