"""Media of the conformance suite: simulated and real disks, simulated and real servers."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import valkey

from ostinato.testing.simulated_disk import Faults, SimulatedFolder
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


class Disk:
    """A folder whose disk may have faults."""

    folder: Any

    def fail_writes(self, after_bytes: int | None) -> None:
        self.folder.faults.fail_after = after_bytes

    def slow_reads(self, seconds: float) -> None:
        self.folder.faults.read_seconds = seconds


class SimulatedDisk(Disk):
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


class FaultyFolder:
    """A real folder with the faults of a simulated disk."""

    def __init__(self, folder: LocalFolder | MemoryFolder) -> None:
        self._folder, self.faults = folder, Faults()
        self.path, self.names, self.remove = folder.path, folder.names, folder.remove
        self.close = folder.close

    def create(self, name):
        return FaultyFile(self.faults, self._folder.create(name))

    def open(self, name):
        return FaultyFile(self.faults, self._folder.open(name))


class FaultyFile:
    def __init__(self, faults, file):
        self._faults, self._file = faults, file
        self.size, self.sync, self.truncate = file.size, file.sync, file.truncate

    def write(self, buffers, offset):
        data = b"".join(buffers)
        allowed = self._faults.spend(len(data))
        self._file.write([data[:allowed]], offset)
        if allowed < len(data):
            self._faults.stop()

    def read(self, into, offset):
        self._faults.read()
        return self._file.read(into, offset)


class LocalDisk(Disk):
    """A folder of the operating system."""

    def __init__(self, path: Path) -> None:
        self.path = path

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


class HostMemory(Disk):
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
    """A ``ByteStore`` in a dict."""

    where = "memory"

    def __init__(self) -> None:
        self.values = dict[str, bytes]()

    def starts(self, keys: Sequence[str], size: int) -> list[bytes]:
        return [self.values.get(key, b"")[:size] for key in keys]

    def get(self, key: str, start: int, size: int) -> bytes:
        return self.values.get(key, b"")[start : start + size]

    def put(self, key: str, value: bytes, ttl_s: float, only_new: bool = False) -> bool:
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


class FaultyStore:
    """Gives a store the faults of a disk; no part of a value is written."""

    def __init__(self, *args):
        super().__init__(*args)
        self.faults = Faults()

    def get(self, key, start, size):
        self.faults.read()
        return super().get(key, start, size)  # type: ignore[misc]

    def put(self, key, value, ttl_s, only_new=False):
        if self.faults.spend(len(value)) < len(value):
            raise StoreError("out of memory")
        return super().put(key, value, ttl_s, only_new)  # type: ignore[misc]


class FaultyServer(FaultyStore, ServerInMemory):
    """A server in a dict, with faults."""


class FaultyBucket(FaultyStore, BucketStore):
    """An object store with faults."""


class Server:
    """A remote tier on a ``ByteStore``, whose values are read and written directly."""

    def __init__(self, store: ByteStore | None = None, options: RemoteOptions | None = None):
        self.store: Any = store or FaultyServer()
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
        self.store.faults.fail_after = after_bytes

    def slow_reads(self, seconds: float) -> None:
        self.store.faults.read_seconds = seconds


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
