"""Media of the conformance suite: simulated and real disks, simulated and real servers."""

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import valkey

from ostinato.testing.simulated_disk import SimulatedFolder
from ostinato.tiers.byte_store import ByteStore, StoreError
from ostinato.tiers.disk import DiskOptions, DiskTier
from ostinato.tiers.disk.host_memory import MemoryFolder
from ostinato.tiers.folder import LocalFolder
from ostinato.tiers.port import KVTier
from ostinato.tiers.remote import RemoteOptions, RemoteTier
from ostinato.tiers.remote.object_store import BucketStore
from ostinato.tiers.remote.valkey_store import ValkeyStore

SECRET = bytes(range(32))
SEGMENTS = DiskOptions(limit_bytes=256 * 1024, segment_bytes=16 * 1024)
SEALED = DiskOptions(limit_bytes=256 * 1024, segment_bytes=16 * 1024, sealed=True)


class SimulatedDisk:
    """A disk in memory, of which all that the page cache held survives a kill."""

    def __init__(self, options: DiskOptions = SEGMENTS) -> None:
        self.folder, self.options = SimulatedFolder(), options

    def open(self) -> KVTier:
        return DiskTier(self.folder, self.options)

    def kill(self) -> None:
        self.folder = self.folder.after_kill()

    def values(self) -> dict[str, bytes]:
        return {name: bytes(file.content) for name, file in self.folder.files.items()}

    def put(self, name: str, value: bytes | None) -> None:
        self.folder.replace(name, value)

    def fail_writes(self, after_bytes: int | None) -> None:
        self.folder.faults.fail_after = after_bytes

    def slow_reads(self, seconds: float) -> None:
        self.folder.faults.read_seconds = seconds


class FaultyFolder:
    """A real folder whose writes fail, or whose reads take long, when they are told to."""

    left: int | None = None
    read_seconds = 0.0

    def __init__(self, folder: LocalFolder | MemoryFolder) -> None:
        self._folder = folder
        self.path, self.names, self.remove = folder.path, folder.names, folder.remove
        self.close = folder.close

    def create(self, name):
        return FaultyFile(self, self._folder.create(name))

    def open(self, name):
        return FaultyFile(self, self._folder.open(name))


class FaultyFile:
    def __init__(self, folder, file):
        self._folder, self._file = folder, file
        self.size, self.sync, self.truncate = file.size, file.sync, file.truncate

    def write(self, buffers, offset):
        data, left = b"".join(buffers), self._folder.left
        allowed = len(data) if left is None else min(left, len(data))
        self._file.write([data[:allowed]], offset)
        if left is not None:
            self._folder.left = left - allowed
        if allowed < len(data):
            raise OSError(28, "No space left on device")

    def read(self, into, offset):
        wait(self._folder.read_seconds)
        return self._file.read(into, offset)


