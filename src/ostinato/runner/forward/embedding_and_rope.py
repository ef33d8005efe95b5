"""The embeddings and rotary angles of a step.

They come from the model's own modules; where a module's output is a row of a table, the row is
copied instead of calling the module::

    ids        ─► embedding.weight                         (vocab_size, width)
    positions  ─► cosines │ sines, computed once by the    (num_positions, 2 * dim)
                  model's module for all positions so far

RoPE whose angles depend on the length of the text has no such table, and a module with hooks is
called, so that the hooks see every token.
"""

from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
from torch import Tensor, nn

from ostinato.runner.block_embedding import BlockEmbedding
from ostinato.runner.inputs import Ints
from ostinato.runner.native.checks import within

_STATIC_ROPE = frozenset({"default", "linear", "llama3", "yarn"})
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

    def __len__(self) -> int:
        return len(self.places)

    def rows(self) -> Tensor:
        """Return a copy of the rows, shape (num_rows, width)."""
        return self.table.index_select(0, torch.from_numpy(self.places))


Embedding = nn.Embedding | BlockEmbedding


def look_up_embeddings(embedding: Embedding, ids: Ints) -> Lookup:
    """Return the embeddings of some ids, shape (num_tokens,).

    Raises:
        IndexError: An id is not in the vocabulary.
    """
    has_hooks = embedding._forward_hooks or embedding._forward_pre_hooks
    if (
        has_hooks
        or isinstance(embedding, BlockEmbedding)
        or embedding.max_norm is not None
        or not embedding.weight.is_contiguous()
    ):
        return Lookup.whole(embedding(torch.from_numpy(ids)[None])[0])
    return Lookup.of(embedding.weight, ids)


class Angles:
    """Cosines and sines of positions, side by side."""

    def __init__(self, rotary: nn.Module, like: Tensor) -> None:
        """Take the model's module; angles have the dtype and the device of ``like``."""
        self._module = rotary
        self._like = like
        self._is_static = getattr(rotary, "rope_type", None) in _STATIC_ROPE
        self._table: Tensor | None = None

    def of(self, positions: Ints) -> Lookup:
        """Return the angles of some positions, shape (num_tokens,).

        Cost: a text longer than the table has a new one computed, some milliseconds for each
        10,000 positions.
        """
        if not self._is_static or self._module._forward_hooks or self._module._forward_pre_hooks:
            return Lookup.whole(self._computed(positions))
        longest = int(positions.max(initial=0)) + 1
        if self._table is None or longest > self._table.shape[0]:
            size = max(_MIN_POSITIONS, 1 << (longest - 1).bit_length())
            self._table = self._computed(np.arange(size))
        return Lookup.of(self._table, positions)

    def _computed(self, positions: Ints) -> Tensor:
        """Call the module; shape (num_positions, 2 * dim)."""
        row = torch.from_numpy(positions)[None]
        cosines, sines = cast(tuple[Tensor, Tensor], self._module(self._like, row))
        return torch.cat((cosines[0], sines[0]), dim=-1)
