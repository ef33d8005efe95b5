"""Builds the operations of a decoder's steps.

::

    vectors, angles ─► norm ─► n × (q k v ─► RoPE ─► store, copy ─► attend ─► combine ─► add + norm
                                    ─► gate up ─► silu * ─► down ─► add + norm) ─► head

Each operation has records of the buffers that it reads and writes; what differs between steps is in
``StepArguments``. An addend is pending until the stream is read next, so that adding it and the
norm after it are one pass. The last attention and what follows compute only the rows whose logits
are read: of the others, its keys and values are enough.

Modules that are called, and attention where the library does not read every layer's keys and
values, are computed in Python: what is passed to them is in buffers for all rows.
"""

import ctypes
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ostinato.runner.adapters.lora import StepAdapters
from ostinato.runner.adapters.lora_updates import Groups, LoraProduct
from ostinato.runner.attention.registration import LayerAttention
from ostinato.runner.forward.arena import Arena
from ostinato.runner.forward.decoder import (
    Attention,
    Decoder,
    DecoderLayer,
    FeedForward,
    Mixture,
    ModuleCall,
    Part,
    Projection,
    ResidualBranch,
    StateMixer,
    sum_of,
)
from ostinato.runner.forward.embedding_and_rope import AngleKind, Angles, Lookup
from ostinato.runner.forward.mixer_records import GatedNorm, MixerRows
from ostinato.runner.forward.ops import AddNorm, Gated, Heads, Norm, SplitHeads
from ostinato.runner.forward.program import (
    Attend,
    Copy,
    GatedProduct,
    PythonCall,
    Step,
    StepArguments,
    StepInput,
    Write,
)
from ostinato.runner.forward.stand_ins import call_keywords
from ostinato.runner.native.checks import fill_rows
from ostinato.runner.native.ctypes_api import AttentionArgs as AttentionRecord
from ostinato.runner.native.ctypes_api import Rows
from ostinato.runner.native.packed import Product, row_stride


class ModuleCalls(Protocol):
    """Passes a step to modules that are called, as ``ModelCall`` does."""

    def during(
        self, step: LayerAttention, adapters: StepAdapters | None
    ) -> AbstractContextManager[None]:
        """Return a context in which the model's modules compute a step."""


