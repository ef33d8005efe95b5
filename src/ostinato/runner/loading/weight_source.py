"""Weights of a checkpoint, read from its files one by one.

A source names all weights as the model's ``state_dict`` does, and reads nothing until it is asked.
What it returns is memory of its own: files may change afterwards.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ostinato.errors import BrokenCheckpoint
from ostinato.runner.forward.quantized import StoredRows

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I8": torch.int8,
    "I32": torch.int32,
    "I64": torch.int64,
}
_PLAIN = ("F64", "F32", "F16", "BF16")


_PIECE_BYTES = 2**24


@dataclass(frozen=True, slots=True)
class FileRange:
    """Bytes of a file."""

    path: Path
    start: int
    num_bytes: int

    def read(self, first: int = 0, num_bytes: int | None = None) -> NDArray[np.uint8]:
        """Return a copy of the bytes, or of some of them.

        Raises:
            BrokenCheckpoint: The file is shorter than it was.
        """
        count = self.num_bytes - first if num_bytes is None else num_bytes
        content = np.fromfile(self.path, np.uint8, count, offset=self.start + first)
        if len(content) != count:
            raise BrokenCheckpoint(f"{self.path} became shorter while it was read")
        return content


def equal_ranges(ranges: Sequence[FileRange]) -> bool:
    """Return whether ranges of files have the same bytes, read some at a time."""
    first, *others = ranges
    if any(other.num_bytes != first.num_bytes for other in others):
        return False
    for start in range(0, first.num_bytes, _PIECE_BYTES):
        count = min(_PIECE_BYTES, first.num_bytes - start)
        piece = first.read(start, count)
        if any(not np.array_equal(other.read(start, count), piece) for other in others):
            return False
    return True


class WeightSource(Protocol):
    """All weights of a checkpoint.

    Attributes:
        on_read: Called with the number of bytes after each read.
    """

    on_read: Callable[[int], object]

    @property
    def num_bytes(self) -> int:
        """Bytes of all weights in the files."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shapes of all weights by name."""

    @property
    def kinds(self) -> Mapping[str, str]:
        """Formats of the weights by name, those that ``codes`` returns codes for."""

    def are_equal(self, names: Sequence[str]) -> bool:
        """Return whether several weights are the same bytes in the files."""

    def plain(self, name: str, dtype: torch.dtype, num_rows: int | None = None) -> Tensor:
        """Return a weight, or its first rows."""

    def codes(self, name: str, dtype: torch.dtype, num_rows: int | None = None) -> StoredRows:
        """Return a weight of ``kinds``, or its first rows, to be packed."""

    def experts(self, name: str) -> Sequence[StoredRows]:
        """Return a weight of experts of ``kinds``, part by part, to be packed."""

    def embedding(self, name: str, dtype: torch.dtype) -> nn.Module | None:
        """Return an embedding that is smaller than the plain one; None if there is none."""


StoredTensor = tuple[FileRange, str, tuple[int, ...]]
"""Where a tensor is, its format and its shape."""


class SafetensorsSource:
    """Weights in safetensors files."""

    def __init__(self, files: Iterable[Path]) -> None:
        """Read the files' headers."""
        self.on_read: Callable[[int], object] = lambda _: None
        self._ranges: dict[str, StoredTensor] = {}
        for path in files:
            self._ranges |= _weights_of(path)

    @cached_property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shapes of all weights by name."""
        return {name: shape for name, (_, _, shape) in self._ranges.items()}

    @property
    def num_bytes(self) -> int:
        """Bytes of all weights in the files."""
        return sum(where.num_bytes for where, _, _ in self._ranges.values())

    @property
    def kinds(self) -> Mapping[str, str]:
        """Formats of quantized weights: there are none."""
        return {}

    @property
    def are_numbers(self) -> bool:
        """Whether all weights are floating-point numbers of common formats."""
        return all(is_plain(kind) for _, kind, _ in self._ranges.values())

    def state(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """Return all weights by name: plain ones as they are stored, others in a dtype."""
        return {name: self.plain(name, self._own_dtype(name) or dtype) for name in self.shapes}

    def _own_dtype(self, name: str) -> torch.dtype | None:
        """Return the dtype in which a weight is stored; None if it is not plain."""
        return dtype_of(self._ranges[name][1]) if name in self._ranges else None

    def plain(self, name: str, dtype: torch.dtype, num_rows: int | None = None) -> Tensor:
        """Return a weight, or its first rows."""
        return self.read(self._ranges[name], num_rows).to(dtype)

    def read(self, stored: StoredTensor, num_rows: int | None = None) -> Tensor:
        """Return a tensor as it is stored, or its first rows."""
        where, kind, shape = stored
        num_bytes = where.num_bytes
        if num_rows is not None and shape[0] > num_rows:
            num_bytes = num_bytes // shape[0] * num_rows
            shape = (num_rows, *shape[1:])
        content = torch.from_numpy(where.read(0, num_bytes))
        self.on_read(num_bytes)
        return content.view(dtype_of(kind)).view(shape)

    def are_equal(self, names: Sequence[str]) -> bool:
        """Return whether several weights are the same bytes in the files."""
        entries = [self._ranges[name] for name in names]
        kinds = {(kind, shape) for _, kind, shape in entries}
        return len(kinds) == 1 and equal_ranges([where for where, _, _ in entries])

    def codes(self, name: str, dtype: torch.dtype, num_rows: int | None = None) -> StoredRows:
        """Raise KeyError: all weights are plain."""
        raise KeyError(name)

    def experts(self, name: str) -> Sequence[StoredRows]:
        """Raise KeyError: all weights are plain."""
        raise KeyError(name)

    def embedding(self, name: str, dtype: torch.dtype) -> nn.Module | None:
        """Return None: all weights are plain."""
        return None


def dtype_of(kind: str) -> torch.dtype:
    """Return the dtype of a format in files."""
    return _DTYPES[kind]


def is_plain(kind: str) -> bool:
    """Return whether numbers of a format stand for themselves; those of FP8 have scales."""
    return kind in _PLAIN


def _weights_of(path: Path) -> dict[str, StoredTensor]:
    """Return where the weights of a file are, their formats and their shapes."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header: dict[str, Any] = json.loads(file.read(size))
    return {
        name: (
            FileRange(path, 8 + size + entry["data_offsets"][0], _length(entry)),
            entry["dtype"],
            tuple(entry["shape"]),
        )
        for name, entry in header.items()
        if name != "__metadata__"
    }


def _length(entry: Mapping[str, Any]) -> int:
    first, last = entry["data_offsets"]
    return int(last) - int(first)
