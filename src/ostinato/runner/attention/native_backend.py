"""Attention by the native library.

Tables are checked once per step, and planned once per kind of layer; a layer then takes a few
microseconds of Python, which sets the addresses of keys, values, queries and outputs. The call uses
the threads of torch's own OpenMP, so it must come from the thread that runs the model.

A plan has segments, items and merges (``native/include/ostinato_native.h``): an *item* is a range
of rows, its *segments* are the runs of keys that they see, cut to these rows. Items that would keep
one thread busy while others wait are split by keys; the partial results of a row are merged by
their log-sum-exp.

The library plans every step from scratch (``native/src/plan/plan.h``): checking whether a plan is
stale would take longer. It also checks the tables, in one pass: after a forward pass no code is in
the processor's caches, and a dozen NumPy calls would take longer than planning. This module decides
how much reading once must save.

Cost: about ten microseconds for any number of decodes, and ten times that after a forward pass.
"""

import ctypes
import math
from ctypes import byref
from dataclasses import asdict, dataclass
from functools import cache

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ostinato.runner.attention.backend import AttentionBackend, AttentionStep, AttentionStyle
from ostinato.runner.inputs import AttentionMetadata, Ints
from ostinato.runner.kv.kv_store import KVStore, LayerKV, StoreShape
from ostinato.runner.native.checks import fill_rows
from ostinato.runner.native.ctypes_api import STEP_FAULTS, AttentionArgs, PlanArgs, Rules, Tables
from ostinato.runner.native.library import Isa, attention_isa
from ostinato.runner.native.store import NativeKVStore
from ostinato.runner.settings import ReadOnce

_INITIAL_BYTES = 1 << 14
"""Initial size of a plan's memory: enough for a few dozen decodes."""


@dataclass(frozen=True, slots=True)
class PlanKind:
    """What distinguishes the plans of one step.

    Attributes:
        window: Positions that a query sees; None sees all before it.
        group: Query heads per key/value head.
        num_kv_heads: Heads of keys.
        num_threads: Number of threads.
    """

    window: int | None
    group: int
    num_kv_heads: int
    num_threads: int


@dataclass(frozen=True, slots=True)
class NativeLimits:
    """Costs and sizes in the library; rows count each head of queries.

    Attributes:
        item_rows: Maximum rows of an item, so that their running state stays in a core's cache
            beside the keys.
        run_keys: Runs end at multiples of this: keys that one instruction sums up, or the smallest
            block.
        section_keys: Keys of a sequence that are summed up separately, a multiple of 32; it
            changes results, so it is not a setting.
        keys_per_run: Keys that a shared read must save in addition, since keys that are read again
            soon come from a core's cache, in half the time.
        keys_per_row: Keys that could be read in the time that a row takes to go from one segment
            to the next: the last tiles of a segment are not full, and where products are slow,
            reading keys takes no extra time.
        row_cost: Cost of a key per row, in units of reading the key.
        min_part: Cost below which an item is not split further.
        max_packed_cost: Cost up to which adjacent items become one.
        tasks_per_thread: Number of tasks per thread.
    """

    item_rows: int = 512
    run_keys: int = 16
    section_keys: int = 1024
    keys_per_run: float = 128.0
    keys_per_row: float = 8.0
    row_cost: float = 0.1
    min_part: float = 512.0
    max_packed_cost: float = 1024.0
    tasks_per_thread: int = 4

    @classmethod
    def of(cls, isa: Isa) -> "NativeLimits":
        """Return the values measured on an instruction set."""
        return cls(keys_per_row=4.0, run_keys=32) if isa == Isa.AMX else cls()


@cache
def plan_rules(limits: NativeLimits, kind: PlanKind, read_once: ReadOnce) -> Rules:
    """Return the rules for a kind of layers."""
    rules = Rules(**{**asdict(limits), **asdict(kind), "window": kind.window or 0})
    if read_once != "auto":
        rules.keys_per_run = math.inf if read_once == "never" else 0.0
        rules.keys_per_row = 0.0
    return rules


