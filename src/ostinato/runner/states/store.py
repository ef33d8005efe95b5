"""The states of recurrent layers between steps.

The size of a state does not depend on the length of its sequence. All layers have the same slots;
a plan has the slot of each sequence, and the slots to copy::

                     slot 0        slot 1        slot 2      ...
    layer 0   conv   (C, K - 1)    (C, K - 1)    (C, K - 1)
              rule   (H, D, V)     (H, D, V)     (H, D, V)
    layer 1   conv   ...

A slot holds the state of a running sequence or a checkpoint; this file does not know which. For
tiers, states are copied between slots and host memory, in which those of all layers are one after
another.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from ostinato.core.errors import ConfigError
from ostinato.core.plan import StateCopy
from ostinato.runner.memory import available_bytes, lazy_zeros


@dataclass(frozen=True, slots=True)
class StateShape:
    """One tensor of a layer's state, for one sequence."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Bytes of one sequence's tensor."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class StateSpec:
    """The states of a model.

    Attributes:
        layers: The tensors of each layer with a state, in the order of their use in a call.
    """

    layers: Mapping[int, tuple[StateShape, ...]] = field(default_factory=dict)

    @property
    def bytes_per_slot(self) -> int:
        """Bytes of one sequence's state over all layers; 0 if the model has none."""
        return sum(each.num_bytes for layer in self.layers.values() for each in layer)


class StateStore:
    """The states of all slots, in every layer; tiers see ``BlockCopies``, whose blocks are slots.

    Attributes:
        spec: The states of each layer.
        num_slots: Number of slots.
        device: Where they are.
        block_bytes: Bytes of one slot over all layers.
    """

    def __init__(self, spec: StateSpec, num_slots: int, device: torch.device | str = "cpu") -> None:
        """Allocate all slots, zeroed.

        Raises:
            ConfigError: The device has less memory free than the slots need.
        """
        self.spec = spec
        self.num_slots, self.block_bytes = num_slots, spec.bytes_per_slot
        self.device = torch.device(device)
        available = available_bytes(device)
        if available is not None and self.num_bytes > available:
            raise ConfigError(
                f"the states need {self.num_bytes:,} bytes on {self.device} for num_state_slots="
                f"{self.num_slots} of {self.spec.bytes_per_slot:,} bytes, and {available:,} bytes "
                "are available: lower num_state_slots or kv_cache_memory"
            )
        self._states = {
            layer: tuple(
                lazy_zeros((num_slots, *each.shape), each.dtype, self.device) for each in shapes
            )
            for layer, shapes in spec.layers.items()
        }

    @property
    def num_bytes(self) -> int:
        """Bytes of all slots."""
        return self.num_slots * self.spec.bytes_per_slot

    def states(self, layer: int) -> tuple[Tensor, ...]:
        """Return the tensors of a layer, each of shape (num_slots, ...)."""
        return self._states[layer]

    def copy(self, copies: Sequence[StateCopy]) -> None:
        """Copy slots in all layers, one after another; source None is the zero state."""
        for tensors in self._states.values():
            for tensor in tensors:
                for copy in copies:
                    if copy.source is None:
                        tensor[copy.target].zero_()
                    else:
                        tensor[copy.target].copy_(tensor[copy.source])

    def zero(self, slots: Iterable[int]) -> None:
        """Overwrite slots with zeros in all layers; slots that are zero are only read."""
        chosen = list(slots)
        for tensor in (each for tensors in self._states.values() for each in tensors):
            for slot in chosen:
                if tensor[slot].any():
                    tensor[slot].zero_()

    def export_blocks(self, blocks: Sequence[int], into: memoryview) -> None:
        """Copy states out; returns when the bytes are there."""
        for own, outer in self._pairs(blocks, into):
            outer.copy_(own)

    def import_blocks(self, blocks: Sequence[int], payload: memoryview) -> None:
        """Fill slots that no running step uses; any thread may call this."""
        for own, outer in self._pairs(blocks, payload):
            own.copy_(outer)
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def new_buffer(self, num_bytes: int) -> memoryview:
        """Return host memory to export to and import from."""
        return np.empty(num_bytes, np.uint8).data

    def _pairs(self, slots: Sequence[int], memory: memoryview) -> Iterator[tuple[Tensor, Tensor]]:
        """Pair the bytes of each slot's tensors with their place in exported memory."""
        outer = torch.from_numpy(np.frombuffer(memory, np.uint8, len(slots) * self.block_bytes))
        start = 0
        for slot in slots:
            for tensor in (each for tensors in self._states.values() for each in tensors):
                own = tensor[slot].reshape(-1).view(torch.uint8)  # (num_bytes,)
                yield own, outer[start : start + len(own)]
                start += len(own)
