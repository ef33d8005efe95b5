"""Copies of states between their slots and host memory, for tiers.

An exported state has the tensors of all layers one after another, in the order of ``StateSpec``.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from ostinato.runner.states.store import StateStore


class SlotCopies:
    """Exports and imports the states of slots; see ``BlockCopies``, whose blocks are slots here."""

    def __init__(self, states: StateStore) -> None:
        """Copy the slots of a store."""
        self._states = states
        self._device = states.device
        self.block_bytes = states.spec.bytes_per_slot

    def export_blocks(self, blocks: Sequence[int], into: memoryview) -> None:
        """Copy states out; returns when the bytes are there."""
        for own, outer in self._pairs(blocks, into):
            outer.copy_(own)

    def import_blocks(self, blocks: Sequence[int], payload: memoryview) -> None:
        """Fill slots that no running step uses; any thread may call this."""
        for own, outer in self._pairs(blocks, payload):
            own.copy_(outer)
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()

    def new_buffer(self, num_bytes: int) -> memoryview:
        """Return host memory to export to and import from."""
        return np.empty(num_bytes, np.uint8).data

    def _pairs(self, slots: Sequence[int], memory: memoryview) -> Iterator[tuple[Tensor, Tensor]]:
        """Pair the bytes of each slot's tensors with their place in exported memory."""
        outer = torch.from_numpy(np.frombuffer(memory, np.uint8, len(slots) * self.block_bytes))
        start = 0
        for slot in slots:
            for layer in self._states.spec.layers:
                for tensor in self._states.states(layer):
                    own = tensor[slot].reshape(-1).view(torch.uint8)  # (num_bytes,)
                    yield own, outer[start : start + len(own)]
                    start += len(own)