class NativeTables:
    """The block tables of a step for the library.

    Attributes:
        tables: Valid as long as this object.
    """

    def __init__(self, metadata: AttentionMetadata, num_blocks: int) -> None:
        """Check the lengths of a step's arrays; the last of ``num_blocks`` pads tables."""
        num = len(metadata.first_positions)
        ends = len(metadata.starts), len(metadata.table_starts)
        assert ends == (num + 1, num + 1), "an end for each"
        arrays = metadata.starts, metadata.first_positions, metadata.blocks, metadata.table_starts
        addresses, self._kept = [], list[Ints]()
        for array in arrays:
            self._kept.append(np.ascontiguousarray(array, np.int64))  # usually without a copy
            addresses.append(self._kept[-1].ctypes.data)
        self.tables = Tables(
            *addresses,
            len(metadata.blocks),
            num,
            metadata.block_size,
            num_blocks,
        )


@dataclass(frozen=True, slots=True, eq=False)
class NativePlan:
    """How layers of one kind are read in one step.

    Attributes:
        laid: The library's output, which points into ``memory``.
        memory: Bytes of all arrays.
        section_keys: Tokens per section.
    """

    laid: PlanArgs
    memory: npt.NDArray[np.uint8]
    section_keys: int


def plan_native(native: ctypes.CDLL, step: NativeTables, rules: Rules) -> NativePlan:
    """Plan how a step is read.

    Args:
        native: The library.
        step: The step's tables.
        rules: The kind of layers, and the costs.

    Raises:
        ValueError: Tables are too short for their sequences, or contain invalid blocks.
    """
    laid, size = PlanArgs(), _INITIAL_BYTES
    while True:
        memory = np.empty(size, dtype=np.uint8)
        needed = native.ost_make_plan(
            byref(step.tables), byref(rules), memory.ctypes.data, size, byref(laid)
        )
        if needed < 0:
            raise ValueError(f"{STEP_FAULTS[needed]} of a step are out of range")
        if needed <= size:
            return NativePlan(laid, memory, rules.section_keys)
        size = needed


class NativeAttention(AttentionBackend):
    """Reads blocks in place.

    Attributes:
        limits: Sizes and costs for planning.
        read_once: When blocks that sequences share are read once for all of them: where that is
            cheaper (``auto``), ``always`` or ``never``.
        native: The library.
    """

    def __init__(
        self,
        native: ctypes.CDLL,
        read_once: ReadOnce = "auto",
        limits: NativeLimits | None = None,
    ) -> None:
        """Create the backend; ``limits`` of None are those measured on the instruction set."""
        self.limits = limits or NativeLimits.of(attention_isa(native))
        self.read_once = read_once
        self.native = native

    def new_store(self, shape: StoreShape) -> KVStore:
        """Make a store; see ``AttentionBackend``."""
        return NativeKVStore(self.native, shape)

    def start(self, metadata: AttentionMetadata, store: KVStore) -> "NativeStep":
        """Begin a step; see ``AttentionBackend``."""
        assert isinstance(store, NativeKVStore), "a store of its own"
        return NativeStep(metadata, store, self)


