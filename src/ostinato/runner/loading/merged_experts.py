"""The experts of a layer as one weight, as models have them; checkpoints have one each.

::

    experts.0.gate_proj.weight  (inner, width)  ┐
    experts.0.up_proj.weight    (inner, width)  ├─ experts.gate_up_proj  (experts, 2 * inner, width)
    experts.1.gate_proj.weight  ...             ┘
    experts.0.down_proj.weight  (width, inner)  ── experts.down_proj     (experts, width, inner)

Source: ``transformers.conversion_mapping``, for checkpoints of Qwen's and DeepSeek's names.
"""

import re
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from ostinato.runner.forward.quantized import StoredRows
from ostinato.runner.loading.weight_source import WeightSource

_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj)\.weight")
_MERGED = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


class MergedExperts:
    """A source whose experts are merged; see ``WeightSource``."""

    def __init__(self, source: WeightSource) -> None:
        """Read nothing; a checkpoint without experts stays as it is."""
        self._source = source
        self._parts: dict[str, list[list[str]]] = {}
        self._shapes = dict(source.shapes)
        experts: dict[str, set[int]] = {}
        for name in source.shapes:
            if (match := _EXPERT.fullmatch(name)) is not None:
                experts.setdefault(match[1], set()).add(int(match[2]))
        for path, numbers in experts.items():
            self._merge(path, len(numbers))

    def _merge(self, path: str, num_experts: int) -> None:
        """Replace the names of a layer's experts, if all are there and of one shape."""
        for merged, own in _MERGED.items():
            parts = [
                [f"{path}.{index}.{name}.weight" for name in own] for index in range(num_experts)
            ]
            shapes = {self._source.shapes.get(name, ()) for part in parts for name in part}
            [*first], *others = shapes
            if others or len(first) != 2:
                continue
            for part in parts:
                for name in part:
                    del self._shapes[name]
            self._parts[f"{path}.{merged}"] = parts
            self._shapes[f"{path}.{merged}"] = (num_experts, len(own) * first[0], first[1])

    @property
    def on_read(self) -> Callable[[int], object]:
        """Called with the number of bytes after each read."""
        return self._source.on_read

    @on_read.setter
    def on_read(self, called: Callable[[int], object]) -> None:
        self._source.on_read = called

    @property
    def num_bytes(self) -> int:
        """Bytes of all weights in the files."""
        return self._source.num_bytes

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shapes of all weights by name."""
        return self._shapes

    @property
    def kinds(self) -> Mapping[str, str]:
        """Formats of quantized weights."""
        return self._source.kinds

    def are_equal(self, names: Sequence[str]) -> bool:
        """Return whether several weights are the same bytes in the files."""
        return not any(name in self._parts for name in names) and self._source.are_equal(names)

    def plain(self, name: str, dtype: torch.dtype, num_rows: int | None = None) -> Tensor:
        """Return a weight, or its first rows; of experts, as many whole ones."""
        if name not in self._parts:
            return self._source.plain(name, dtype, num_rows)
        parts = self._parts[name][:num_rows]
        merged = torch.empty(len(parts), *self._shapes[name][1:], dtype=dtype)
        for index, own in enumerate(parts):
            first = 0
            for part in own:
                rows = self._source.plain(part, dtype)
                merged[index, first : first + len(rows)] = rows
                first += len(rows)
        return merged

    def codes(self, name: str, dtype: torch.dtype, num_rows: int | None = None) -> StoredRows:
        """Return a quantized weight, or its first rows."""
        return self._source.codes(name, dtype, num_rows)

    def experts(self, name: str) -> Sequence[StoredRows]:
        """Return a quantized weight of experts."""
        return self._source.experts(name)

    def embedding(self, name: str, dtype: torch.dtype) -> nn.Module | None:
        """Return an embedding that is smaller than the plain one; None if there is none."""
        return self._source.embedding(name, dtype)
