"""Weights of a checkpoint, read from its files one by one.

A source names all weights as the model's ``state_dict`` does, and reads nothing until it is asked.
What it returns is memory of its own: files may change afterwards. A format of checkpoints is a
class of weights: each of them knows its shape, where its bytes are and how to read them.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ostinato.errors import BrokenCheckpoint
from ostinato.runner.experts.mixture import expert_weights
from ostinato.runner.experts.routers import router_linears
from ostinato.runner.experts.stack import ExpertStack
from ostinato.runner.forward.packing import Layers, Pack, members, names_of, pack_plain
from ostinato.runner.forward.plain_layers import is_plain_linear
from ostinato.runner.forward.quantized import Quantization, StoredRows
from ostinato.runner.native.packed import PackedWeight

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


@dataclass(slots=True)
class FileRange:
    """Bytes of a file.

    Attributes:
        path: The file.
        start: The first of them.
        num_bytes: How many there are.
        on_read: Called with the number of bytes after each read.
    """

    path: Path
    start: int
    num_bytes: int
    on_read: Callable[[int], object] = lambda _: None

    def split(self, count: int) -> list["FileRange"]:
        """Return ``count`` parts of one size."""
        size = self.num_bytes // count
        return [FileRange(self.path, self.start + n * size, size) for n in range(count)]

    def read(
        self, first: int = 0, num_bytes: int | None = None, times: int = 1
    ) -> NDArray[np.uint8]:
        """Return a copy of the bytes, or of some of them, which are read ``times`` times.

        Raises:
            BrokenCheckpoint: The file is shorter than it was.
        """
        count = self.num_bytes - first if num_bytes is None else num_bytes
        content = np.fromfile(self.path, np.uint8, count, offset=self.start + first)
        if len(content) != count:
            raise BrokenCheckpoint(f"{self.path} became shorter while it was read")
        self.on_read(count // times)
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


class CheckpointWeight(ABC):
    """One weight of a checkpoint.

    Attributes:
        shape: As the model has it.
        ranges: Where its bytes are.
        kind: Format of the codes that ``codes`` returns; empty if there are none.
        format: Weights of the same format and bytes are equal; None if they are never compared.
    """

    kind: str = ""
    format: Hashable = None

    def __init__(self, shape: tuple[int, ...], ranges: Sequence[FileRange] = ()) -> None:
        """Read nothing."""
        self.shape, self.ranges = shape, ranges

    @abstractmethod
    def plain(self, dtype: torch.dtype, num_rows: int | None = None) -> Tensor:
        """Return the weight, or its first rows; of experts, as many whole ones."""

    def codes(self, num_rows: int | None = None) -> Sequence[StoredRows]:
        """Return a weight that has a kind, or its first rows, to be read when it is packed.

        Of experts, return the parts of as many whole ones, one after the other. A weight without a
        kind has no codes.
        """
        return ()

    def embedding(self, dtype: torch.dtype) -> nn.Module | None:
        """Return an embedding that is smaller than the plain one; None if there is none."""
        return None


class PlainWeight(CheckpointWeight):
    """Numbers as a safetensors file has them.

    Attributes:
        where: Where they are.
        format: Their format in the file.
    """

    format: str

    def __init__(self, where: FileRange, format: str, shape: tuple[int, ...]) -> None:
        """Read nothing."""
        super().__init__(shape, (where,))
        self.where, self.format = where, format

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of their format."""
        return _DTYPES[self.format]

    @property
    def are_numbers(self) -> bool:
        """Whether they stand for themselves; those of FP8 have scales."""
        return self.format in _PLAIN

    def read(self, num_rows: int | None = None) -> Tensor:
        """Return them, or the first rows, as they are stored."""
        shape, num_bytes = self.shape, self.where.num_bytes
        if num_rows is not None and shape[0] > num_rows:
            num_bytes = num_bytes // shape[0] * num_rows
            shape = (num_rows, *shape[1:])
        return torch.from_numpy(self.where.read(0, num_bytes)).view(self.dtype).view(shape)

    def plain(self, dtype: torch.dtype, num_rows: int | None = None) -> Tensor:
        """Return them, or the first rows, in a dtype."""
        return self.read(num_rows).to(dtype)


Weights = Mapping[str, CheckpointWeight]
"""Weights by name."""


