"""Where do the numbers of a step lie where there is no program?

In buffers that stay: memory that is given back after each step comes back page by page, each
zeroed by the kernel, see ``heap``.
"""

import torch
from torch import Tensor

from ostinato.runner.forward.packed import padded


class Workspace:
    """Named buffers of rows; each grows to the largest step and is never given back.

    One step at a time: what a buffer held is overwritten by the next.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        """Begin without any."""
        self._dtype = dtype
        self._buffers: dict[str, Tensor] = {}

    def rows(self, name: str, num_rows: int, width: int) -> Tensor:
        """Return a buffer with room for some rows and their padding.

        Args:
            name: Which buffer; always of the same width.
            num_rows: Rows of the step; chunks of them are padded like all of them, or less.
            width: Numbers of a row.

        Returns:
            Shape (at least padded(num_rows), width); holds anything finite.
        """
        buffer = self._buffers.get(name)
        if buffer is None or buffer.shape[0] < padded(num_rows):
            buffer = torch.zeros(padded(num_rows), width, dtype=self._dtype)
            self._buffers[name] = buffer
        return buffer

    @property
    def num_bytes(self) -> int:
        """Bytes of all buffers."""
        return sum(buffer.nbytes for buffer in self._buffers.values())
