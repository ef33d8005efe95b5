"""Where do the numbers of a program lie while it runs?

In buffers that stay, some with room for every row of a step and some for a chunk's alone::

    for all rows    residual stream, angles, queries, keys, values, what they attended to
    on the desk     everything else: what a chunk leaves there is overwritten by the next

The desk is one block of memory, since that is how a program knows what lies on it.
"""

import torch
from torch import Tensor

_CROWDED = 1024
"""Rows so many numbers apart, or a multiple of that, share few places of the processor's caches."""

_LINE = 32
"""Numbers by which they are moved apart."""


def apart(width: int) -> int:
    """Return how far apart rows of some numbers should be."""
    return width if width % _CROWDED else width + _LINE


class Desk:
    """Named buffers of rows of bfloat16; layers share those of one name and width.

    Attributes:
        most_rows: Rows that there is room for.
        rows_per_chunk: Rows of a chunk, at most.
    """

    def __init__(self, most_rows: int, rows_per_chunk: int, width: int) -> None:
        """Make room.

        Args:
            most_rows: Of a step.
            rows_per_chunk: Of a chunk.
            width: Numbers on the desk for each row of a chunk: those of all its buffers, and what
                lies between their rows.
        """
        self.most_rows, self.rows_per_chunk = most_rows, min(most_rows, rows_per_chunk)
        self._block = torch.zeros(self.rows_per_chunk * width, dtype=torch.bfloat16)
        self._on_desk: dict[tuple[str, int], Tensor] = {}
        self._for_all: dict[tuple[str, int], Tensor] = {}
        self._used = 0

    def rows(self, name: str, width: int) -> Tensor:
        """Return a buffer for all rows, shape (most_rows, width)."""
        if (name, width) not in self._for_all:
            block = torch.zeros(self.most_rows, apart(width), dtype=torch.bfloat16)
            self._for_all[name, width] = block[:, :width]
        return self._for_all[name, width]

    def first_chunk(self, name: str, width: int) -> Tensor:
        """Return the first chunk of a buffer for all rows, shape (rows_per_chunk, width)."""
        return self.rows(name, width)[: self.rows_per_chunk]

    def chunk(self, name: str, width: int) -> Tensor:
        """Return a buffer on the desk, shape (rows_per_chunk, width)."""
        if (name, width) not in self._on_desk:
            first, self._used = self._used, self._used + self.rows_per_chunk * apart(width)
            assert self._used <= len(self._block), "no room left on the desk"
            buffer = self._block[first : self._used].view(self.rows_per_chunk, apart(width))
            self._on_desk[name, width] = buffer[:, :width]
        return self._on_desk[name, width]

    @property
    def address(self) -> int:
        """Where the desk begins."""
        return self._block.data_ptr()

    @property
    def num_bytes(self) -> int:
        """How large the desk is."""
        return self._block.nbytes
