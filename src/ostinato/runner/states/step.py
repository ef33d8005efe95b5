"""How does one row of tokens become calls per sequence?

Decodes are stepped together, each chunk of a prompt is computed by itself::

    row        a b c   d d d d d d   e e e e
    parts      ─────   ───────────   ───────
    slots      3 0 7        4           1

A layer's states are read from their slots before a part is computed and written back after it.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count, takewhile
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from ostinato.core.errors import UnsupportedModel
from ostinato.runner.inputs import StateInputs
from ostinato.runner.states.recurrences import Call, Recurrence
from ostinato.runner.states.store import StateShape, StateSpec, StateStore


class LayerStates(Protocol):
    """Answers the calls of functions that carry a state."""

    def carry(self, layer: int, recurrence: Recurrence, call: Call) -> Tensor:
        """Compute a layer's call for the sequences of a row; returns the row's output."""
        ...


@dataclass(frozen=True, slots=True)
class _Part:
    """Neighbouring rows that are computed in one call.

    Attributes:
        first: The first row.
        num_rows: How many there are.
        slots: Of their sequences, shape (num_sequences,), int64.
        is_step: Whether each is one token of another sequence.
        is_fresh: Whether no token came before.
    """

    first: int
    num_rows: int
    slots: Tensor
    is_step: bool
    is_fresh: bool

    def cut(self, call: Call, recurrence: Recurrence) -> Call:
        """Return the call for these rows alone; those of a step as sequences of one token."""

        def change(name: str, value: Any) -> Any:
            axis = recurrence.axes.get(name)
            if axis is None or value is None:
                return value
            rows = value.narrow(axis, self.first, self.num_rows)
            return rows.transpose(0, axis) if self.is_step else rows

        return call.changed(change)


class StateStep:
    """One step as the states of all layers see it."""

    def __init__(self, inputs: StateInputs, store: StateStore) -> None:
        """Say which sequences, and which store."""
        self._store = store
        self._parts = tuple(_parts(inputs))
        self._calls: Counter[int] = Counter()

    def carry(self, layer: int, recurrence: Recurrence, call: Call) -> Tensor:
        """Compute a layer's call; see ``LayerStates``.

        Effects: overwrites the states of the step's sequences in this layer.
        """
        states = self._store.states(layer)[self._calls[layer]]
        self._calls[layer] += 1
        outputs = [self._compute(part, recurrence, call, states) for part in self._parts]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, recurrence.output_axis)

    def _compute(self, part: _Part, recurrence: Recurrence, call: Call, states: Tensor) -> Tensor:
        """Compute some rows, and keep the states after them."""
        own = part.cut(call, recurrence)
        if part.is_step:
            output = recurrence.step_slots(own, states, part.slots)
            return output.transpose(0, recurrence.output_axis)
        slot = states.narrow(0, int(part.slots[0]), 1)
        output, after = recurrence.chunk(own, None if part.is_fresh else slot)
        slot.copy_(after)
        return output


class StateRecorder:
    """Answers one call of a model with one sequence, and notes which states its layers carry."""

    def __init__(self) -> None:
        """Note nothing yet."""
        self._layers: dict[int, list[StateShape]] = {}

    @property
    def spec(self) -> StateSpec:
        """What was noted."""
        return StateSpec({layer: tuple(shapes) for layer, shapes in self._layers.items()})

    def carry(self, layer: int, recurrence: Recurrence, call: Call) -> Tensor:
        """Compute a layer's call for one sequence without a state; see ``LayerStates``."""
        output, after = recurrence.chunk(call, None)
        if after is None:
            raise UnsupportedModel(f"layer {layer} gives no state after {recurrence.name}")
        self._layers.setdefault(layer, []).append(StateShape(tuple(after.shape[1:]), after.dtype))
        return output


def _parts(inputs: StateInputs) -> Iterator[_Part]:
    """Divide a row: all decodes first, then chunk by chunk."""
    lengths = np.diff(inputs.starts)
    is_decode = (lengths == 1) & (inputs.first_positions > 0)
    num_decodes = sum(1 for _ in takewhile(lambda i: i < len(lengths) and is_decode[i], count()))
    slots = torch.from_numpy(inputs.slots).to(inputs.device)
    if num_decodes:
        yield _Part(0, num_decodes, slots[:num_decodes], is_step=True, is_fresh=False)
    for i in range(num_decodes, len(lengths)):
        yield _Part(
            int(inputs.starts[i]),
            int(lengths[i]),
            slots[i : i + 1],
            is_step=bool(is_decode[i]),
            is_fresh=inputs.first_positions[i] == 0,
        )