class NativeStep(AttentionStep):
    """One step, read by the library.

    Attributes:
        slots: Slots of the step's tokens.
        sources: Slots to copy from in each layer, before reading.
        targets: Slots to copy to.
    """

    store: NativeKVStore

    def __init__(
        self, metadata: AttentionMetadata, store: NativeKVStore, backend: NativeAttention
    ) -> None:
        """Check the step's slots and tables; plans are made lazily."""
        super().__init__(metadata, store)
        self._backend = backend
        self._num_threads = torch.get_num_threads()
        self._num_tokens = len(metadata.slots)
        self.slots, self.sources, self.targets = store.check_slots(
            metadata.slots, metadata.copy_sources, metadata.copy_targets
        )
        self._tables = NativeTables(metadata, store.num_blocks + 1)
        self._calls: dict[tuple[int | None, int, LayerKV, bool], AttentionArgs] = {}
        self._kept: list[object] = []  # what the calls point to

    def attend(
        self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, style: AttentionStyle
    ) -> Tensor:
        """Store, copy and attend; see ``AttentionStep``."""
        self.store.write_checked(layer, keys, values, self.slots, self._num_threads)
        if len(self.targets):
            self.store.copy_checked(layer, self.sources, self.targets)
        return self.read(layer, queries, style)

    def read(self, layer: int, queries: Tensor, style: AttentionStyle) -> Tensor:
        """Attend; see ``AttentionStep``."""
        num_tokens, num_heads, _ = queries.shape
        kept = self.store.spec.layers[layer]
        attention = self.of_kind(layer, num_heads, style.window)
        output = queries.new_empty(num_tokens, num_heads, kept.value_dim)
        queries = fill_rows(attention.queries, queries, self._num_tokens, num_heads, kept.key_dim)
        fill_rows(attention.output, output, self._num_tokens, num_heads, kept.value_dim)
        attention.kv = self.store.of_layer(layer)
        attention.scale = style.scale
        attention.soft_cap = style.soft_cap or 0.0
        sinks = style.sinks
        if sinks is not None:
            sinks = _checked_sinks(sinks, num_heads)
        attention.sinks = None if sinks is None else sinks.data_ptr()
        self._backend.native.ost_attend(byref(attention))
        return output

    def of_kind(
        self, layer: int, num_heads: int, window: int | None, rows: Ints | None = None
    ) -> AttentionArgs:
        """Return the arguments that all layers of a kind share in this step.

        Args:
            layer: One of the kind.
            num_heads: Heads of queries.
            window: Positions that a query sees; None sees all before it.
            rows: The rows that attend, the same in all calls of a step; None is all.

        Returns:
            All but those of the layer: keys and values, queries, output, sinks, scale and soft
            cap. Valid as long as the step.
        """
        kept = self.store.spec.layers[layer]
        if rows is not None and len(rows) == self._num_tokens:
            rows = None
        kind = (window, num_heads, kept, rows is None)
        if kind not in self._calls:
            plan = self.plan(num_heads, kept, window, rows)
            laid = plan.laid
            shape = laid.num_partials, num_heads, kept.value_dim + 2
            partials = np.empty(shape, dtype=np.float32)
            self._kept += plan, partials
            self._calls[kind] = AttentionArgs(
                arrays=laid.arrays,
                partials=partials.ctypes.data,
                num_heads=num_heads,
                num_items=laid.num_items,
                num_merges=laid.num_merges,
                window=window or 0,
                section_keys=plan.section_keys,
                num_threads=self._num_threads,
            )
        return self._calls[kind]

    def plan(
        self, num_heads: int, kept: LayerKV, window: int | None, rows: Ints | None = None
    ) -> NativePlan:
        """Plan the reads of a kind of layers, for all rows or some."""
        if num_heads % kept.num_kv_heads:
            raise ValueError(f"{num_heads} heads cannot share {kept.num_kv_heads} heads of keys")
        kind = PlanKind(
            window, num_heads // kept.num_kv_heads, kept.num_kv_heads, self._num_threads
        )
        rules = plan_rules(self._backend.limits, kind, self._backend.read_once)
        tables = self._tables
        if rows is not None:
            tables = NativeTables(self.metadata.at_rows(rows), self.store.num_blocks + 1)
        return plan_native(self._backend.native, tables, rules)


def _checked_sinks(sinks: Tensor, num_heads: int) -> Tensor:
    """Return sinks for the library, shape (num_heads,), float32."""
    if sinks.shape != (num_heads,) or sinks.device.type != "cpu":
        raise ValueError(f"sinks are one number for each of {num_heads} heads")
    return sinks.detach().float().contiguous()
