"""The embeddings and rotary angles of a step.

From the model's own modules; but where what a module gives is a row of a table, the row is taken
from the table, and in a program that is no call at all::

    ids        ─► embedding.weight                         (vocab_size, width)
    positions  ─► cosines │ sines, computed once by the    (num_positions, 2 * dim)
                  model's module for all positions so far

Kinds of RoPE whose angles depend on the length of a text have no such table, and an embedding with
a hook on it is called, so that the hook sees every token.
"""

from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
from torch import Tensor, nn

from ostinato.runner.inputs import Ints
from ostinato.runner.native.checks import within

_STEADY_ROPE = frozenset({"default", "linear", "llama3", "yarn"})
"""Kinds of RoPE in which a position has one angle for good; others look at the longest text."""

_FEWEST_POSITIONS = 4096
"""Angles that are computed at first; each time they do not reach, twice as many and more."""


@dataclass(frozen=True, slots=True)
class Lookup:
    """Rows of a table.

    Attributes:
        table: Shape (num_table_rows, width), contiguous.
        places: Which of its rows, shape (num_rows,), contiguous; all of them in the table.
    """

    table: Tensor
    places: Ints

    @classmethod
    def of(cls, table: Tensor, places: Ints) -> "Lookup":
        """Look at the places first.

        Raises:
            IndexError: One of them is none.
        """
        num_rows = table.shape[0]
        if not within(places, num_rows):
            raise IndexError(f"rows {places.min()} to {places.max()} of {num_rows}")
        return cls(table, np.ascontiguousarray(places))

    @classmethod
    def whole(cls, table: Tensor) -> "Lookup":
        """All rows of a table, in order."""
        return cls(table.contiguous(), np.arange(len(table)))

    def __len__(self) -> int:
        return len(self.places)

    def rows(self) -> Tensor:
        """Return the rows, fresh, shape (num_rows, width)."""
        return self.table.index_select(0, torch.from_numpy(self.places))


class Vectors:
    """Turns ids into vectors."""

    def __init__(self, embedding: nn.Embedding) -> None:
        """Take the model's module."""
        self._module = embedding

    def of(self, ids: Ints) -> Lookup:
        """Return the vectors of some ids, shape (num_tokens,).

        Raises:
            IndexError: An id has no vector.
        """
        module = self._module
        called = module._forward_hooks or module._forward_pre_hooks or module.max_norm is not None
        if called or not module.weight.is_contiguous():
            return Lookup.whole(module(torch.from_numpy(ids)[None])[0])
        return Lookup.of(module.weight, ids)


class Angles:
    """Turns positions into cosines and sines, side by side."""

    def __init__(self, rotary: nn.Module, like: Tensor) -> None:
        """Take the model's module; angles get the dtype of ``like``, and are where it is."""
        self._module = rotary
        self._like = like
        self._is_steady = getattr(rotary, "rope_type", None) in _STEADY_ROPE
        self._table: Tensor | None = None

    def of(self, positions: Ints) -> Lookup:
        """Return the angles of some positions, shape (num_tokens,).

        Cost: now and then, when a text is longer than all before, a table is computed: some
        milliseconds for each 10,000 positions.
        """
        if not self._is_steady or self._module._forward_hooks or self._module._forward_pre_hooks:
            return Lookup.whole(self._computed(positions))
        longest = int(positions.max(initial=0)) + 1
        if self._table is None or longest > self._table.shape[0]:
            size = max(_FEWEST_POSITIONS, 1 << (longest - 1).bit_length())
            self._table = self._computed(np.arange(size))
        return Lookup.of(self._table, positions)

    def _computed(self, positions: Ints) -> Tensor:
        """Ask the module; shape (num_positions, 2 * dim)."""
        row = torch.from_numpy(positions)[None]
        cosines, sines = cast(tuple[Tensor, Tensor], self._module(self._like, row))
        return torch.cat((cosines[0], sines[0]), dim=-1)
