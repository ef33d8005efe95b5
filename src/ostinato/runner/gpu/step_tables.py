"""Copies all tables of a step to the device in one piece.

::

    pinned host memory   │ ids │ positions │ slots │ blocks │ parts │ ... │
                         └──────────────────── one copy ──────────────────┘
    device memory        │ ids │ positions │ slots │ blocks │ parts │ ... │   views, 16-byte aligned

Both sides are allocated once. Tables of equal names, formats and shapes are always at the same
addresses, which a captured step relies on. There are two buffers on the host, so that the next
step's tables are written while the copy of this one is still queued behind a running step.
"""

from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Arrays: TypeAlias = Mapping[str, npt.NDArray[Any]]

ALIGNMENT = 16
"""Bytes; compiled kernels load up to this many at once."""

_FIRST_BYTES = 2**20
_DTYPES = {"int32": torch.int32, "int64": torch.int64, "float64": torch.float64}


class DeviceTables:
    """The buffers of all steps of a runner.

    Attributes:
        num_copies: Copies to the device so far.
        num_moves: How often the buffers were replaced by larger ones, at other addresses.
    """

    def __init__(self, device: torch.device, num_bytes: int = _FIRST_BYTES) -> None:
        """Allocate the buffers."""
        self.num_copies = self.num_moves = 0
        self._device, self._turn = device, 0
        self._allocate(num_bytes)

    def put(self, arrays: Arrays) -> dict[str, Tensor]:
        """Copy arrays to the device; returns views of them there, by name.

        Effects: overwrites the views of the call before, in the order of the device's work. Waits
            for the copy of the last call but one.
        """
        places, end = [], 0
        for array in arrays.values():
            places.append(end)
            end += -(-array.nbytes // ALIGNMENT) * ALIGNMENT
        if end > self._buffer.nbytes:
            self._allocate(1 << (end - 1).bit_length())
            self.num_moves += 1
        self._turn = 1 - self._turn
        host, copied = self._hosts[self._turn], self._copied[self._turn]
        if copied is not None:
            copied.synchronize()
        numbers = host.numpy()
        for array, place in zip(arrays.values(), places, strict=True):
            numbers[place : place + array.nbytes] = array.reshape(-1).view(np.uint8)
        self._buffer[:end].copy_(host[:end], non_blocking=True)
        if copied is not None:
            copied.record(torch.cuda.current_stream(self._device))
        self.num_copies += 1
        return {
            name: self._buffer[place : place + array.nbytes]
            .view(_DTYPES[array.dtype.name])
            .view(array.shape)
            for (name, array), place in zip(arrays.items(), places, strict=True)
        }

    def _allocate(self, num_bytes: int) -> None:
        on_gpu = self._device.type == "cuda"
        self._buffer = torch.zeros(num_bytes, dtype=torch.uint8, device=self._device)
        self._hosts = [
            torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=on_gpu) for _ in range(2)
        ]
        self._copied = [torch.cuda.Event() if on_gpu else None for _ in range(2)]
