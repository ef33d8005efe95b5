"""Where do the vectors and the angles of a step come from?

From the model's own modules; but where what a module gives is a row of a table, the row is taken
from the table, and in a program that is no call at all::

    ids        ─► embedding.weight                         (vocab_size, width)
    positions  ─► cosines │ sines, computed once by the    (num_positions, 2 * dim)
                  model's module for all positions so far

Kinds of RoPE whose angles hang on how long a text is have no such table, and an embedding with a
hook on it is called, so that the hook sees every token.
"""

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

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
        places: Which of its rows, shape (num_rows,), int64, contiguous; all of them in the table.
    """

    table: Tensor
    places: Tensor

    @classmethod
    def of(cls, table: Tensor, places: Tensor) -> "Lookup":
        """Look at the places first.

        Raises:
            IndexError: One of them is none.
        """
        numbers = places.numpy()
        if not within(numbers, len(table)):
            raise IndexError(f"rows {numbers.min()} to {numbers.max()} of {len(table)}")
        return cls(table, places.contiguous())

    @classmethod
    def whole(cls, table: Tensor) -> "Lookup":
        """All rows of a table, in order."""
        return cls(table.contiguous(), torch.arange(len(table)))

    def __len__(self) -> int:
        return len(self.places)

    def rows(self) -> Tensor:
        """Return the rows, fresh, shape (num_rows, width)."""
        return self.table.index_select(0, self.places)


class Vectors:
    """Turns ids into vectors."""

    def __init__(self, embedding: nn.Embedding) -> None:
        """Take the model's module."""
        self._module = embedding

    def of(self, ids: Tensor) -> Lookup:
        """Return the vectors of some ids, shape (num_tokens,), int64.

        Raises:
            IndexError: An id has no vector.
        """
        module = self._module
        if module._forward_hooks or module._forward_pre_hooks or module.max_norm is not None:
            return Lookup.whole(module(ids))
        weight = module.weight.detach()
        return Lookup.of(weight, ids) if weight.is_contiguous() else Lookup.whole(module(ids))


class Angles:
    """Turns positions into cosines and sines, side by side."""

    def __init__(self, rotary: nn.Module, like: Tensor) -> None:
        """Take the model's module; angles get the dtype of ``like``, and are where it is."""
        self._module = rotary
        self._like = like
        self._is_steady = getattr(rotary, "rope_type", None) in _STEADY_ROPE
        self._table: Tensor | None = None

    def of(self, positions: Tensor) -> Lookup:
        """Return the angles of some positions, shape (num_tokens,), int64.

        Cost: now and then, when a text is longer than all before, a table is computed: some
        milliseconds for each 10,000 positions.
        """
        if not self._is_steady or self._module._forward_hooks or self._module._forward_pre_hooks:
            return Lookup.whole(self._computed(positions))
        longest = int(positions.numpy().max(initial=0)) + 1
        if self._table is None or longest > len(self._table):
            size = max(_FEWEST_POSITIONS, 1 << (longest - 1).bit_length())
            self._table = self._computed(torch.arange(size))
        return Lookup.of(self._table, positions)

    def _computed(self, positions: Tensor) -> Tensor:
        """Ask the module; shape (num_positions, 2 * dim)."""
        cosines, sines = cast(tuple[Tensor, Tensor], self._module(self._like, positions[None]))
        return torch.cat((cosines[0], sines[0]), dim=-1)
