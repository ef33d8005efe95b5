"""LoRA adapters (Hu et al., arXiv 2106.09685): which rows of a step get which low-rank update.

A linear layer of the base model computes ``x W^T``; an adapter adds ``scale * (x down^T) up``. The
base weights do not change, so the rows of a step may have different adapters or none::

    row        0   1   2   3   4   5   6
    sequence   A   B   B   B   C   C   D
    adapter    sql -   -   -   sql sql fr        segments: [0, 1) sql, [4, 6) sql, [6, 7) fr

An activated adapter (aLoRA, arXiv 2512.17910) starts at its invocation: rows before are the base
model's.

An update of one expert is called ``model.layers.0.mlp.experts[3].gate_up_proj``.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from ostinato.core.plan import StepPlan
from ostinato.runner.huge_pages import zeros
from ostinato.runner.inputs import Ints
from ostinato.runner.native.packed import PackedWeight, packed_size

_TILE_RANKS = 32
_EXPERT = re.compile(r"\[\d+\]")


@dataclass(frozen=True, slots=True, eq=False)
class LoraLayer:
    """The update of one linear layer.

    Attributes:
        down: Shape (rank, in_features), contiguous; ``lora_A`` of ``peft``.
        up: Shape (out_features, rank), contiguous; ``lora_B`` of ``peft``.
        scale: Factor of the update.
    """

    down: Tensor
    up: Tensor
    scale: float

    def add(self, inputs: Tensor, outputs: Tensor, rows: Tensor) -> None:
        """Add the update of some rows to the layer's outputs, in place, in torch."""
        outputs[rows] += (inputs[rows] @ self.down.T) @ self.up.T * self.scale

    def weight(self) -> Tensor:
        """Return what the update adds to the layer's weight, shape (out_features, in_features)."""
        return self.up @ self.down * self.scale


@dataclass(frozen=True, slots=True, eq=False)
class PackedLoraLayer:
    """The update of one linear layer in the memory layout of the native library.

    Ranks are rounded up to multiples of 32, so a lower rank takes as much memory; experts share a
    tile of 32, of which each has some.

    Attributes:
        down: Shape (rank, in_features), of all that share it.
        up: Shape (out_features, rank).
        scale: Factor of the update.
        first_own: The first of its ranks.
        num_own: How many it has; 0 for all, also those that fill the tile up.
    """

    down: PackedWeight
    up: PackedWeight
    scale: float
    first_own: int = 0
    num_own: int = 0


def pack_layers(layers: Mapping[str, LoraLayer]) -> dict[str, PackedLoraLayer]:
    """Return packed updates, in one block of huge pages for each dtype."""
    packed: dict[str, PackedLoraLayer] = {}
    for dtype in {layer.down.dtype: None for layer in layers.values()}:
        shares = _tile_shares(
            {n: layer for n, layer in layers.items() if layer.down.dtype == dtype}
        )
        factors: list[Tensor] = []
        for names in shares:
            factors.append(torch.cat([layers[name].down for name in names]))
            factors.append(torch.cat([layers[name].up for name in names], 1))
        sizes = [packed_size(*factor.shape) for factor in factors]
        tiles = zeros((sum(sizes),), dtype).split(sizes)
        own = [PackedWeight([factor], each) for factor, each in zip(factors, tiles, strict=True)]
        for names, down, up in zip(shares, own[::2], own[1::2], strict=True):
            first = 0
            for name in names:
                rank = len(layers[name].down)
                place = (first, rank) if len(names) > 1 else (0, 0)
                packed[name] = PackedLoraLayer(down, up, layers[name].scale, *place)
                first += rank
    return packed


def _tile_shares(layers: Mapping[str, LoraLayer]) -> list[list[str]]:
    """Return which updates share tiles: of a layer's experts, as many as fit."""
    kinds: dict[tuple[str, int], list[str]] = {}
    for name, layer in layers.items():
        kinds.setdefault((_EXPERT.sub("", name), len(layer.down)), []).append(name)
    return [
        names[first : first + max(1, _TILE_RANKS // rank)]
        for (_, rank), names in kinds.items()
        for first in range(0, len(names), max(1, _TILE_RANKS // rank))
    ]


@dataclass(frozen=True, eq=False)
class LoraAdapter:
    """An adapter that was read and checked against a model.

    Attributes:
        digest: SHA-256 over all that its results depend on; not its name and path.
        rank: Maximum rank of its layers.
        layers: Updates by the name of the model's linear layer, router or expert.
        invocation: Token ids that activate it (aLoRA); empty if it applies to whole sequences.
        num_bytes: Memory of its weights.
    """

    digest: bytes
    rank: int
    layers: Mapping[str, LoraLayer | PackedLoraLayer]
    invocation: tuple[int, ...]
    num_bytes: int

    @cached_property
    def modules(self) -> Mapping[str, LoraLayer | PackedLoraLayer]:
        """The modules that it changes by name, each with one of its updates."""
        return {name.partition("[")[0]: layer for name, layer in self.layers.items()}


@dataclass(frozen=True, slots=True)
class AdapterSegment:
    """Rows ``first .. end`` of a step with one adapter."""

    first: int
    end: int
    adapter: LoraAdapter


@dataclass(frozen=True, slots=True)
class StepAdapters:
    """The rows of a step with adapters.

    Attributes:
        segments: Ascending, without overlap, at least one.
    """

    segments: tuple[AdapterSegment, ...]

    @classmethod
    def of(cls, plan: StepPlan, loaded: Mapping[bytes, LoraAdapter]) -> "StepAdapters | None":
        """Return the adapters of a plan's sequences; None if no row has one."""
        segments: list[AdapterSegment] = []
        end = 0
        for sequence in plan.sequences:
            first, end = end, end + len(sequence.tokens)
            identity = sequence.identity
            if not identity.adapter:
                continue
            first = max(first, first + identity.adapter_start - sequence.start)
            adapter = loaded[identity.adapter]
            if segments and segments[-1].end == first and segments[-1].adapter is adapter:
                first = segments.pop().first
            if first < end:
                segments.append(AdapterSegment(first, end, adapter))
        return cls(tuple(segments)) if segments else None

    def rows_of_each(self) -> dict[LoraAdapter, Ints]:
        """Return the rows of each adapter, ascending."""
        rows: dict[LoraAdapter, list[Ints]] = {}
        for segment in self.segments:
            span = np.arange(segment.first, segment.end)
            rows.setdefault(segment.adapter, []).append(span)
        return {adapter: np.concatenate(spans) for adapter, spans in rows.items()}

    def of_rows(self, rows: Ints) -> "StepAdapters":
        """Return the same for some of the rows, ascending, renumbered from 0."""
        bounds = np.searchsorted(rows, [(s.first, s.end) for s in self.segments]).tolist()
        pairs = zip(bounds, self.segments, strict=True)
        return StepAdapters(
            tuple(AdapterSegment(a, b, segment.adapter) for (a, b), segment in pairs if a < b)
        )
