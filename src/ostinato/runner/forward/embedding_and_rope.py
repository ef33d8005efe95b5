"""The embeddings and rotary angles of a step.

They come from the model's own modules; where a module's output is a row of a table, the row is
copied instead of calling the module::

    ids        ─► embedding.weight                         (vocab_size, width)
    positions  ─► cosines │ sines of pairs, computed once   (num_positions, dim)
                  by the model's module, for each kind of
                  layer and all positions so far

RoPE whose angles depend on the length of the text has no such table, and a module with hooks is
called, so that the hooks see every token.
"""

import enum
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
from torch import Tensor, nn

from ostinato.runner.block_embedding import BlockEmbedding
from ostinato.runner.inputs import Ints
from ostinato.runner.native.angles import ExactFunctions
from ostinato.runner.native.checks import within

STATIC_ROPE = frozenset({"default", "linear", "llama3", "yarn"})
"""Kinds of RoPE in which the angles of a position never change."""

_MIN_POSITIONS = 4096
"""Positions of the first table; each longer table has at least twice as many."""


@dataclass(frozen=True, slots=True)
class Lookup:
    """Rows of a table.

    Attributes:
        table: Shape (num_table_rows, width), contiguous.
        places: Indices of the rows, shape (num_rows,), contiguous, all within the table.
    """

    table: Tensor
    places: Ints

    @classmethod
    def of(cls, table: Tensor, places: Ints) -> "Lookup":
        """Check that all places are within the table.

        Raises:
            IndexError: One of them is not.
        """
        num_rows = table.shape[0]
        if not within(places, num_rows):
            raise IndexError(f"rows {places.min()} to {places.max()} of {num_rows}")
        return cls(table, np.ascontiguousarray(places))

    @classmethod
    def whole(cls, table: Tensor) -> "Lookup":
        """Return all rows of a table, in order."""
        return cls(table.contiguous(), np.arange(len(table)))

    def rows(self) -> Tensor:
        """Return a copy of the rows, shape (num_rows, width)."""
        return self.table.index_select(0, torch.from_numpy(self.places))


Embedding = nn.Embedding | BlockEmbedding


def look_up_embeddings(embedding: Embedding, ids: Ints, scale: float = 1.0) -> Lookup:
    """Return the embeddings of some ids, shape (num_tokens,), times ``scale``.

    Raises:
        IndexError: An id is not in the vocabulary.
    """
    has_hooks = embedding._forward_hooks or embedding._forward_pre_hooks
    if (
        has_hooks
        or type(embedding) is not nn.Embedding
        or scale != 1.0
        or embedding.max_norm is not None
        or not embedding.weight.is_contiguous()
    ):
        rows = embedding(torch.from_numpy(ids)[None])[0]
        return Lookup.whole(rows if scale == 1.0 else rows * scale)
    return Lookup.of(embedding.weight, ids)


class AngleLayout(enum.Enum):
    """Where the angles of pairs are in a row that a model's module gives."""

    HALVES = "in each half"
    REPEATED = "each beside itself"
    SINGLE = "once"

    def of_pairs(self, angles: Tensor) -> Tensor:
        """Return one number per pair."""
        if self is AngleLayout.REPEATED:
            return angles[..., ::2]
        return angles if self is AngleLayout.SINGLE else angles[..., : angles.shape[-1] // 2]


@dataclass(frozen=True, slots=True)
class AngleKind:
    """Which of a model's angles a layer reads.

    Attributes:
        layer_type: What the model's module is asked for; None if it has angles of one kind.
        layout: Where the angles of pairs are.
    """

    layer_type: str | None = None
    layout: AngleLayout = AngleLayout.HALVES


class Angles:
    """Cosines and sines of positions, one per pair, side by side."""

    def __init__(self, rotary: nn.Module, like: Tensor, kind: AngleKind | None = None) -> None:
        """Take the model's module, which computes angles for a tensor ``like``."""
        self._module, self._like, self._kind = rotary, like, kind or AngleKind()
        kinds = getattr(rotary, "rope_type", None)
        of_type = kinds.get(self._kind.layer_type) if isinstance(kinds, dict) else kinds
        self._is_static = of_type in STATIC_ROPE
        self._table: Tensor | None = None

    def of(self, positions: Ints) -> Lookup:
        """Return the angles of positions, float32.

        Args:
            positions: At least 0, shape (num_tokens,), or (3, num_tokens) for time, row and column.

        Cost: a text longer than the table has a new one computed, some milliseconds for each
        10,000 positions.
        """
        has_hooks = self._module._forward_hooks or self._module._forward_pre_hooks
        if positions.ndim == 2 or not self._is_static or has_hooks:
            return Lookup.whole(self._computed(positions))
        longest = int(positions.max(initial=0)) + 1
        if self._table is None or longest > self._table.shape[0]:
            size = max(_MIN_POSITIONS, 1 << (longest - 1).bit_length())
            self._table = self._computed(np.arange(size))
        return Lookup(self._table, np.ascontiguousarray(positions))

    def own(self, positions: Ints) -> tuple[Tensor, Tensor]:
        """Return cosines and sines as the model's module gives them, shape (1, num_tokens, dim).

        Their bits are the same on every system.
        """
        row = torch.from_numpy(positions)
        row = row[:, None] if row.ndim == 2 else row[None]
        kind = self._kind.layer_type
        further = () if kind is None else (kind,)
        with ExactFunctions():
            return cast(tuple[Tensor, Tensor], self._module(self._like, row, *further))

    def _computed(self, positions: Ints) -> Tensor:
        """Return one cosine and one sine per pair, shape (num_positions, dim)."""
        numbers = [n[0] for n in self.own(positions)]
        return torch.cat([self._kind.layout.of_pairs(n) for n in numbers], dim=-1).float()
