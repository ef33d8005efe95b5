"""The experts of a layer as one weight, as models have them; checkpoints have one each.

::

    experts.0.gate_proj.weight  (inner, width)  ┐
    experts.0.up_proj.weight    (inner, width)  ├─ experts.gate_up_proj  (experts, 2 * inner, width)
    experts.1.gate_proj.weight  ...             ┘
    experts.0.down_proj.weight  (width, inner)  ── experts.down_proj     (experts, width, inner)

Mixtral's names are w1, w3 and w2. What else a checkpoint names otherwise than its model, such as a
language model beside an encoder of images, is renamed as ``transformers`` does.

Source: ``transformers.conversion_mapping``.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ostinato.runner.forward.quantized import StoredRows
from ostinato.runner.loading.weight_source import SafetensorsSource, WeightSource

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj|w[123])\.weight")
_PART = re.compile(r".*\.experts\.\d+\.\w+\.(?!weight$|bias$).*")
_MERGED = (
    ("gate_up_proj", ("gate_proj", "up_proj")),
    ("up_proj", ("up_proj",)),  # of Nemotron, without gates
    ("down_proj", ("down_proj",)),
    ("gate_up_proj", ("w1", "w3")),
    ("down_proj", ("w2",)),
)


class MergedExperts:
    """A source whose experts are merged; see ``WeightSource``."""

    def __init__(self, source: WeightSource, model: "PreTrainedModel") -> None:
        """Read nothing; names that the model has stay as they are.

        Args:
            source: The checkpoint.
            model: Names its weights; on any device.
        """
        self._source = source
        self._parts: dict[str, list[list[str]]] = {}
        self._own = _names_in_model(model, source.shapes)
        self._shapes = {name: source.shapes[own] for name, own in self._own.items()}
        experts: dict[str, set[int]] = {}
        for name in self._own:
            if (match := _EXPERT.fullmatch(name)) is not None:
                experts.setdefault(match[1], set()).add(int(match[2]))
        for path, numbers in experts.items():
            self._merge(path, len(numbers))

    def _merge(self, path: str, num_experts: int) -> None:
        """Replace the names of a layer's experts, if all are there and of one shape."""
        for merged, own in _MERGED:
            parts = [
                [f"{path}.{index}.{name}.weight" for name in own] for index in range(num_experts)
            ]
            shapes = {self._shapes.get(name, ()) for part in parts for name in part}
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

    @cached_property
    def kinds(self) -> Mapping[str, str]:
        """Formats of quantized weights; of experts, if all are quantized."""
        kinds, source = {}, self._source.kinds
        for name in self._shapes:
            parts = [part for own in self._parts.get(name, [[name]]) for part in own]
            own = {source.get(self._own[part], "") for part in parts}
            if "" not in own:
                kinds[name] = max(own)
        return kinds

    def are_equal(self, names: Sequence[str]) -> bool:
        """Return whether several weights are the same bytes in the files."""
        if any(name in self._parts for name in names):
            return False
        return self._source.are_equal([self._own[name] for name in names])

    def plain(self, name: str, dtype: torch.dtype, num_rows: int | None = None) -> Tensor:
        """Return a weight, or its first rows; of experts, as many whole ones."""
        if name not in self._parts:
            return self._source.plain(self._own[name], dtype, num_rows)
        parts = self._parts[name][:num_rows]
        merged = torch.empty(len(parts), *self._shapes[name][1:], dtype=dtype)
        for index, own in enumerate(parts):
            first = 0
            for part in own:
                rows = self._source.plain(self._own[part], dtype)
                merged[index, first : first + len(rows)] = rows
                first += len(rows)
        return merged

    def codes(self, name: str, dtype: torch.dtype, num_rows: int | None = None) -> StoredRows:
        """Return a quantized weight, or its first rows."""
        return self._source.codes(self._own[name], dtype, num_rows)

    def experts(self, name: str) -> Sequence[StoredRows]:
        """Return a quantized weight of experts: the parts of each, one after the other."""
        if name not in self._parts:
            return self._source.experts(self._own[name])
        parts = [part for own in self._parts[name] for part in own]
        return [self._source.codes(self._own[part], torch.float32) for part in parts]

    def embedding(self, name: str, dtype: torch.dtype) -> nn.Module | None:
        """Return an embedding that is smaller than the plain one; None if there is none."""
        return self._source.embedding(self._own.get(name, name), dtype)


def _names_in_model(model: "PreTrainedModel", names: Iterable[str]) -> dict[str, str]:
    """Return the names of a checkpoint by those that a model has for the same weights."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightRenaming, rename_source_key

    changes = [c for c in get_model_conversion_mapping(model) if isinstance(c, WeightRenaming)]
    own: dict[str, Any] = dict(model.named_parameters(remove_duplicate=False))
    own |= dict(model.named_buffers())
    prefix = model.base_model_prefix
    return {
        name if name in own else rename_source_key(name, changes, [], prefix, own)[0]: name
        for name in names
    }


def quantized_expert(files: Iterable[Path]) -> str | None:
    """Return the name of a part of an expert that is no weight or bias; None if there is none."""
    return next(filter(_PART.fullmatch, SafetensorsSource(files).shapes), None)