class StepOperations:
    """The operations of a decoder, on the buffers of one arena.

    Attributes:
        operations: In order, each with whether it is on the rows whose logits are computed.
        hidden: The input of the head, of these rows.
        head: The product that gives logits; each step sets its own output.
    """

    hidden: Tensor
    head: Product

    def __init__(
        self, decoder: Decoder, calls: ModuleCalls, arena: Arena, arguments: StepArguments
    ) -> None:
        """Build them; ``calls`` passes a step to modules that are called."""
        self._decoder, self._calls, self._arena, self._arguments = decoder, calls, arena, arguments
        self._width = decoder.head.weight.num_columns
        # Added before the stream is read next.
        self._pending: list[tuple[Tensor, ResidualBranch]] = []
        self._gates: Tensor | None = None
        self._on_logit_rows = False
        mixing = [
            part
            for part in decoder.parts()
            if isinstance(part, Attention | StateMixer)
            or (isinstance(part, ModuleCall) and part.mixes)
        ]
        self._last_mixing = mixing[-1] if mixing else None
        self._stream = arena.first_chunk("stream", self._width)
        self.operations: list[tuple[Step, bool]] = []
        self._add_all()

    def _add_all(self) -> None:
        """Add the operations of a step, first to last."""
        decoder = self._decoder
        self._add(self._arguments.take(self._stream, lambda given: given.vectors))
        for kind in {p.angles: None for p in decoder.parts() if isinstance(p, Attention)}:
            if kind is not None:
                look_up = partial(_angles_of_step, self._arguments.angles[kind])
                self._add(self._arguments.take(self._angles_of(kind), look_up))
        if self._last_mixing is None:
            self._narrow(None)
        for layer in decoder.layers:
            self._layer(layer)
        normed = self._normed(decoder.norm, for_all=True)
        self.hidden = self._arena.whole(normed)
        logits = normed.new_empty(len(normed), decoder.head.weight.num_rows)
        self.head = self._record(decoder.head, normed, logits)
        self._add(self.head)

    def _layer(self, layer: DecoderLayer) -> None:
        # The branches after it read the stream without these.
        held: list[tuple[Tensor, ResidualBranch]] = []
        for place, branch in enumerate(layer.branches):
            name = f"added {place}"
            inputs = self._normed(branch.norm, isinstance(branch.part, ModuleCall | Mixture))
            rows = self._part(layer, branch.part, inputs, name)
            (held if layer.is_parallel else self._pending).append((rows, branch))
        self._pending += held

    def _normed(self, norm: Norm | None, for_all: bool = False) -> Tensor:
        """Add what adds the pending addends to the stream, and norms it."""
        addends, self._pending = self._pending, []
        output = None if norm is None else self._buffer("normed", self._width, for_all)
        for place, (rows, branch) in enumerate(addends, 1):
            last = (norm, output) if place == len(addends) else (None, None)
            self._add(AddNorm.of(self._stream, rows, *last, branch.norm_after, branch.scale))
        if norm is not None and not addends:
            self._add(AddNorm.of(self._stream, None, norm, output))
        return self._stream if output is None else output

    def _part(self, layer: DecoderLayer, part: Part, inputs: Tensor, name: str) -> Tensor:
        """Add the operations of a part; returns its addend."""
        for_all = layer.is_parallel  # what is held while other branches are computed
        if isinstance(part, FeedForward):
            return self._feed_forward(part, inputs, name, for_all)
        if isinstance(part, Mixture):
            return self._mixture(part, inputs, name)
        self._gates = None
        if isinstance(part, Attention):
            mixed = self._attention(layer.index, part, inputs)
        elif isinstance(part, StateMixer):
            mixed = self._mixer(layer.index, part, inputs)
        else:
            mixed = self._called(part, inputs, name)
        if part is self._last_mixing and not self._on_logit_rows:
            mixed = self._narrow(mixed)
        if isinstance(part, ModuleCall):
            return mixed
        if part.gating is not None:
            assert self._gates is not None, "gates of these rows"
            gated = self._arena.chunk("opened", part.combine.weight.num_columns)
            self._add(GatedNorm.of(mixed, self._gates, gated, part.gating))
            mixed = gated
        return self._product(part.combine, mixed, name, for_all)

    def _mixer(self, index: int, part: StateMixer, inputs: Tensor) -> Tensor:
        """Add the operations from normed rows to what a scan gives."""
        shape, first = part.shape, self._arena.first_chunk
        projected = self._product(part.project, inputs, "projected", True)
        stepped = self._gates = projected
        if part.steps is not None:
            stepped = self._product(part.steps, inputs, "stepped", True)
        logs, betas = (first(n, shape.num_heads, torch.float32) for n in ("log decays", "betas"))
        convolved = first("convolved", shape.num_channels)
        dtype = projected.dtype if shape.is_delta else torch.float32
        scanned = first(f"scanned {dtype}", shape.num_heads * shape.value_dim, dtype)
        rows = MixerRows(projected, stepped, convolved, logs, betas, scanned)
        self._add(self._arguments.mixers.add(index, shape, part.weights, rows))
        return scanned

    def _feed_forward(self, part: FeedForward, inputs: Tensor, name: str, for_all: bool) -> Tensor:
        gate_up = self._buffer("gate_up", part.gate_up.weight.num_rows, False)
        product = self._record(part.gate_up, inputs, gate_up)
        gated = self._arena.chunk("gated", part.down.weight.num_columns)
        opened = Gated.of(gate_up, gated, part.activation, part.has_up)
        if self._arguments.lora is None and part.has_up:
            self._add(GatedProduct(product, opened))
        else:
            self._add(product)
            self._update(part.gate_up, inputs, gate_up)
            self._add(opened)
        return self._product(part.down, gated, name, for_all)

    def _mixture(self, part: Mixture, inputs: Tensor, name: str) -> Tensor:
        """Add the experts; ``inputs`` are the first chunk of a buffer for all rows."""
        rows, output = self._arena.whole(inputs), self._rows(f"mixed {name}", self._width)
        updates = None if self._arguments.lora is None else self._adapted(part)

        def run(num_rows: int) -> None:
            output[:num_rows] = part.compute(rows[:num_rows], *(updates or ()))

        self._add(PythonCall(run))
        mixed, gates = output[: self._arena.rows_per_chunk], None
        if part.shared is None:
            return mixed
        shared = self._feed_forward(part.shared, inputs, "shared", False)
        if part.shared_gate is not None:
            gates = self._product(part.shared_gate, inputs, "shared gate", False)
        self._add(AddNorm.of(mixed, shared, None, None, None, part.shared_scale, gates))
        return mixed

    def _called(self, part: ModuleCall, inputs: Tensor, name: str) -> Tensor:
        """Add the call of modules; ``inputs`` are the first chunk of a buffer for all rows."""
        inputs, output = self._arena.whole(inputs), self._rows(f"called {name}", self._width)
        on_logit_rows = self._on_logit_rows

        def run(num_rows: int) -> None:
            step_input = self._arguments.step_input
            adapters = step_input.adapters
            if adapters is not None and on_logit_rows:
                adapters = adapters.of_rows(step_input.logit_rows)
            with self._calls.during(step_input.step, adapters):
                total = sum_of(part.modules, inputs[:num_rows], partial(self._keywords, part))
            output[:num_rows] = total

        self._add(PythonCall(run))
        return output[: self._arena.rows_per_chunk]

    def _keywords(self, part: ModuleCall, module: nn.Module) -> dict[str, Any]:
        if not part.mixes:
            return {}
        step_input = self._arguments.step_input
        angles = self._arguments.angles.get(part.angles) if part.angles else None
        numbers = None if angles is None else angles.own(step_input.positions)
        positions = torch.from_numpy(step_input.positions)[..., None, :]
        return call_keywords(module, step_input.step, numbers, positions)

    def _narrow(self, mixed: Tensor | None) -> Tensor:
        """Add what takes the rows whose logits are computed; only they are computed from here."""
        self._on_logit_rows = True
        taken: list[Tensor] = []
        for rows in (self._stream, self._gates, mixed):
            if rows is not None:
                whole, name = self._arena.whole(rows), f"logit rows {len(taken)}"
                taken.append(self._arena.first_chunk(name, rows.shape[1], rows.dtype))
                self._add(self._arguments.take_logit_rows(whole, taken[-1]))
        self._stream = taken[0]
        if self._gates is not None:
            self._gates = taken[1]
        return taken[-1]

    def _attention(self, index: int, part: Attention, inputs: Tensor) -> Tensor:
        """Add the operations from normed rows to attention; returns the attended rows."""
        shape, rows = part.shape, self._arena.first_chunk
        num_values, num_kv = shape.num_heads * shape.dim, shape.num_kv_heads * shape.dim
        is_gated = part.gating is not None
        projected = self._product(part.project, inputs, "projected", is_gated)
        self._gates = projected if is_gated else None
        heads = Heads(rows("queries", num_values), rows("keys", num_kv), rows("values", num_kv))
        angles = None if part.angles is None else self._angles_of(part.angles)
        self._add(SplitHeads.of(projected, shape, angles, heads))
        attended = self._arena.rows("attended", num_values)
        if self._arguments.stores:
            self._attend_natively(index, part, heads, attended)
            return rows("attended", num_values)
        split = [
            self._arena.whole(each).unflatten(1, (-1, shape.dim))
            for each in (heads.queries, heads.keys, heads.values)
        ]

        def attend(num_rows: int) -> None:
            queries, keys, values = (each[:num_rows] for each in split)
            step = self._arguments.step_input.step
            output = step.attend(index, queries, keys, values, part.style)
            attended[:num_rows] = output.reshape(num_rows, -1)

        self._add(PythonCall(attend))
        return rows("attended", num_values)

    def _attend_natively(self, index: int, part: Attention, heads: Heads, attended: Tensor) -> None:
        shape, arguments = part.shape, self._arguments
        store = arguments.stores[index]
        kept = store.spec.layers[index]
        assert kept.num_kv_heads == shape.num_kv_heads, kept
        assert kept.key_dim == kept.value_dim == shape.dim, kept
        keys, values = (_rows_of(t, shape.dim) for t in (heads.keys, heads.values))
        self._add(Write(store.of_layer(index), keys, values, arguments.slots_of(index), 0))
        self._add(Copy(store.of_layer(index), arguments.copies_of(index)))
        queries = heads.queries
        if part is self._last_mixing:
            queries = self._narrow(queries)
        sinks = part.style.sinks
        if sinks is not None:
            assert sinks.shape == (shape.num_heads,), "one for each head"
            sinks = arguments.copy_of(sinks.detach, sinks.detach().float().clone())
        own = AttentionRecord(
            kv=store.of_layer(index),
            queries=_rows_of(self._arena.whole(queries), shape.dim),
            output=_rows_of(attended, shape.dim),
            sinks=None if sinks is None else sinks.data_ptr(),
            scale=part.style.scale,
            soft_cap=part.style.soft_cap or 0.0,
        )
        step = arguments.attention_of(index, part, self._on_logit_rows)
        self._add(Attend(own, ctypes.addressof(step)))

    def _product(self, projection: Projection, inputs: Tensor, into: str, for_all: bool) -> Tensor:
        """Add a product and the adapters' updates of it; returns the output."""
        outputs = self._buffer(into, projection.weight.num_rows, for_all)
        self._add(self._record(projection, inputs, outputs))
        self._update(projection, inputs, outputs)
        return outputs

    def _update(self, projection: Projection, inputs: Tensor, outputs: Tensor) -> None:
        """Add the adapters' updates of a product, if the step has adapters."""
        if self._arguments.lora is not None:
            self._add(LoraProduct.of(inputs, outputs, *self._adapted(projection)))

    def _adapted(self, part: Projection | Mixture) -> tuple[Groups, int]:
        """Return the rows of adapters, and the place of a part's first product."""
        own = self._arguments
        assert own.lora is not None, "a step with adapters"
        rows = own.logit_row_groups if self._on_logit_rows else own.all_row_groups
        return rows, own.lora.places[id(part)]

    def _record(self, projection: Projection, inputs: Tensor, outputs: Tensor) -> Product:
        """Describe a product; biases of several layers are concatenated again in each step."""
        bias = projection.bias()
        if bias is not None and len(projection.names) > 1:
            bias = self._arguments.copy_of(projection.bias, bias)
        return projection.weight.record(inputs, bias, outputs)

    def _add(self, step: Step) -> None:
        """Add an operation; once the stream is narrow, it is on the logit rows alone."""
        self.operations.append((step, self._on_logit_rows))

    def _angles_of(self, kind: AngleKind) -> Tensor:
        """Return the buffer of a kind of angles."""
        name = str(kind)
        dim = next(
            p.shape.rope.dim
            for p in self._decoder.parts()
            if isinstance(p, Attention) and p.angles == kind
        )
        return self._arena.first_chunk(name, dim, torch.float32)

    def _buffer(self, name: str, width: int, for_all: bool) -> Tensor:
        if for_all:
            return self._rows(f"{name} of all", width)[: self._arena.rows_per_chunk]
        return self._arena.chunk(name, width)

    def _rows(self, name: str, width: int) -> Tensor:
        """Return a buffer for all rows, or for all logit rows."""
        return self._arena.rows(f"logit rows of {name}" if self._on_logit_rows else name, width)


