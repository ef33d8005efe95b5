"""Buffers for the numbers of a step that is not a program.

They stay from step to step: memory that is freed after each step comes back page by page, each
zeroed by the kernel, see ``malloc_tuning``.
"""

import torch
from torch import Tensor


class Workspace:
    """Named buffers of rows; each grows to the largest step and is never freed.

    One step at a time: what a buffer held is overwritten by the next.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        """Begin without any."""
        self._dtype = dtype
        self._buffers: dict[str, Tensor] = {}

    def rows(self, name: str, num_rows: int, width: int) -> Tensor:
        """Return a buffer of some rows.

        Args:
            name: Which buffer; always of the same width.
            num_rows: Rows of the step, or of a chunk.
            width: Numbers of a row.

        Returns:
            Shape (num_rows, width); holds anything.
        """
        buffer = self._buffers.get(name)
        if buffer is None or buffer.shape[0] < num_rows:
            buffer = torch.zeros(num_rows, width, dtype=self._dtype)
            self._buffers[name] = buffer
        return buffer[:num_rows]

    @property
    def num_bytes(self) -> int:
        """Bytes of all buffers."""
        return sum(buffer.nbytes for buffer in self._buffers.values())
