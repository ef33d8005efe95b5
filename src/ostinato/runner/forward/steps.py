"""Computes a step without Python between its operations.

A decode step takes some tens of milliseconds and has about three hundred operations: if Python
called them one by one, it would take an eighth of the time. So they form one program, from the ids
to the logits, with stores and attention in between::

    vectors, angles ─► norm ─► n × (q k v ─► RoPE ─► store, copy ─► attend ─► combine ─► add + norm
                                    ─► gate up ─► silu * ─► down ─► add + norm) ─► head

Between two attentions a long step is computed in chunks that use the same buffers, so that the
output of one operation is still in the processor's cache when the next reads it. Attention sees all
rows at once. After the last attention, only rows with logits are computed.

Modules that are called, and attention where the library does not read every layer's keys and
values, cut a program into several: what is passed between them is in buffers for all rows. Each
step sets its ids, positions and slots, and one plan for all layers of a kind.
"""

import ctypes
from collections.abc import Generator, Hashable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from ostinato.runner.adapters.lora import StepAdapters
from ostinato.runner.adapters.lora_updates import AdapterUpdates, Groups, LoraProduct
from ostinato.runner.attention.backend import GroupedStep
from ostinato.runner.attention.native_backend import NativeStep
from ostinato.runner.attention.registration import LayerAttention
from ostinato.runner.forward.arena import Arena
from ostinato.runner.forward.decoder import (
    Attention,
    Branch,
    Call,
    Decoder,
    DecoderLayer,
    FeedForward,
    Part,
    Projection,
)
from ostinato.runner.forward.embedding_and_rope import AngleKind, Angles, Lookup
from ostinato.runner.forward.ops import AddNorm, Gated, Heads, Norm, SplitHeads
from ostinato.runner.forward.program import (
    Attend,
    Copies,
    Copy,
    GatedProduct,
    Program,
    PythonCall,
    Step,
    Take,
    Write,
)
from ostinato.runner.forward.stand_ins import call_keywords
from ostinato.runner.heads import HiddenRows
from ostinato.runner.inputs import Ints
from ostinato.runner.native.checks import address_of, fill_rows, within
from ostinato.runner.native.ctypes_api import Attention as AttentionRecord
from ostinato.runner.native.ctypes_api import Rows
from ostinato.runner.native.packed import Matrix, Product, row_stride

ROWS_PER_CHUNK = 384
"""Rows of a chunk: few enough that the output of an operation stays in the processor's cache, and
enough that weights are not read too often."""

_MIN_ROWS = 128
"""Rows that every program has buffers for."""


class ModuleCalls(Protocol):
    """Passes a step to modules that are called, as ``ModelCall`` does."""

    def during(
        self, step: LayerAttention, adapters: StepAdapters | None
    ) -> AbstractContextManager[None]:
        """Return a context in which the model's modules compute a step."""
        ...


