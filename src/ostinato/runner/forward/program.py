"""Runs the operations of all layers in one call, or in one between calls in Python.

``native/include/ostinato_program.h`` is the other side. A program is built once, on buffers that
are reused: a list of operations, each with a record of where its numbers are. One call runs it; the
library's threads execute the operations together and wait only for each other's results. What
differs between steps is set before the call: tables and rows that are copied from, slots, one plan
of attention for all layers of a kind, the rows of adapters, and copies of weights that may have
been replaced meanwhile.
"""

import ctypes
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
from torch import Tensor

from ostinato.runner.adapters.lora import StepAdapters
from ostinato.runner.adapters.lora_updates import AdapterUpdates, Groups, LoraProduct
from ostinato.runner.attention.native_backend import NativeStep
from ostinato.runner.attention.registration import LayerAttention
from ostinato.runner.forward.arena import Arena
from ostinato.runner.forward.decoder import Attention
from ostinato.runner.forward.embedding_and_rope import AngleKind, Angles, Lookup
from ostinato.runner.forward.mixer_records import GatedNorm, Mixer, StepMixers
from ostinato.runner.forward.ops import AddNorm, Gated, SplitHeads
from ostinato.runner.inputs import Ints
from ostinato.runner.native.checks import within
from ostinato.runner.native.ctypes_api import AttentionArgs as AttentionRecord
from ostinato.runner.native.ctypes_api import Kv, Rows, int32s, int64s, pointers
from ostinato.runner.native.packed import Product
from ostinato.runner.native.store import NativeKVStore

_CHUNK_STEP = 32
"""The number of rows of a chunk is a multiple of this."""


class GatedProduct(ctypes.Structure):
    """``ost_gated_product``: the product that gives gates and ups, and ``silu(gate) * up``.

    Nothing else reads the product itself, so it is only written where it has to be.
    """

    _fields_ = (("product", Product), ("gated", Gated))


class Write(ctypes.Structure):
    """``ost_write``: store one layer's keys and values of the step's tokens."""

    _fields_ = (
        ("kv", Kv),
        ("keys", Rows),
        ("values", Rows),
        *pointers("slots"),
        *int64s("num_rows"),
    )


class Copies(ctypes.Structure):
    """``ost_copies``: slots that a step copies in every layer."""

    _fields_ = (*pointers("sources", "targets"), *int64s("num_slots"))


class Copy(ctypes.Structure):
    """``ost_layer_copy``: one layer's keys and values, and the address of the step's copies."""

    _fields_ = (("kv", Kv), *pointers("step"))


class Attend(ctypes.Structure):
    """``ost_layer_attention``: a layer's arguments, and the address of those of the step."""

    _fields_ = (("layer", AttentionRecord), *pointers("step"))


class Take(ctypes.Structure):
    """``ost_take``: copy rows of a table; each step sets the table and the rows."""

    _fields_ = (
        *pointers("table"),
        *int64s("table_stride"),
        *pointers("output"),
        *int64s("output_stride"),
        *pointers("rows"),
        *int64s("num_rows", "width"),
    )

    @classmethod
    def into(cls, output: Tensor) -> "Take":
        """Copy rows into ``output``, a buffer of contiguous rows."""
        assert output.stride(1) == 1 and output.device.type == "cpu", "contiguous rows, on a CPU"
        size = output.element_size()
        return cls(
            output=output.data_ptr(),
            output_stride=output.stride(0) * size,
            width=output.shape[1] * size,
        )

    def look_up(self, lookup: Lookup) -> None:
        """Set the table and its rows for this step; the caller keeps them alive."""
        table, size = lookup.table, lookup.table.element_size()
        assert table.stride(1) == 1, "contiguous rows"
        if table.shape[1] * size != self.width:
            raise ValueError(
                f"a table has rows of {table.shape[1]} numbers, not of {self.width // size}"
            )
        self.table, self.table_stride = table.data_ptr(), table.stride(0) * size
        self.rows = lookup.places.ctypes.data


_KINDS: tuple[type[Any], ...] = (
    *(AddNorm, SplitHeads, Gated, Product, Write, Attend, Copy, Take),
    *(GatedProduct, LoraProduct, Mixer, GatedNorm),
)
"""Records of operations, in the order of ``ost_operation_kind``."""

Record = ctypes.Structure
"""One of ``_KINDS``."""


class _Operation(ctypes.Structure):
    _fields_ = (*pointers("record"), *int32s("kind", "rows"))


class _Operations(ctypes.Structure):
    """``ost_program``."""

    _fields_ = (
        *pointers("operations"),
        *int64s("num_operations", "rows_per_chunk"),
        *pointers("arena"),
        *int64s("arena_bytes"),
    )


@dataclass(frozen=True, slots=True)
class PythonCall:
    """An operation that is computed in Python, on all rows at once.

    Attributes:
        run: Computes a number of rows.
    """

    run: Callable[[int], None]


Step = Record | PythonCall


