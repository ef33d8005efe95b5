"""All system calls of the disk tier; tests replace them by a simulated disk."""

import errno
import fcntl
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from ostinato.core.errors import ConfigError
from ostinato.tiers.port import Buffer

OWN_FILES = re.compile(r"\d{12}\.segment|lock|keys|secret")
"""Names of files in a folder of the disk tier."""


class File(Protocol):
    """An open file; closed with its last reference."""

    def size(self) -> int:
        """Bytes in it."""

    def write(self, buffers: Sequence[Buffer], offset: int) -> None:
        """Write all buffers one after the other; else OSError."""

    def read(self, into: memoryview, offset: int) -> int:
        """Read until the memory is full or the file ends; returns the number of bytes."""

    def sync(self) -> None:
        """Make all written bytes durable."""

    def truncate(self, size: int) -> None:
        """Cut off all bytes from an offset on."""


class Folder(Protocol):
    """A folder of files that one process uses."""

    @property
    def path(self) -> str:
        """Its path."""

    def names(self) -> list[str]:
        """Names of the files, sorted."""

    def create(self, name: str) -> File:
        """Create a file, durably."""

    def open(self, name: str) -> File:
        """Open a file."""

    def remove(self, name: str) -> None:
        """Remove a file, durably."""

    def close(self) -> None:
        """Unlock it for other processes."""


class LocalFile:
    """A file of the operating system."""

    def __init__(self, path: Path, flags: int) -> None:
        self._fd, self._is_read_only = -1, not flags & os.O_RDWR
        self._fd = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)

    def __del__(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)

    def size(self) -> int:
        """Bytes in it."""
        return os.fstat(self._fd).st_size

    def write(self, buffers: Sequence[Buffer], offset: int) -> None:
        """Write all buffers one after the other; else OSError."""
        if self._is_read_only:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        left = [memoryview(buffer).cast("B") for buffer in buffers]
        while left:
            count = os.pwritev(self._fd, left[:_MAX_BUFFERS], offset)
            offset += count
            while left and count >= len(left[0]):
                count -= len(left.pop(0))
            if left:
                left[0] = left[0][count:]

    def read(self, into: memoryview, offset: int) -> int:
        """Read until the memory is full or the file ends; returns the number of bytes."""
        done = 0
        while done < len(into):
            count = os.preadv(self._fd, [into[done:]], offset + done)
            if not count:
                break
            done += count
        return done

    def sync(self) -> None:
        """Make all written bytes durable; OSError if the file was removed."""
        _make_durable(self._fd, getattr(os, "fdatasync", os.fsync))  # macOS has only the latter
        if not os.fstat(self._fd).st_nlink:
            raise FileNotFoundError(errno.ENOENT, "the folder or its files were removed")

    def truncate(self, size: int) -> None:
        """Cut off all bytes from an offset on."""
        os.ftruncate(self._fd, size)


def _make_durable(fd: int, sync: Callable[[int], None]) -> None:
    """Write through to the disk; macOS leaves what ``fsync`` writes in the disk's own memory.

    Not all of its file systems can empty that memory: with others ``fsync`` has to be enough.
    """
    full = getattr(fcntl, "F_FULLFSYNC", None)
    if full is not None:
        try:
            fcntl.fcntl(fd, full)
            return
        except OSError as error:
            if error.errno not in (errno.ENOTSUP, errno.ENOTTY, errno.EINVAL):
                raise
    sync(fd)


class LocalFolder:
    """A folder of mode 0700, locked against other processes.

    Raises:
        ConfigError: Another process uses it, it contains foreign files, or it cannot be created.
    """

    _is_read_only = False

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path).absolute()
        try:
            self._path.mkdir(mode=0o700, parents=True, exist_ok=True)
            foreign = [x for x in self.names() if not OWN_FILES.fullmatch(x)]
            if foreign:
                raise ConfigError(
                    f"kv_disk={str(path)!r}: holds {foreign[0]!r}, which is not a file of "
                    "the disk tier: give it a folder of its own"
                )
            self._lock = self._open_lock()
        except OSError as error:
            raise ConfigError(
                f"kv_disk={str(path)!r}: {error.strerror}: give it a folder that this user may "
                "write, or leave kv_disk out"
            ) from error
        self._take_lock()

    def _open_lock(self) -> int:
        try:
            self._path.chmod(0o700)
            return os.open(self._path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            if error.errno != errno.EROFS:
                raise
            self._is_read_only = True  # its files may be read
            return os.open(self._path / "lock", os.O_RDONLY | os.O_CLOEXEC)

    def _take_lock(self) -> None:
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            owner = os.pread(self._lock, 32, 0).decode(errors="replace").strip() or "unknown"
            os.close(self._lock)
            raise ConfigError(
                f"kv_disk={str(self._path)!r}: in use by process {owner}: give each engine a "
                "folder of its own, and share through kv_remote"
            ) from error
        if self._is_read_only:
            return
        os.ftruncate(self._lock, 0)
        os.pwrite(self._lock, f"{os.getpid()}\n".encode(), 0)

    @property
    def path(self) -> str:
        """Its path."""
        return str(self._path)

    def names(self) -> list[str]:
        """Names of the files, sorted, without what macOS's Finder leaves in folders."""
        return sorted(set(os.listdir(self._path)) - {".DS_Store"})

    def create(self, name: str) -> LocalFile:
        """Create a file, durably."""
        file = LocalFile(self._path / name, os.O_CREAT | os.O_EXCL | os.O_RDWR)
        self._sync()
        return file

    def open(self, name: str) -> LocalFile:
        """Open a file."""
        return LocalFile(self._path / name, os.O_RDONLY if self._is_read_only else os.O_RDWR)

    def remove(self, name: str) -> None:
        """Remove a file, durably."""
        (self._path / name).unlink(missing_ok=True)
        self._sync()

    def close(self) -> None:
        """Unlock it for other processes."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _sync(self) -> None:
        fd = os.open(self._path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            _make_durable(fd, os.fsync)
        finally:
            os.close(fd)


_MAX_BUFFERS = min(1024, os.sysconf("SC_IOV_MAX"))