def width_in_arena(decoder: Decoder) -> int:
    """Return how many numbers the arena has for each row of a chunk."""
    width = decoder.head.weight.num_columns
    widths = {("normed", width), ("added 0", width), ("added 1", width)}
    for part in decoder.parts():
        feed = part.shared if isinstance(part, Mixture) else part
        if isinstance(part, Attention):
            widths.add(("projected", part.project.weight.num_rows))
        if isinstance(part, Attention | StateMixer) and part.gating is not None:
            widths.add(("opened", part.combine.weight.num_columns))
        elif isinstance(feed, FeedForward):
            widths.add(("gate_up", feed.gate_up.weight.num_rows))
            widths.add(("gated", feed.down.weight.num_columns))
            widths |= {("shared", width), ("shared gate", 1)} if feed is not part else set()
    return sum(row_stride(width) for _, width in widths)


def _angles_of_step(angles: Angles, step_input: StepInput) -> Lookup:
    return angles.of(step_input.positions)


def _rows_of(buffer: Tensor, dim: int) -> Rows:
    """Describe a buffer of heads to the library, shape (num_rows, num_heads * dim)."""
    num_rows, num_heads, rows = buffer.shape[0], buffer.shape[1] // dim, Rows()
    fill_rows(rows, buffer.view(num_rows, num_heads, dim), num_rows, num_heads, dim)
    return rows