class Program:
    """Operations in the order in which they are run."""

    def __init__(
        self, library: ctypes.CDLL, operations: Sequence[tuple[Step, bool]], arena: Arena
    ) -> None:
        """List the operations.

        Args:
            library: Runs them.
            operations: Each with whether it is on the rows whose logits are computed, or all rows
                of a step. Records have the addresses of the first chunk's rows, and were checked
                when they were made; the caller keeps what they point to alive. Between a call in
                Python and other operations nothing is passed in the arena.
            arena: The buffers.
        """
        self._library, self._arena = library, arena
        self._kept: list[object] = [operation for operation, _ in operations]
        self._runs: list[tuple[_Operations, bool] | tuple[PythonCall, bool]] = []
        is_call = lambda each: isinstance(each[0], PythonCall)  # noqa: E731
        for in_python, group in groupby(operations, key=is_call):
            steps: list[Any] = list(group)
            self._runs += steps if in_python else [(self._listed(steps), False)]

    def _listed(self, operations: list[tuple[Record, bool]]) -> _Operations:
        listed = (_Operation * len(operations))(
            *(
                _Operation(ctypes.addressof(record), _KINDS.index(type(record)), on_logit_rows)
                for record, on_logit_rows in operations
            )
        )
        self._kept.append(listed)
        return _Operations(
            ctypes.addressof(listed),
            len(operations),
            -(-self._arena.rows_per_chunk // _CHUNK_STEP) * _CHUNK_STEP,
            self._arena.address,
            self._arena.num_bytes,
        )

    def run(self, num_rows: int, num_logit_rows: int, num_threads: int) -> None:
        """Run all operations on some rows, the later ones on those whose logits are computed."""
        assert 0 <= num_logit_rows <= num_rows, (num_logit_rows, num_rows)
        assert 0 < num_rows <= self._arena.max_rows, num_rows
        for part, on_logit_rows in self._runs:
            if isinstance(part, PythonCall):
                count = num_logit_rows if on_logit_rows else num_rows
                if count:
                    part.run(count)
            else:
                program = ctypes.byref(part)
                self._library.ost_run_program(program, num_rows, num_logit_rows, num_threads)


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
        mixers: The layers that carry states.
        step_input: The running step.
    """

    step_input: StepInput

    def __init__(
        self,
        angles: Mapping[AngleKind, Angles],
        stores: dict[int, NativeKVStore],
        max_rows: int,
        lora: AdapterUpdates | None,
    ) -> None:
        """Allocate the buffers."""
        self.angles, self.stores, self.lora = angles, stores, lora
        self.all_row_groups, self.logit_row_groups = Groups(), Groups()
        unique = {id(store) for store in stores.values()}
        self._slots = {store: np.zeros(max_rows, dtype=np.int64) for store in unique}
        self._copies = {store: Copies() for store in unique}
        self._kinds: dict[Hashable, tuple[int, Attention, bool, AttentionRecord]] = {}
        self._replaceable: list[tuple[Tensor, Callable[[], Tensor | None]]] = []
        self._tables: list[tuple[Take, Callable[[StepInput], Lookup]]] = []
        self._logit_rows: list[Take] = []
        self.mixers = StepMixers()

    def take(self, output: Tensor, look_up: Callable[[StepInput], Lookup]) -> Take:
        """Return a copy of what is looked up for each row of a step."""
        take = Take.into(output)
        self._tables.append((take, look_up))
        return take

    def take_logit_rows(self, table: Tensor, output: Tensor) -> Take:
        """Return a copy of the rows whose logits are computed."""
        take = Take.into(output)
        take.look_up(Lookup(table, np.empty(0, dtype=np.int64)))  # each step sets the rows
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
        own = self._kinds.setdefault(kind, (layer, part, on_logit_rows, AttentionRecord()))
        return own[-1]

    def set(self, step_input: StepInput, steps: NativeSteps) -> object:
        """Set everything for a step.

        Returns:
            What operations read, which the caller keeps alive until they have run.
        """
        self.step_input = step_input
        rows, adapters = step_input.logit_rows, step_input.adapters
        if adapters is not None and self.lora is not None:
            self.all_row_groups.take(self.lora.groups_of(adapters))
            self.logit_row_groups.take(self.lora.groups_of(adapters.of_rows(rows)))
        num_rows, rows_address = len(step_input.vectors.places), rows.ctypes.data
        assert within(rows, num_rows) and rows.flags.c_contiguous, "rows"
        for take in self._logit_rows:
            take.rows = rows_address
        lookups = [look_up(step_input) for _, look_up in self._tables]
        for (take, _), lookup in zip(self._tables, lookups, strict=True):
            assert len(lookup.places) == num_rows, "one for each row"
            take.look_up(lookup)
        self._set_slots(steps, num_rows)
        for layer, part, on_logit_rows, shared in self._kinds.values():
            if on_logit_rows and not len(rows):
                continue  # the operation is left out
            heads, window = part.shape.num_heads, part.style.window
            of_kind = steps[layer].of_kind(layer, heads, window, rows if on_logit_rows else None)
            ctypes.memmove(ctypes.byref(shared), ctypes.byref(of_kind), ctypes.sizeof(shared))
        for copy, source in self._replaceable:
            original = source()
            assert original is not None, "weights are replaced, not removed"
            copy.copy_(original)
        if not self.mixers.layers:
            return lookups
        return lookups, self.mixers.set(step_input.step.states, num_rows)

    def _set_slots(self, steps: NativeSteps, num_rows: int) -> None:
        for step in dict.fromkeys(steps.values()):
            slots, copies = step.slots, self._copies[id(step.store)]
            assert len(slots) == num_rows, "a slot for each row"
            self._slots[id(step.store)][:num_rows] = slots
            copies.sources = step.sources.ctypes.data
            copies.targets = step.targets.ctypes.data
            copies.num_slots = len(step.targets)
            assert len(step.sources) == copies.num_slots, "a target for each"
