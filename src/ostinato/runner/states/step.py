"""Turns one row of tokens into calls per sequence.

Decodes are computed in one call, and so are adjacent chunks of the same length::

    row        a b c   d d d d d d   e e e e f f f f
    parts      ─────   ───────────   ───────────────
    slots      3 0 7        4               1 6

A layer's states are read from their slots before a part is computed and written back after it.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from ostinato.errors import UnsupportedModel
from ostinato.runner.inputs import AttentionMetadata, Ints
from ostinato.runner.states.recurrence import MixerCall, Recurrence
from ostinato.runner.states.store import StateShape, StateSpec, StateStore


class LayerStates(Protocol):
    """Computes the functions of a model that carry a state."""

    def carry(self, layer: int, recurrence: Recurrence, call: MixerCall) -> Tensor:
        """Compute a layer's call for all sequences of a row; returns the row's output."""


@dataclass(frozen=True, slots=True)
class _Part:
    """Adjacent rows that are computed in one call.

    Attributes:
        first: The first row.
        length: Rows of each sequence.
        slots: Slots of the sequences, shape (num_sequences,), int64.
        is_step: Whether each sequence has one new token, and earlier ones.
        is_fresh: Whether the sequences begin here.
    """

    first: int
    length: int
    slots: Tensor
    is_step: bool
    is_fresh: bool

    def cut(self, call: MixerCall, recurrence: Recurrence) -> MixerCall:
        """Return the call for these rows only, with one sequence per slot."""
        shape = len(self.slots), self.length

        def change(name: str, value: Any) -> Any:
            axis = recurrence.axes.get(name)
            if axis is None or value is None:
                return value
            rows = value.narrow(axis, self.first, shape[0] * shape[1])
            return rows.unflatten(axis, shape).movedim(axis, 0).squeeze(1)

        return call.changed(change)

    def row(self, output: Tensor, axis: int) -> Tensor:
        """Concatenate the output of all sequences."""
        return output.unsqueeze(1).movedim(0, axis).flatten(axis, axis + 1)


class StateStep:
    """One step of the layers with a state.

    Attributes:
        slots: Slot of each sequence, shape (num_sequences,), int64.
        metadata: The step.
        store: The states of all slots.
    """

    def __init__(self, slots: Ints, metadata: AttentionMetadata, store: StateStore) -> None:
        """Take the slot of each sequence, the step, and the store."""
        self.store, self.metadata, self.slots = store, metadata, slots
        self._parts = tuple(_parts(slots, metadata))
        self._calls: Counter[int] = Counter()

    def carry(self, layer: int, recurrence: Recurrence, call: MixerCall) -> Tensor:
        """Compute a layer's call; see ``LayerStates``.

        Effects: overwrites the states of the step's sequences in this layer.
        """
        states = self.store.states(layer)[self._calls[layer]]
        self._calls[layer] += 1
        outputs = [self._compute(part, recurrence, call, states) for part in self._parts]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, recurrence.output_axis)

    def _compute(
        self, part: _Part, recurrence: Recurrence, call: MixerCall, states: Tensor
    ) -> Tensor:
        """Compute some rows, and store the states after them."""
        own = part.cut(call, recurrence)
        if part.is_step:
            output = recurrence.step_slots(own, states, part.slots)
        else:
            before = None if part.is_fresh else states.index_select(0, part.slots)
            output, after = recurrence.chunk(own, before)
            states.index_copy_(0, part.slots, after.to(states.dtype))
        return part.row(output, recurrence.output_axis)


class StateRecorder:
    """Computes one call of a model with one sequence, and records the states of its layers."""

    def __init__(self) -> None:
        """Start without any."""
        self._layers: dict[int, list[StateShape]] = {}

    @property
    def spec(self) -> StateSpec:
        """The recorded states."""
        return StateSpec({layer: tuple(shapes) for layer, shapes in self._layers.items()})

    def carry(self, layer: int, recurrence: Recurrence, call: MixerCall) -> Tensor:
        """Compute a layer's call for one sequence without a state; see ``LayerStates``."""
        output, after = recurrence.chunk(call, None)
        if after is None:
            raise UnsupportedModel(f"layer {layer} gives no state after {recurrence.name}")
        self._layers.setdefault(layer, []).append(StateShape(tuple(after.shape[1:]), after.dtype))
        return output


def _parts(slots: Ints, metadata: AttentionMetadata) -> Iterator[_Part]:
    """Divide a row into runs of sequences of one length, all with or all without a state."""
    lengths = np.diff(metadata.starts).tolist()
    fresh = (metadata.first_positions == 0).tolist()
    on_device = torch.from_numpy(slots).to(metadata.device)
    first = 0
    for (length, is_fresh), run in groupby(zip(lengths, fresh, strict=True)):
        last = first + len(list(run))
        yield _Part(
            first=int(metadata.starts[first]),
            length=length,
            slots=on_device[first:last],
            is_step=length == 1 and not is_fresh,
            is_fresh=is_fresh,
        )
        first = last