@dataclass(frozen=True, slots=True)
class StepInput:
    """What a step is computed of.

    Attributes:
        vectors: Input of the first layer.
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

    def __len__(self) -> int:
        return len(self.vectors)


class Steps:
    """Computes steps of a decoder, one at a time."""

    def __init__(self, decoder: Decoder, library: ctypes.CDLL, calls: ModuleCalls) -> None:
        """Take a decoder; its programs are built in the first steps."""
        self._decoder, self._library, self._calls = decoder, library, calls
        like = torch.empty(0, dtype=decoder.head.weight.dtype)
        kinds = {part.angles for part in decoder.parts() if not isinstance(part, FeedForward)}
        self._angles = {
            kind: Angles(decoder.rotary, like, kind)
            for kind in kinds
            if kind is not None and decoder.rotary is not None
        }
        self._programs: dict[tuple[bool, bool], _StepProgram] = {}

    def run(self, given: StepInput, hidden: HiddenRows | None = None) -> Tensor:
        """Compute a step.

        Args:
            given: The step.
            hidden: Takes the input of the head; None keeps none.

        Returns:
            New logits, shape (num_logit_rows, vocab_size).

        Effects: writes the step's slots in every layer.
        Cost: some milliseconds more when the stores are not those of the step before.
        """
        steps = native_steps(given.step, self._decoder)
        key = given.adapters is not None, steps is not None
        program = self._programs.get(key)
        if program is None or not program.fits(steps, len(given)):
            lora = None
            if given.adapters is not None:
                lora = AdapterUpdates([each.joined() for each in self._decoder.projections()])
            max_rows = max(_MIN_ROWS, 1 << (len(given) - 1).bit_length())
            program = _StepProgram(
                self._decoder, self._library, self._calls, self._angles, steps, max_rows, lora
            )
            self._programs[key] = program
        logits = program.run(given, steps)
        if hidden is not None:
            hidden.rows = program.hidden[: len(given.logit_rows)].clone()
        return logits


Operations = Generator[tuple[Step, bool], None, None]
Output = Generator[tuple[Step, bool], None, Tensor]


@dataclass(frozen=True, slots=True)
class _Addend:
    """What is added to the stream before it is read next."""

    rows: Tensor
    branch: Branch


class _StepProgram:
    """A decoder's program on the stores of one runner."""

    _head: Product
    _given: StepInput

    def __init__(
        self,
        decoder: Decoder,
        library: ctypes.CDLL,
        calls: ModuleCalls,
        angles: dict[AngleKind, Angles],
        steps: dict[int, NativeStep] | None,
        max_rows: int,
        lora: AdapterUpdates | None,
    ) -> None:
        """Build it for up to so many rows; ``steps`` give the store of each layer that attends."""
        self._decoder, self._calls, self._angles, self._lora = decoder, calls, angles, lora
        self._places = {id(each): i for i, each in enumerate(decoder.projections())}
        self._all_row_groups, self._logit_row_groups = Groups(), Groups()
        self._stores = {layer: step.store for layer, step in (steps or {}).items()}
        self._arena = Arena(
            max_rows, ROWS_PER_CHUNK, _width_in_arena(decoder), decoder.head.weight.dtype
        )
        stores = {id(s): s for s in self._stores.values()}
        self._slots = {name: np.zeros(max_rows, dtype=np.int64) for name in stores}
        self._copies = {name: Copies() for name in stores}
        self._shared: dict[Hashable, AttentionRecord] = {}
        self._kinds: list[tuple[int, Attention, AttentionRecord]] = []
        self._refreshed: list[tuple[Tensor, Projection | Tensor]] = []
        self._takes: dict[str, Take] = {}
        self._pending: list[_Addend] = []
        self._on_logit_rows = False
        mixing = [p for p in decoder.parts() if not isinstance(p, FeedForward)]
        self._last_mixing = next(
            (p for p in reversed(mixing) if isinstance(p, Attention) or p.mixes), None
        )
        self._stream = self._arena.first_chunk("stream", self._width)
        self._program = Program(library, list(self._operations()), self._arena)

    @property
    def _width(self) -> int:
        return self._decoder.head.weight.num_columns

    def fits(self, steps: dict[int, NativeStep] | None, num_rows: int) -> bool:
        """Whether buffers are large enough, and the stores are those that it was built for."""
        return num_rows <= self._arena.max_rows and all(
            step.store is self._stores[layer] for layer, step in (steps or {}).items()
        )

    def run(self, given: StepInput, steps: dict[int, NativeStep] | None) -> Tensor:
        """Compute a step; see ``Steps``."""
        if given.adapters is not None and self._lora is not None:
            self._all_row_groups.take(self._lora.groups_of(given.adapters))
            self._logit_row_groups.take(
                self._lora.groups_of(given.adapters.of_rows(given.logit_rows))
            )
        num_rows, num_logit_rows = len(given), len(given.logit_rows)
        self._given = given
        self._takes["stream"].look_up(given.vectors)
        kept = []  # what the takes point to
        for kind, angles in self._angles.items():
            if (take := self._takes.get(str(kind))) is not None:
                lookup = angles.of(given.positions)
                assert len(lookup) == num_rows, "angles for each row"
                take.look_up(lookup)
                kept.append(lookup)
        assert within(given.logit_rows, num_rows) and given.logit_rows.flags.c_contiguous, "rows"
        for name, take in self._takes.items():
            if name.startswith("logit rows"):
                take.rows = address_of(given.logit_rows)
        self._set_slots(steps or {}, num_rows)
        for layer, part, shared in self._kinds:
            assert steps is not None, "native attention"
            of_kind = steps[layer].of_kind(layer, part.shape.num_heads, part.style.window)
            ctypes.memmove(ctypes.byref(shared), ctypes.byref(of_kind), ctypes.sizeof(shared))
        for copy, source in self._refreshed:
            copy.copy_(source if isinstance(source, Tensor) else torch.cat(source.biases))
        size = self._decoder.head.weight.num_rows
        block = torch.empty(num_logit_rows, row_stride(size), dtype=self._arena.dtype)
        self._head.outputs = Matrix.of(block)
        self._program.run(num_rows, num_logit_rows, torch.get_num_threads())
        return block[:, :size]

    def _set_slots(self, steps: dict[int, NativeStep], num_rows: int) -> None:
        for step in {id(step): step for step in steps.values()}.values():
            assert len(step.slots) == num_rows, "a slot for each row"
            self._slots[id(step.store)][:num_rows] = step.slots.ids
            copies, (sources, targets) = self._copies[id(step.store)], step.copies
            assert len(sources) == len(targets), "a target for each"
            copies.sources, copies.targets = sources.address, targets.address
            copies.num_slots = len(targets)

    def _operations(self) -> Operations:
        """Yield the operations of a step, first to last."""
        decoder = self._decoder
        yield self._at(self._take("stream", self._stream))
        for kind in {p.angles: None for p in decoder.parts() if isinstance(p, Attention)}:
            if kind is not None:
                yield self._at(self._take(str(kind), self._angles_of(kind)))
        if self._last_mixing is None:
            yield from self._narrow(None)
        for layer in decoder.layers:
            yield from self._layer(layer)
        normed = yield from self._normed(decoder.norm, for_all=True)
        self.hidden = self._whole(normed)  # the input of the head, of the logit rows
        logits = normed.new_empty(len(normed), decoder.head.weight.num_rows)
        self._head = self._record(decoder.head, normed, logits)  # each step sets its own logits
        yield self._at(self._head)

    def _layer(self, layer: DecoderLayer) -> Operations:
        held: list[_Addend] = []
        for place, branch in enumerate(layer.branches):
            name = f"added {place}"
            norms = self._only_normed if layer.is_parallel and place else self._normed
            inputs = yield from norms(branch.norm, isinstance(branch.part, Call))
            rows = yield from self._part(layer, branch.part, inputs, name)
            (held if layer.is_parallel else self._pending).append(_Addend(rows, branch))
        self._pending += held

    def _normed(self, norm: Norm | None, for_all: bool = False) -> Output:
        """Yield what adds the pending addends to the stream, and norms it."""
        addends, self._pending = self._pending, []
        output = None if norm is None else self._buffer("normed", self._width, for_all)
        for addend in addends[:-1]:
            yield self._at(self._add(addend, None, None))
        if addends:
            yield self._at(self._add(addends[-1], norm, output))
        elif norm is not None:
            yield self._at(AddNorm.of(self._stream, None, norm, output))
        return self._stream if output is None else output

    def _only_normed(self, norm: Norm | None, for_all: bool = False) -> Output:
        """Yield what norms the stream, without what is still to be added."""
        if norm is None:
            return self._stream
        output = self._buffer("normed", self._width, for_all)
        yield self._at(AddNorm.of(self._stream, None, norm, output))
        return output

    def _add(self, addend: _Addend, norm: Norm | None, output: Tensor | None) -> AddNorm:
        branch = addend.branch
        rows = addend.rows
        return AddNorm.of(self._stream, rows, norm, output, branch.norm_after, branch.scale)

    def _part(self, layer: DecoderLayer, part: Part, inputs: Tensor, name: str) -> Output:
        """Yield the operations of a part; returns its addend."""
        for_all = layer.is_parallel  # what is held while other branches are computed
        if isinstance(part, FeedForward):
            return (yield from self._feed_forward(part, inputs, name, for_all))
        if isinstance(part, Attention):
            mixed = yield from self._attention(layer.index, part, inputs)
        else:
            mixed = yield from self._called(part, inputs, name)
        if part is self._last_mixing:
            mixed = yield from self._narrow(mixed)
        if isinstance(part, Call):
            return mixed
        return (yield from self._product(part.combine, mixed, name, for_all))

    def _feed_forward(self, part: FeedForward, inputs: Tensor, name: str, for_all: bool) -> Output:
        product, gate_up = self._product_into(part.gate_up, inputs, "gate_up", False)
        gated = self._arena.chunk("gated", part.down.weight.num_columns)
        opened = Gated.of(gate_up, gated, part.activation, part.has_up)
        if self._lora is None and part.has_up:
            yield self._at(GatedProduct(product, opened))
        else:
            yield self._at(product)
            if self._lora is not None:
                yield self._at(self._updates(part.gate_up, inputs, gate_up))
            yield self._at(opened)
        return (yield from self._product(part.down, gated, name, for_all))

    def _called(self, part: Call, inputs: Tensor, name: str) -> Output:
        """Yield the call of modules; ``inputs`` are the first chunk of a buffer for all rows."""
        inputs, output = self._whole(inputs), self._rows(f"called {name}", self._width)
        on_logit_rows = self._on_logit_rows

        def run(num_rows: int) -> None:
            self._call(part, inputs[:num_rows], output[:num_rows], on_logit_rows)

        yield self._at(PythonCall(run))
        return output[: self._arena.rows_per_chunk]

    def _call(self, part: Call, rows: Tensor, output: Tensor, on_logit_rows: bool) -> None:
        given = self._given
        adapters = given.adapters
        if adapters is not None and on_logit_rows:
            adapters = adapters.of_rows(given.logit_rows)
        total: Tensor | None = None
        with self._calls.during(given.step, adapters):
            for name in part.names:
                module = part.parent.get_submodule(name)
                keywords = {}
                if part.mixes:
                    angles = self._angles.get(part.angles) if part.angles else None
                    numbers = None if angles is None else angles.own(given.positions)
                    positions = torch.from_numpy(given.positions)
                    keywords = call_keywords(module, given.step, numbers, positions[..., None, :])
                result = module(rows[None], **keywords)
                addend = result[0] if isinstance(result, tuple) else result
                addend = addend.reshape(output.shape)
                total = addend if total is None else total + addend
        assert total is not None, "modules"
        output.copy_(total)

    def _narrow(self, mixed: Tensor | None) -> Output:
        """Yield what takes the rows whose logits are computed; only they are computed from here."""
        self._on_logit_rows = True
        taken: list[Tensor] = []
        for rows in (self._stream, mixed):
            if rows is not None:
                whole, name = self._whole(rows), f"logit rows {len(taken)}"
                taken.append(self._arena.first_chunk(name, rows.shape[1]))
                take = self._take(name, taken[-1])
                take.from_table(whole)
                yield self._at(take)
        self._stream = taken[0]
        return taken[-1]

    def _attention(self, index: int, part: Attention, inputs: Tensor) -> Output:
        """Yield the operations from normed rows to attention; returns the attended rows."""
        shape, rows = part.shape, self._arena.first_chunk
        num_values, num_kv = shape.num_heads * shape.dim, shape.num_kv_heads * shape.dim
        projected = yield from self._product(part.project, inputs, "projected", False)
        heads = Heads(rows("queries", num_values), rows("keys", num_kv), rows("values", num_kv))
        angles = None if part.angles is None else self._angles_of(part.angles)
        yield self._at(SplitHeads.of(projected, shape, angles, heads))
        if self._stores:
            yield from self._attend_natively(index, part, heads)
        else:
            yield self._at(PythonCall(lambda count: self._attend(index, part, count)))
        return rows("attended", num_values)

    def _attend(self, index: int, part: Attention, num_rows: int) -> None:
        shape, rows = part.shape, self._arena.rows
        num_values, num_kv = shape.num_heads * shape.dim, shape.num_kv_heads * shape.dim
        queries, keys, values = (
            rows(name, width)[:num_rows].unflatten(1, (-1, shape.dim))
            for name, width in (("queries", num_values), ("keys", num_kv), ("values", num_kv))
        )
        attended = self._given.step.attend(index, queries, keys, values, part.style)
        rows("attended", num_values)[:num_rows] = attended.reshape(num_rows, -1)

    def _attend_natively(self, index: int, part: Attention, heads: Heads) -> Operations:
        shape, store = part.shape, self._stores[index]
        kept = store.spec.layers[index]
        assert kept.num_kv_heads == shape.num_kv_heads, kept
        assert kept.key_dim == kept.value_dim == shape.dim, kept
        keys, values = (_rows_of(t, shape.dim) for t in (heads.keys, heads.values))
        slots = self._slots[id(store)].ctypes.data
        yield self._at(Write(store.of_layer(index), keys, values, slots, 0))
        yield self._at(Copy(store.of_layer(index), ctypes.addressof(self._copies[id(store)])))
        num_values = shape.num_heads * shape.dim
        sinks = None
        if part.style.sinks is not None:
            assert part.style.sinks.shape == (shape.num_heads,), "one for each head"
            sinks = part.style.sinks.detach().float().clone()
            self._refreshed.append((sinks, part.style.sinks.detach()))
        own = AttentionRecord(
            kv=store.of_layer(index),
            queries=_rows_of(self._arena.rows("queries", num_values), shape.dim),
            output=_rows_of(self._arena.rows("attended", num_values), shape.dim),
            sinks=None if sinks is None else sinks.data_ptr(),
            scale=part.style.scale,
            soft_cap=part.style.soft_cap or 0.0,
        )
        yield self._at(Attend(own, ctypes.addressof(self._of_kind(index, part))))

    def _product(self, projection: Projection, inputs: Tensor, into: str, for_all: bool) -> Output:
        """Yield a product and the adapters' updates of it; returns the output."""
        product, outputs = self._product_into(projection, inputs, into, for_all)
        yield self._at(product)
        if self._lora is not None:
            yield self._at(self._updates(projection, inputs, outputs))
        return outputs

    def _updates(self, projection: Projection, inputs: Tensor, outputs: Tensor) -> LoraProduct:
        """Describe the adapters' updates of a product."""
        step = self._logit_row_groups if self._on_logit_rows else self._all_row_groups
        return LoraProduct.of(inputs, outputs, step, self._places[id(projection)])

    def _product_into(
        self, projection: Projection, inputs: Tensor, name: str, for_all: bool
    ) -> tuple[Product, Tensor]:
        """Return a product and its output."""
        outputs = self._buffer(name, projection.weight.num_rows, for_all)
        return self._record(projection, inputs, outputs), outputs

    def _record(self, projection: Projection, inputs: Tensor, outputs: Tensor) -> Product:
        """Describe a product; biases of several layers are concatenated again in each step."""
        bias = projection.bias()
        if bias is not None and len(projection.names) > 1:
            self._refreshed.append((bias, projection))
        return projection.weight.record(inputs, bias, outputs)

    def _of_kind(self, index: int, part: Attention) -> AttentionRecord:
        """Return the arguments that layers of a kind share, which each step sets."""
        store, heads = self._stores[index], part.shape.num_heads
        kind = (id(store), part.style.window or 0, heads, store.spec.layers[index])
        if kind not in self._shared:
            self._shared[kind] = AttentionRecord()
            self._kinds.append((index, part, self._shared[kind]))
        return self._shared[kind]

    def _at(self, step: Step) -> tuple[Step, bool]:
        """Return an operation, and whether it is on the logit rows."""
        return step, self._on_logit_rows

    def _take(self, name: str, output: Tensor) -> Take:
        """Return a copy of rows of a table, which each step sets."""
        self._takes[name] = Take.into(output)
        return self._takes[name]

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

    def _whole(self, first_chunk: Tensor) -> Tensor:
        """Return the buffer for all rows of which this is the first chunk."""
        return first_chunk.as_strided(
            (self._arena.max_rows, first_chunk.shape[1]), first_chunk.stride()
        )


