"""One model's packed weights: their file, how it is written and checked, and a source of them.

::

    weights.bin    tensors side by side, each at a multiple of 4,096 bytes
    index.json     {"sha256": of the text, "text": places, dtypes, shapes, checksums, ...}

A checksum is a CRC-32 of the tensor's bytes, computed of what was written before the entry is
published: not while a user waits for the weights.
"""

import hashlib
import json
import logging
import os
import threading
import zlib
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
import torch
from torch import Tensor, nn

from ostinato.runner.block_embedding import BlockEmbedding
from ostinato.runner.forward.codes import Activations, CodeFormat
from ostinato.runner.forward.packing import Pack, names_of
from ostinato.runner.forward.quantized import Quantization, QuantizedWeight
from ostinato.runner.loading.weight_source import CheckpointWeight, WeightSource
from ostinato.runner.native.packed import PackedWeight
from ostinato.runner.weight_cache.folder import INDEX, WEIGHTS, PartialFolder, mark_used

logger = logging.getLogger("ostinato")

NAMES_BETWEEN = "+"
"""Stands between the names of weights that are packed as one."""

ROPE_FACTORS = "rope factors"

_ALIGNMENT = 4096
_LARGE_BYTES = 2**28

Record = dict[str, Any]

_T = TypeVar("_T")


