"""Buffers of a program.

They are reused by all steps; some hold all rows of a step, others those of a chunk::

    for all rows    residual stream, angles, queries, keys, values, output of attention
    in the arena    everything else: overwritten by the next chunk

The arena is one block of memory: a program recognizes its buffers by address.
"""

import torch
from torch import Tensor

from ostinato.runner.native.packed import row_stride


class Arena:
    """Named buffers of rows of one dtype; layers share those of one name and width.

    Attributes:
        max_rows: Maximum rows of a step.
        rows_per_chunk: Maximum rows of a chunk.
        dtype: Dtype of all buffers.
    """

    def __init__(self, max_rows: int, rows_per_chunk: int, width: int, dtype: torch.dtype) -> None:
        """Allocate the arena; ``width`` is the sum of the strides of all buffers in it."""
        self.max_rows, self.rows_per_chunk = max_rows, min(max_rows, rows_per_chunk)
        self.dtype = dtype
        self._block = torch.zeros(self.rows_per_chunk * width, dtype=dtype)
        self._in_arena: dict[tuple[str, int], Tensor] = {}
        self._for_all: dict[tuple[str, int], Tensor] = {}
        self._used = 0

    def rows(self, name: str, width: int, dtype: torch.dtype | None = None) -> Tensor:
        """Return a buffer for all rows, shape (max_rows, width); ``dtype`` may be another one."""
        if (name, width) not in self._for_all:
            block = torch.zeros(self.max_rows, row_stride(width), dtype=dtype or self.dtype)
            self._for_all[name, width] = block[:, :width]
        return self._for_all[name, width]

    def first_chunk(self, name: str, width: int, dtype: torch.dtype | None = None) -> Tensor:
        """Return the first chunk of a buffer for all rows, shape (rows_per_chunk, width)."""
        return self.rows(name, width, dtype)[: self.rows_per_chunk]

    def chunk(self, name: str, width: int) -> Tensor:
        """Return a buffer in the arena, shape (rows_per_chunk, width)."""
        if (name, width) not in self._in_arena:
            first, self._used = self._used, self._used + self.rows_per_chunk * row_stride(width)
            assert self._used <= len(self._block), "the arena is full"
            buffer = self._block[first : self._used].view(self.rows_per_chunk, row_stride(width))
            self._in_arena[name, width] = buffer[:, :width]
        return self._in_arena[name, width]

    def whole(self, first_chunk: Tensor) -> Tensor:
        """Return the buffer for all rows of which this is the first chunk."""
        return first_chunk.as_strided((self.max_rows, first_chunk.shape[1]), first_chunk.stride())

    @property
    def address(self) -> int:
        """Address of the arena."""
        return self._block.data_ptr()

    @property
    def num_bytes(self) -> int:
        """Size of the arena."""
        return self._block.nbytes
