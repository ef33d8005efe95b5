"""What differs between steps of one program.

A program is built once, of operations that point to records and buffers. Each step sets them before
the program is run: tables and rows that are copied from, slots, one plan of attention for all
layers of a kind, the rows of adapters, and copies of weights that may have been replaced meanwhile.
"""

import ctypes
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from ostinato.runner.adapters.lora import StepAdapters
from ostinato.runner.adapters.lora_updates import AdapterUpdates, Groups
from ostinato.runner.attention.native_backend import NativeStep
from ostinato.runner.attention.registration import LayerAttention
from ostinato.runner.forward.decoder import Attention
from ostinato.runner.forward.embedding_and_rope import AngleKind, Angles, Lookup
from ostinato.runner.forward.program import Copies, Take
from ostinato.runner.inputs import Ints
from ostinato.runner.native.checks import address_of, within
from ostinato.runner.native.ctypes_api import Attention as AttentionRecord
from ostinato.runner.native.store import NativeKVStore


@dataclass(frozen=True, slots=True)
class StepInput:
    """What a step is computed of.

    Attributes:
        vectors: Input of the first layer, one row per token.
        positions: Shape (num_tokens,), or (3, num_tokens) for time, row and column.
        step: The attention of the layers.
        logit_rows: Rows whose logits are computed, shape (num_logit_rows,).
        adapters: Rows that adapters compute; None is none.
    """

    vectors: Lookup
    positions: Ints
    step: LayerAttention
    logit_rows: Ints
    adapters: StepAdapters | None


NativeSteps = Mapping[int, NativeStep]
"""The native attention of each layer that attends; empty if Python calls attention."""


class StepArguments:
    """Records and buffers that operations point to, and that each step sets.

    Attributes:
        angles: Computes the angles of each kind.
        stores: Store of each layer whose attention is native.
        lora: Lists the updates of adapters; None if no row has one.
        all_row_groups: The rows of adapters among all rows of the step.
        logit_row_groups: Likewise, among the rows whose logits are computed.
        step_input: The running step.
    """

    step_input: StepInput

    def __init__(
        self,
        angles: Mapping[AngleKind, Angles],
        steps: NativeSteps,
        max_rows: int,
        lora: AdapterUpdates | None,
    ) -> None:
        """Allocate the buffers; ``steps`` give the store of each layer."""
        self.angles, self.lora = angles, lora
        self.stores: dict[int, NativeKVStore] = {layer: s.store for layer, s in steps.items()}
        self.all_row_groups, self.logit_row_groups = Groups(), Groups()
        stores = {id(store) for store in self.stores.values()}
        self._slots = {store: np.zeros(max_rows, dtype=np.int64) for store in stores}
        self._copies = {store: Copies() for store in stores}
        self._shared: dict[Hashable, AttentionRecord] = {}
        self._kinds: list[tuple[int, Attention, bool, AttentionRecord]] = []
        self._replaceable: list[tuple[Tensor, Callable[[], Tensor | None]]] = []
        self._vectors: Take | None = None
        self._angles: dict[AngleKind, Take] = {}
        self._logit_rows: list[Take] = []

    def take_vectors(self, output: Tensor) -> Take:
        """Return a copy of the input of the first layer."""
        self._vectors = Take.into(output)
        return self._vectors

    def take_angles(self, kind: AngleKind, output: Tensor) -> Take:
        """Return a copy of the angles of a kind."""
        self._angles[kind] = Take.into(output)
        return self._angles[kind]

    def take_logit_rows(self, table: Tensor, output: Tensor) -> Take:
        """Return a copy of the rows whose logits are computed."""
        take = Take.into(output)
        take.from_table(table)
        self._logit_rows.append(take)
        return take

    def slots_of(self, layer: int) -> int:
        """Return the address of the slots that a layer writes."""
        return int(self._slots[id(self.stores[layer])].ctypes.data)

    def copies_of(self, layer: int) -> int:
        """Return the address of the copies of a layer's slots."""
        return ctypes.addressof(self._copies[id(self.stores[layer])])

    def copy_of(self, source: Callable[[], Tensor | None], copy: Tensor) -> Tensor:
        """Return ``copy``, which each step fills with what ``source`` then returns."""
        self._replaceable.append((copy, source))
        return copy

    def attention_of(self, layer: int, part: Attention, on_logit_rows: bool) -> AttentionRecord:
        """Return the arguments that layers of a kind share, of all rows or of the logit rows."""
        store, heads = self.stores[layer], part.shape.num_heads
        kept = store.spec.layers[layer]
        kind = (id(store), part.style.window or 0, heads, kept, on_logit_rows)
        if kind not in self._shared:
            self._shared[kind] = AttentionRecord()
            self._kinds.append((layer, part, on_logit_rows, self._shared[kind]))
        return self._shared[kind]

    def set(self, step_input: StepInput, steps: NativeSteps) -> list[Lookup]:
        """Set everything for a step.

        Returns:
            Tables that operations read, which the caller keeps alive until they have run.
        """
        self.step_input = step_input
        rows, adapters = step_input.logit_rows, step_input.adapters
        if adapters is not None and self.lora is not None:
            self.all_row_groups.take(self.lora.groups_of(adapters))
            self.logit_row_groups.take(self.lora.groups_of(adapters.of_rows(rows)))
        num_rows, rows_address = len(step_input.vectors.places), address_of(rows)
        assert within(rows, num_rows) and rows.flags.c_contiguous, "rows"
        for take in self._logit_rows:
            take.rows = rows_address
        tables = self._set_tables(step_input, num_rows)
        self._set_slots(steps, num_rows)
        for layer, part, on_logit_rows, shared in self._kinds:
            if on_logit_rows and not len(rows):
                continue  # the operation is left out
            heads, window = part.shape.num_heads, part.style.window
            of_kind = steps[layer].of_kind(layer, heads, window, rows if on_logit_rows else None)
            ctypes.memmove(ctypes.byref(shared), ctypes.byref(of_kind), ctypes.sizeof(shared))
        for copy, source in self._replaceable:
            original = source()
            assert original is not None, "weights are replaced, not removed"
            copy.copy_(original)
        return tables

    def _set_tables(self, step_input: StepInput, num_rows: int) -> list[Lookup]:
        assert self._vectors is not None, "operations"
        self._vectors.look_up(step_input.vectors)
        tables = []
        for kind, take in self._angles.items():
            lookup = self.angles[kind].of(step_input.positions)
            assert len(lookup.places) == num_rows, "angles for each row"
            take.look_up(lookup)
            tables.append(lookup)
        return tables

    def _set_slots(self, steps: NativeSteps, num_rows: int) -> None:
        for step in dict.fromkeys(steps.values()):
            slots, copies = step.slots.ids, self._copies[id(step.store)]
            assert len(slots) == num_rows, "a slot for each row"
            self._slots[id(step.store)][:num_rows] = slots
            copies.sources, copies.targets = step.sources.address, step.targets.address
            copies.num_slots = len(step.targets.ids)
            assert len(step.sources.ids) == copies.num_slots, "a target for each"