class EntryWriter:
    """Writes an entry tensor by tensor, and returns each as it is mapped from the file.

    Attributes:
        index: What the index will hold besides the tensors.
    """

    def __init__(self, max_bytes: int) -> None:
        """Create the files; raises OSError where that fails.

        Args:
            max_bytes: Bytes that the weights may take.
        """
        self._partial = PartialFolder()
        self._path = self._partial.path / WEIGHTS
        self._file = self._path.open("wb")
        self._max_bytes = max_bytes
        self._tensors: dict[str, Record] = {}
        self.index: Record = {}

    @property
    def folder(self) -> Path:
        """The folder that is written to."""
        return self._partial.path

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensors so far, and those between them."""
        return self._path.stat().st_size

    def add(self, name: str, tensor: Tensor) -> Tensor:
        """Write a tensor, and return the same numbers mapped from the file.

        Raises:
            OSError: It does not fit.
        """
        content = _bytes_of(tensor)
        start = -(-self._file.tell() // _ALIGNMENT) * _ALIGNMENT
        if start + len(content) > self._max_bytes:
            raise OSError(f"packed weights take more than {self._max_bytes:,} bytes")
        self._file.seek(start)
        self._file.write(content)
        self._file.flush()
        record = {
            "start": start,
            "dtype": str(tensor.dtype).removeprefix("torch."),
            "shape": list(tensor.shape),
        }
        self._tensors[name] = record
        return _mapped(self._path, record)

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def publish(self, key: str) -> None:
        """Make the entry visible; raises OSError where that fails.

        Large weights are published by a thread: the disk may take as long as the load did.
        """
        self._file.flush()
        if self._file.tell() < _LARGE_BYTES:
            return self._publish(key)
        thread = threading.Thread(target=self._publish_or_log, args=(key,), name="ostinato-weights")
        thread.start()  # no daemon: a process that ends waits for it
        return None

    def _publish_or_log(self, key: str) -> None:
        try:
            self._publish(key)
        except OSError as error:
            logger.info("packed weights are not kept: %s", error)
            self.discard()

    def _publish(self, key: str) -> None:
        os.fsync(self._file.fileno())  # or a crash could leave a file of zeros
        self._file.close()
        for record in self._tensors.values():
            record["crc32"] = _checksum(self._path, record)
        content = {"tensors": self._tensors, "file": _facts(self._path), **self.index}
        text = json.dumps(content)
        digest = hashlib.sha256(text.encode()).hexdigest()
        index = self._partial.path / INDEX
        index.write_text(json.dumps({"sha256": digest, "text": text}), encoding="utf-8")
        if self._partial.publish(key):
            logger.info("packed weights are kept in %s", self._partial.path.with_name(key))

    def discard(self) -> None:
        """Delete the files; what was mapped from them stays until it is released."""
        self._file.close()
        self._partial.discard()


class Entry:
    """A complete entry.

    Attributes:
        folder: Its folder.
        index: What its writer kept besides the tensors.
    """

    def __init__(self, folder: Path, index: Record) -> None:
        """Use the index of a folder that was checked."""
        self.folder, self.index = folder, index
        self._path = folder / WEIGHTS
        self._tensors: Mapping[str, Record] = index["tensors"]

    @classmethod
    def open(cls, folder: Path) -> "Entry":
        """Check an entry.

        Raises:
            ValueError: It is damaged.
            OSError: It cannot be read.

        Cost: reads the index; all bytes where the file is not the one that was written.
        """
        outer = json.loads((folder / INDEX).read_text(encoding="utf-8"))
        text = outer["text"]
        if hashlib.sha256(text.encode()).hexdigest() != outer["sha256"]:
            raise ValueError("its index is damaged")
        entry = cls(folder, json.loads(text))
        if entry.index["file"] != _facts(entry._path):
            entry.verify()
        mark_used(folder)
        return entry

    @property
    def num_bytes(self) -> int:
        """Bytes that are mapped."""
        return int(self.index["file"][0])

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def tensor(self, name: str) -> Tensor:
        """Return a tensor, mapped: its pages are read when they are used."""
        return _mapped(self._path, self._tensors[name])

    def verify(self) -> None:
        """Compare all tensors with their checksums.

        Raises:
            ValueError: They differ, or the file is too short.

        Cost: reads every byte.
        """
        if self._path.stat().st_size != self.num_bytes:
            raise ValueError(f"{WEIGHTS} has not the size that was written")
        for name, record in self._tensors.items():
            if _checksum(self._path, record) != record["crc32"]:
                raise ValueError(f"{name} is damaged")


class EntryWeight(CheckpointWeight):
    """A weight of an entry, mapped when it is read."""

    def __init__(self, shape: tuple[int, ...], tensor: Callable[[], Tensor]) -> None:
        """Read nothing; ``tensor`` maps it."""
        super().__init__(shape)
        self._tensor = tensor

    def plain(self, dtype: torch.dtype, num_rows: int | None = None) -> Tensor:
        """Return the weight."""
        return self._tensor()


class EntrySource(WeightSource):
    """The weights of an entry, each mapped once; those that are packed have no numbers."""

    def __init__(self, entry: Entry) -> None:
        """Read nothing."""
        shapes, factors = entry.index["shapes"], entry.index.get(ROPE_FACTORS)
        super().__init__(
            {
                name: EntryWeight(tuple(shape), partial(entry.tensor, name))
                for name, shape in shapes.items()
            },
            None if factors is None else torch.tensor(factors),
        )
        self.index, self._entry = entry.index, entry
        self._mapped: dict[str, Any] = {}

    @property
    def num_bytes(self) -> int:
        """Bytes that are mapped."""
        return self._entry.num_bytes

    def plain(self, name: str, dtype: torch.dtype, num_rows: int | None = None) -> Tensor:
        """Return a weight that was not packed, mapped."""
        return self._once(name, partial(super().plain, name, dtype))

    def embedding(self, name: str, dtype: torch.dtype) -> nn.Module | None:
        """Return an embedding of a file's blocks, mapped; None if it is plain."""
        kind = self.index["blocks"].get(name)
        if kind is None:
            return None
        blocks = self.plain(name, dtype).numpy()
        return self._once(f"{name}/{kind}", lambda: BlockEmbedding(blocks, kind, dtype))

    def packing(
        self, names: Mapping[int, str], quantization: Quantization | None, dtype: torch.dtype
    ) -> Pack:
        """Return what packs nothing, but returns what was packed."""
        return lambda layers, _: self.packed(NAMES_BETWEEN.join(names_of(layers, names)), dtype)

    def packed(self, joined: str, dtype: torch.dtype) -> PackedWeight:
        """Return a packed weight, mapped."""
        return self._once(f"{joined}/packed", lambda: self._packed(joined, dtype))

    def _once(self, name: str, make: Callable[[], _T]) -> _T:
        """Return the same object each time: a model that is built later shares its weights."""
        if name not in self._mapped:
            self._mapped[name] = make()
        return cast(_T, self._mapped[name])

    def _packed(self, joined: str, dtype: torch.dtype) -> PackedWeight:
        record = self.index["weights"][joined]
        num_rows, num_columns = record["shape"]
        memory = {part: self._entry.tensor(f"{joined}/{part}") for part in record["parts"]}
        if "format" not in record:
            return PackedWeight.of_memory(num_rows, num_columns, dtype, memory)
        return QuantizedWeight.of_codes_in_memory(
            CodeFormat(*record["format"]),
            (num_rows, num_columns),
            dtype,
            Activations(*record["activations"]),
            record["is_in_blocks"],
            memory,
        )


def _checksum(path: Path, record: Record) -> int:
    return zlib.crc32(_bytes_of(_mapped(path, record)))


def _bytes_of(tensor: Tensor) -> memoryview:
    return tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().data


def _mapped(path: Path, record: Record) -> Tensor:
    """Map a tensor; writing to it changes this process's copy alone."""
    dtype, shape = getattr(torch, record["dtype"]), tuple(record["shape"])
    num_bytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    if num_bytes == 0:
        return torch.empty(shape, dtype=dtype)
    content = np.memmap(path, np.uint8, "c", offset=record["start"], shape=(num_bytes,))
    return torch.from_numpy(content.view(np.ndarray)).view(dtype).view(shape)


def _facts(path: Path) -> list[int]:
    """Return what changes with a file."""
    state = path.stat()
    return [state.st_size, state.st_dev, state.st_ino, state.st_mtime_ns, state.st_ctime_ns]
