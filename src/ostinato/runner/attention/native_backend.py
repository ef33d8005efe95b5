"""Attention by the native library.

Tables are checked once per step, and planned once per kind of layer; a layer then takes a few
microseconds of Python, which sets the addresses of keys, values, queries and outputs. The call uses
the threads of torch's own OpenMP, so it must come from the thread that runs the model.
"""

import ctypes
from ctypes import byref

import numpy as np
import torch
from torch import Tensor

from ostinato.runner.attention.backend import AttentionStep, AttentionStyle
from ostinato.runner.attention.native_plan import (
    NativeLimits,
    NativePlan,
    PlanKind,
    StepTables,
    plan_native,
)
from ostinato.runner.inputs import AttentionMetadata, Ints
from ostinato.runner.kv.kv_store import KVStore, LayerKV, StoreShape
from ostinato.runner.native.checks import Slots, fill_rows
from ostinato.runner.native.ctypes_api import PLAN_ARRAYS, Attention
from ostinato.runner.native.library import attention_isa
from ostinato.runner.native.store import NativeKVStore
from ostinato.runner.settings import ReadOnce


class NativeAttention:
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

    def whole_steps(self, *_: object) -> None:
        """Return None: the runner calls the model; see ``AttentionBackend``."""

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
        self.slots = store.check_slots(metadata.slots)
        self.sources = Slots.within(metadata.copy_sources, store.num_slots)
        self.targets = store.check_slots(metadata.copy_targets)
        self._tables = StepTables(metadata, store.num_blocks + 1)
        self._calls: dict[tuple[int | None, int, LayerKV, bool], Attention] = {}
        self._kept: list[object] = []  # what the calls point to

    def attend(
        self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, style: AttentionStyle
    ) -> Tensor:
        """Store, copy and attend; see ``AttentionStep``."""
        self.store.write_checked(layer, keys, values, self.slots, self._num_threads)
        if len(self.targets):
            self.store.copy_checked(layer, self.sources, self.targets)
        return self.read(layer, queries, keys, values, style)

    def read(
        self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, style: AttentionStyle
    ) -> Tensor:
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
    ) -> Attention:
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
            self._calls[kind] = Attention(
                **{name: getattr(laid, name) for name, _ in PLAN_ARRAYS},
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
        rules = self._backend.limits.rules(kind, self._backend.read_once)
        tables = self._tables
        if rows is not None:
            tables = StepTables(self.metadata.at_rows(rows), self.store.num_blocks + 1)
        return plan_native(self._backend.native, tables, rules)


def _checked_sinks(sinks: Tensor, num_heads: int) -> Tensor:
    """Return sinks for the library, shape (num_heads,), float32."""
    if sinks.shape != (num_heads,) or sinks.device.type != "cpu":
        raise ValueError(f"sinks are one number for each of {num_heads} heads")
    return sinks.detach().float().contiguous()