class LocalDisk:
    """A folder of the operating system."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.folder: FaultyFolder

    def open(self) -> KVTier:
        self.folder = FaultyFolder(LocalFolder(self.path))
        return DiskTier(self.folder, SEGMENTS)

    def kill(self) -> None:
        self.folder.close()

    def values(self) -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in self.path.iterdir()}

    def put(self, name: str, value: bytes | None) -> None:
        if value is None:
            (self.path / name).unlink(missing_ok=True)
        else:
            (self.path / name).write_bytes(value)

    def fail_writes(self, after_bytes: int | None) -> None:
        self.folder.left = after_bytes

    def slow_reads(self, seconds: float) -> None:
        self.folder.read_seconds = seconds


class HostMemory(LocalDisk):
    """Host memory that outlives its tier, as no process keeps it: so that restarts are tried."""

    def __init__(self, options: DiskOptions = SEGMENTS) -> None:
        self.memory, self.options = MemoryFolder(options.segment_bytes), options

    def open(self) -> KVTier:
        self.folder = FaultyFolder(self.memory)
        self.folder.close = lambda: None
        return DiskTier(self.folder, self.options, name="host")

    def kill(self) -> None:
        pass

    def values(self) -> dict[str, bytes]:
        return {name: self._content(name) for name in self.memory.names()}

    def put(self, name: str, value: bytes | None) -> None:
        if value is None:
            self.memory.remove(name)
            return
        file = self.memory.open(name) if name in self.memory.names() else self.memory.create(name)
        file.truncate(0)
        file.write([value], 0)

    def _content(self, name: str) -> bytes:
        file = self.memory.open(name)
        content = bytearray(file.size())
        file.read(memoryview(content), 0)
        return bytes(content)


class ServerInMemory:
    """A ``ByteStore`` in a dict, with faults."""

    where = "memory"

    def __init__(self) -> None:
        self.values = dict[str, bytes]()
        self.left: int | None = None
        self.read_seconds = 0.0

    def starts(self, keys: Sequence[str], size: int) -> list[bytes]:
        return [self.values.get(key, b"")[:size] for key in keys]

    def get(self, key: str, start: int, size: int) -> bytes:
        wait(self.read_seconds)
        return self.values.get(key, b"")[start : start + size]

    def put(self, key: str, value: bytes, ttl_s: float, only_new: bool = False) -> bool:
        if self.left is not None:
            self.left -= len(value)
            if self.left < 0:
                raise StoreError("out of memory")
        if only_new and key in self.values:
            return False
        self.values[key] = value
        return True

    def expire(self, keys: Sequence[str], ttl_s: float) -> None:
        pass

    def keys(self, prefix: str) -> Iterator[str]:
        return iter([key for key in self.values if key.startswith(prefix)])

    def delete(self, keys: Sequence[str]) -> None:
        for key in keys:
            self.values.pop(key, None)

    def abort(self) -> None:
        pass

    def close(self) -> None:
        pass


class Server:
    """A remote tier on a ``ByteStore``, whose values are read and written directly."""

    def __init__(self, store: ByteStore | None = None, options: RemoteOptions | None = None):
        self.store: Any = store or ServerInMemory()
        self.store.close = lambda: None  # the next client uses it as well
        self.options = options or RemoteOptions()
        self.tiers = list[RemoteTier]()

    def open(self) -> KVTier:
        self.tiers.append(RemoteTier(self.store, self.options))
        return self.tiers[-1]

    def kill(self) -> None:
        """End the threads, which are all that a client has."""
        while self.tiers:
            self.tiers.pop().close()

    def values(self) -> dict[str, bytes]:
        return {key: self.store.get(key, 0, 1 << 30) for key in self.store.keys("ostinato/")}

    def put(self, name: str, value: bytes | None) -> None:
        if value is None:
            self.store.delete([name])
        else:
            self.store.put(name, value, 60)

    def fail_writes(self, after_bytes: int | None) -> None:
        self.store.left = after_bytes

    def slow_reads(self, seconds: float) -> None:
        self.store.read_seconds = seconds


class FaultyBucket(BucketStore):
    """An object store in memory, with the faults of ``ServerInMemory``."""

    left: int | None = None
    read_seconds = 0.0

    def get(self, key, start, size):
        wait(self.read_seconds)
        return super().get(key, start, size)

    def put(self, key, value, ttl_s, only_new=False):
        if self.left is not None:
            self.left -= len(value)
            if self.left < 0:
                raise StoreError("access denied")
        return super().put(key, value, ttl_s, only_new)


class RealServer(Server):
    """A process of Valkey or Redis."""

    def __init__(self, url: str) -> None:
        super().__init__(ValkeyStore(url, timeout_s=20.0), RemoteOptions(timeout_s=20.0))
        self.client: Any = valkey.Valkey.from_url(url)
        self.client.config_set("maxmemory", 0)
        self.client.flushall()

    def fail_writes(self, after_bytes: int | None) -> None:
        """A server is full or not: it takes no part of a value."""
        self.client.config_set("maxmemory", 0 if after_bytes is None else 1)

    def slow_reads(self, seconds: float) -> None:
        if seconds:
            self.client.client_pause(int(seconds * 1000))


def wait(seconds: float) -> None:
    until = time.monotonic() + seconds
    while seconds and time.monotonic() <= until:
        pass