def _width_in_arena(decoder: Decoder) -> int:
    """Return how many numbers the arena has for each row of a chunk."""
    width = decoder.head.weight.num_columns
    widths = {("normed", width), ("added 0", width), ("added 1", width)}
    for part in decoder.parts():
        if isinstance(part, Attention):
            widths.add(("projected", part.project.weight.num_rows))
        elif isinstance(part, FeedForward):
            widths.add(("gate_up", part.gate_up.weight.num_rows))
            widths.add(("gated", part.down.weight.num_columns))
    return sum(row_stride(width) for _, width in widths)


def native_steps(step: LayerAttention, decoder: Decoder) -> dict[int, NativeStep] | None:
    """Return the native attention of each layer that attends; None unless all have one."""
    if not isinstance(step, GroupedStep):
        return None
    native = {}
    for layer in decoder.layers:
        if any(isinstance(branch.part, Attention) for branch in layer.branches):
            own = step.steps[step.of_layer[layer.index]]
            if not isinstance(own, NativeStep):
                return None
            native[layer.index] = own
    return native or None


def _rows_of(buffer: Tensor, dim: int) -> Rows:
    """Describe a buffer of heads to the library, shape (num_rows, num_heads * dim)."""
    num_rows, num_heads, rows = buffer.shape[0], buffer.shape[1] // dim, Rows()
    fill_rows(rows, buffer.view(num_rows, num_heads, dim), num_rows, num_heads, dim)
    return rows