class WeightSource:
    """All weights of a checkpoint.

    Attributes:
        shapes: Shapes of all weights by name.
        kinds: Formats of the weights that have codes, by name.
        rope_factors: Factors that divide the frequencies of RoPE, of a GGUF file; None if none do.
    """

    def __init__(self, weights: Weights, rope_factors: Tensor | None = None) -> None:
        """Read nothing."""
        self._weights, self.rope_factors = weights, rope_factors
        self.shapes = {name: weight.shape for name, weight in weights.items()}
        self.kinds = {name: weight.kind for name, weight in weights.items() if weight.kind}

    @property
    def num_bytes(self) -> int:
        """Bytes of all weights in the files."""
        return sum(where.num_bytes for each in self._weights.values() for where in each.ranges)

    def report_reads(self, on_read: Callable[[int], object]) -> None:
        """Call a function with the number of bytes after each read from now on."""
        for weight in self._weights.values():
            for where in weight.ranges:
                where.on_read = on_read

    def are_equal(self, names: Sequence[str]) -> bool:
        """Return whether several weights are the same bytes in the files."""
        weights = [self._weights[name] for name in names]
        formats = {(weight.format, weight.shape) for weight in weights}
        is_known = len(formats) == 1 and weights[0].format is not None
        return is_known and equal_ranges([weight.ranges[0] for weight in weights])

    def plain(self, name: str, dtype: torch.dtype, num_rows: int | None = None) -> Tensor:
        """Return a weight, or its first rows; of experts, as many whole ones."""
        return self._weights[name].plain(dtype, num_rows)

    def codes(self, name: str, num_rows: int | None = None) -> Sequence[StoredRows]:
        """Return a weight of ``kinds``, or its first rows; see ``CheckpointWeight``."""
        return self._weights[name].codes(num_rows)

    def packing(
        self, names: Mapping[int, str], quantization: Quantization | None, dtype: torch.dtype
    ) -> Pack:
        """Return what reads and packs layers: by their codes if there are any, else by numbers.

        Args:
            names: Names of what is packed, see ``names_of``.
            quantization: How numbers are packed; one with ``stored`` uses codes.
            dtype: That of numbers.
        """

        def pack(layers: Layers, is_head: bool) -> PackedWeight:
            own = dict(zip(names_of(layers, names), members(layers), strict=True))
            are_codes = own.keys() <= self.kinds.keys()
            if quantization is not None and quantization.stored is not None and are_codes:
                stored = {id(member.weight): self.codes(name) for name, member in own.items()}
                return replace(quantization, stored=stored)(layers, is_head)
            for name, member in own.items():
                if member.weight.is_meta:
                    numbers = self.plain(name, dtype)
                    member.weight = nn.Parameter(numbers, requires_grad=False)
            return (quantization or pack_plain)(layers, is_head)

        return pack

    def embedding(self, name: str, dtype: torch.dtype) -> nn.Module | None:
        """Return an embedding that is smaller than the plain one; None if there is none."""
        weight = self._weights.get(name)
        return None if weight is None else weight.embedding(dtype)


def packed_members(
    model: nn.Module, source: WeightSource
) -> list[tuple[str, nn.Linear | ExpertStack]]:
    """Return what is packed, linear layers and experts, and the names of weights in a source."""
    first: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if name in source.shapes:
            first.setdefault(id(parameter), name)
    own = router_linears(model)
    linears = [each for each in model.modules() if is_plain_linear(each) and each not in own]
    return [*((first[id(linear.weight)], linear) for linear in linears), *expert_weights(model)]


def are_numbers(weights: Weights) -> bool:
    """Return whether all plain weights are floating-point numbers of common formats."""
    plain = (weight for weight in weights.values() if isinstance(weight, PlainWeight))
    return all(weight.are_numbers for weight in plain)


def state_of(weights: Weights, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return all weights by name: plain ones as they are stored, others in a dtype."""
    return {
        name: weight.plain(weight.dtype if isinstance(weight, PlainWeight) else dtype)
        for name, weight in weights.items()
    }


def safetensors(files: Iterable[Path]) -> dict[str, PlainWeight]:
    """Return the weights of safetensors files by name; reads headers."""
    weights = {}
    for path in files:
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            header: dict[str, Any] = json.loads(file.read(size))
        header.pop("__metadata__", None)
        for name, entry in header.items():
            first, last = entry["data_offsets"]
            where = FileRange(path, 8 + size + first, last - first)
            weights[name] = PlainWeight(where, entry["dtype"], tuple(entry["shape"]))
    return weights
