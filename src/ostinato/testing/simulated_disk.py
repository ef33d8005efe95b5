"""A simulated disk, for tests of tiers: it can be killed, lose power, fail, be slow or damaged.

A *kill* at any byte keeps everything written before, as a page cache does. A *power loss* keeps
what was synced, and any subset of the sectors written since.
"""

import errno
import os
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from ostinato.tiers.port import Buffer
from ostinato.tiers.record import ALIGNMENT


class Killed(BaseException):
    """The process of the simulated disk has ended here."""


@dataclass
class Faults:
    """Faults of the disk, which may be changed at any time.

    Attributes:
        kill_after: Bytes written before the process is killed; None for never. Every other change
            of the disk counts as one byte.
        fail_after: Bytes written before writes fail; None for never.
        write_errno: Their error; by default the disk is full.
        read_errno: Error of every read; 0 for none.
        read_seconds: Duration of each read.
    """

    kill_after: int | None = None
    fail_after: int | None = None
    write_errno: int = errno.ENOSPC
    read_errno: int = 0
    read_seconds: float = 0.0

    def spend(self, size: int) -> int:
        """Count bytes as written; returns how many are written before a fault."""
        left = self.fail_after if self.kill_after is None else self.kill_after
        if left is None:
            return size
        if self.kill_after is None:
            self.fail_after = max(0, left - size)
        else:
            self.kill_after = max(0, left - size)
        return min(size, left)

    def stop(self) -> None:
        """Raise the fault."""
        if self.kill_after is not None:
            raise Killed
        raise OSError(self.write_errno, os.strerror(self.write_errno))

    def read(self) -> None:
        """Raise the error of reads, if they have one, or take their time."""
        if self.read_errno:
            raise OSError(self.read_errno, os.strerror(self.read_errno))
        until = time.monotonic() + self.read_seconds
        while self.read_seconds and time.monotonic() <= until:
            pass

    def change(self) -> None:
        """Count a change that is not a write."""
        if not self.spend(1):
            self.stop()


@dataclass
class SimulatedFile:
    """A file that tracks which of its writes are durable.

    Attributes:
        faults: Faults of its disk.
        content: What processes see.
        durable: What survives a power loss.
        pending: Writes since the last sync, and truncations as empty ones.
    """

    faults: Faults
    content: bytearray = field(default_factory=bytearray)
    durable: bytearray = field(default_factory=bytearray)
    pending: list[tuple[int, bytes]] = field(default_factory=list)

    def size(self) -> int:
        """Bytes in it."""
        return len(self.content)

    def write(self, buffers: Sequence[Buffer], offset: int) -> None:
        """Write all buffers, or a part before a fault."""
        data = b"".join(buffers)
        allowed = self.faults.spend(len(data))
        _put(self.content, offset, data[:allowed])
        if allowed:
            self.pending.append((offset, data[:allowed]))
        if allowed < len(data):
            self.faults.stop()

    def read(self, into: memoryview, offset: int) -> int:
        """Read until the memory is full or the file ends."""
        self.faults.read()
        data = self.content[offset : offset + len(into)]
        into[: len(data)] = data
        return len(data)

    def sync(self) -> None:
        """Make all written bytes durable."""
        self.faults.change()
        self.durable, self.pending = self.content[:], []

    def truncate(self, size: int) -> None:
        """Cut off all bytes from an offset on."""
        self.faults.change()
        del self.content[size:]
        self.pending.append((size, b""))

    def after_power_loss(self, rng: random.Random) -> bytearray:
        """Return what is left: all synced bytes, and any subset of the sectors written since."""
        left, survival = self.durable[:], rng.choice((0.0, 0.5, 0.9, 1.0))
        for offset, data in self.pending:
            if not data and rng.random() < survival:
                del left[offset:]
            for start in range(0, len(data), ALIGNMENT):
                if rng.random() < survival:
                    _put(left, offset + start, data[start : start + ALIGNMENT])
        return left


class SimulatedFolder:
    """A folder of simulated files. Creating and removing is durable at once, as in ``Folder``."""

    path = "simulated"

    def __init__(self, files: dict[str, bytearray] | None = None) -> None:
        self.faults = Faults()
        self.files = {
            name: SimulatedFile(self.faults, content[:], content[:])
            for name, content in (files or {}).items()
        }

    def names(self) -> list[str]:
        """Names of the files, sorted."""
        return sorted(self.files)

    def create(self, name: str) -> SimulatedFile:
        """Create a file."""
        self.faults.change()
        assert name not in self.files, f"{name} exists"
        file = self.files[name] = SimulatedFile(self.faults)
        return file

    def open(self, name: str) -> SimulatedFile:
        """Open a file."""
        return self.files[name]

    def remove(self, name: str) -> None:
        """Remove a file."""
        self.faults.change()
        self.files.pop(name, None)

    def close(self) -> None:
        """Do nothing: there are no other processes."""

    def replace(self, name: str, content: bytes | None) -> None:
        """Replace the content of a file durably; None removes the file."""
        if content is None:
            self.files.pop(name, None)
            return
        file = self.files.setdefault(name, SimulatedFile(self.faults))
        file.content[:] = content
        file.durable[:] = content

    def num_bytes(self) -> int:
        """Bytes of all segments."""
        return sum(file.size() for name, file in self.files.items() if "segment" in name)

    def after_kill(self) -> "SimulatedFolder":
        """Return the folder as the next process finds it."""
        return SimulatedFolder({name: file.content for name, file in self.files.items()})

    def after_power_loss(self, rng: random.Random) -> "SimulatedFolder":
        """Return the folder as it is found after a power loss."""
        left = {name: file.after_power_loss(rng) for name, file in self.files.items()}
        return SimulatedFolder(left)


def _put(content: bytearray, offset: int, data: bytes) -> None:
    if data and len(content) < offset:
        content.extend(bytes(offset - len(content)))
    content[offset : offset + len(data)] = data
