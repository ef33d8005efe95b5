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
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ostinato.runner.forward.quantized import StoredRows
from ostinato.runner.loading.weight_source import CheckpointWeight, Weights

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


class MergedExperts(CheckpointWeight):
    """A weight, or a bias, of all experts of a layer."""

    def __init__(
        self,
        experts: Sequence[Sequence[CheckpointWeight]],
        is_transposed: bool = False,
        is_interleaved: bool = False,
    ) -> None:
        """Take the parts of each expert, all of one shape; a model has them as ``ExpertStack``."""
        self._experts = experts
        self._is_transposed, self._is_interleaved = is_transposed, is_interleaved
        own = [part for parts in experts for part in parts]
        rows, *width = own[0].shape
        shape = [len(experts[0]) * rows, *width]
        super().__init__(
            (len(experts), *(shape[::-1] if is_transposed else shape)),
            [where for part in own for where in part.ranges],
        )
        kinds = {part.kind for part in own}
        self.kind = "" if "" in kinds else max(kinds)

    def plain(self, dtype: torch.dtype, num_rows: int | None = None) -> Tensor:
        """Return the weight, or as many whole experts."""
        experts = self._experts[:num_rows]
        merged = torch.empty(len(experts), *self.shape[1:], dtype=dtype)
        for numbers, parts in zip(merged, experts, strict=True):
            rows = numbers.T if self._is_transposed and numbers.ndim == 2 else numbers
            for place, part in enumerate(parts):
                own = rows[place :: len(parts)]
                if not self._is_interleaved:
                    own = rows.chunk(len(parts))[place]
                own.copy_(part.plain(dtype))
        return merged

    def codes(self, num_rows: int | None = None) -> list[StoredRows]:
        """Return the parts of each expert, one after the other."""
        own = [part for parts in self._experts[:num_rows] for part in parts]
        return [rows for part in own for rows in part.codes()]


def as_in_model(stored: Weights, model: "PreTrainedModel") -> dict[str, CheckpointWeight]:
    """Return the weights of a checkpoint under the names of a model, its experts merged.

    Args:
        stored: The checkpoint's; names that the model has stay as they are.
        model: Names its weights; on any device.
    """
    weights = {own: stored[name] for own, name in _names_in_model(model, stored).items()}
    experts: dict[str, set[int]] = {}
    for name in weights:
        if (match := _EXPERT.fullmatch(name)) is not None:
            experts.setdefault(match[1], set()).add(int(match[2]))
    for path, numbers in experts.items():
        for merged, own in _MERGED:
            names = [[f"{path}.{n}.{part}.weight" for part in own] for n in range(len(numbers))]
            parts = [[weights.get(name) for name in each] for each in names]
            shapes = {() if w is None else w.shape for each in parts for w in each}
            if len(shapes) == 1 and len(shapes.pop()) == 2:  # all are there, and of one shape
                weights[f"{path}.{merged}"] = MergedExperts(
                    [[weights.pop(name) for name in each] for each in names]
                )
    return weights


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


def quantized_expert(names: Iterable[str]) -> str | None:
    """Return the name of a part of an expert that is no weight or bias; None if there is none."""
    return next(filter(_PART.fullmatch, names), None)
