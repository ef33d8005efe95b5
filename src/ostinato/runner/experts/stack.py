"""The weights of all experts of a layer, below each other.

::

    expert 0   gates   inner rows, padded with zeros to a multiple of 32
               ups     likewise
    expert 1   gates
    ...

So one packed weight has all of them, each expert begins with a tile of its own, and whatever packs
a linear layer's weight packs experts.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from ostinato.runner.huge_pages import zeros
from ostinato.runner.native.packed import PackedWeight, packed_size

TILE = 32
"""Outputs of a tile."""


def padded(count: int) -> int:
    """Return the rows that ``count`` outputs take."""
    return -(-count // TILE) * TILE


@dataclass(slots=True, eq=False)
class ExpertStack:
    """One weight of all experts.

    Attributes:
        weight: As the model has it, shape (num_experts, rows, columns) or, transposed,
            (num_experts, columns, rows); it may be without storage.
        num_parts: 2 for gates and ups, else 1.
        is_transposed: See ``weight``.
        is_interleaved: Whether gates and ups take turns.
    """

    weight: nn.Parameter
    num_parts: int
    is_transposed: bool
    is_interleaved: bool

    @property
    def num_experts(self) -> int:
        """Number of experts."""
        return self.weight.shape[0]

    @property
    def in_features(self) -> int:
        """Inputs."""
        return self.weight.shape[1 if self.is_transposed else 2]

    @property
    def num_outputs(self) -> int:
        """Outputs of an expert, without padding."""
        return self.weight.shape[2 if self.is_transposed else 1]

    @property
    def part_rows(self) -> int:
        """Outputs of a part, without padding."""
        return self.num_outputs // self.num_parts

    @property
    def expert_rows(self) -> int:
        """Rows of an expert, with padding."""
        return self.num_parts * padded(self.part_rows)

    @property
    def out_features(self) -> int:
        """Rows of all experts, with padding."""
        return self.num_experts * self.expert_rows

    def rows(self) -> Iterator[Tensor]:
        """Yield the rows of each expert, with padding."""
        for expert in self.weight.detach():
            yield self.arranged(expert.T if self.is_transposed else expert).contiguous()

    def arranged(self, rows: Tensor) -> Tensor:
        """Return an expert's outputs, in the first dimension, in order and with padding."""
        parts = [rows[part :: self.num_parts] for part in range(self.num_parts)]
        if not self.is_interleaved:
            parts = list(rows.split(self.part_rows))
        padding = (0, 0) * (rows.ndim - 1) + (0, padded(self.part_rows) - self.part_rows)
        return torch.cat([functional.pad(part, padding) for part in parts])

    def weight_of(self, rows: Tensor) -> Tensor:
        """Return the model's weight of all experts' rows; the inverse of ``rows``."""
        parts = rows.view(self.num_experts, self.num_parts, -1, self.in_features)
        parts = parts[:, :, : self.part_rows]
        if self.is_interleaved:
            parts = parts.transpose(1, 2)
        weight = parts.reshape(self.num_experts, -1, self.in_features)
        return weight.transpose(1, 2).contiguous() if self.is_transposed else weight.contiguous()

    def pack(self) -> PackedWeight:
        """Pack the weight as it is."""
        shape, dtype = (self.out_features, self.in_features), self.weight.dtype
        tiles = zeros((packed_size(*shape),), dtype)
        packed = PackedWeight.of_memory(*shape, dtype, {"tiles": tiles})
        self.put(packed)
        return packed

    def put(self, packed: PackedWeight) -> None:
        """Write the weight over a packed one."""
        for index, rows in enumerate(self.rows()):
            packed.replace(index * self.expert_rows, rows)


def stacks_of(experts: nn.Module) -> dict[str, ExpertStack]:
    """Return the weights of experts by name: gates and ups, or ups alone, and what leads back."""
    own = cast(Any, experts)
    first, num_parts = ("gate_up_proj", 2) if own.has_gate else ("up_proj", 1)
    is_interleaved = not own.is_concatenated
    return {
        first: ExpertStack(getattr(own, first), num_parts, own.is_transposed, is_interleaved),
        "down_proj": ExpertStack(own.down_proj, 1, own.is_transposed, False),
    }
