"""How is a step of a few rows computed without Python between its operations?

A decode step is over in some tens of milliseconds and has some three hundred operations: called one
by one, Python would take an eighth of it. So they are laid down as one program, from the norm
before the first layer to the one behind the last, with stores and attention in between::

    norm ─► n × (q k v ─► turn ─► store, copy ─► attend ─► combine ─► add + norm
                 ─► gate up ─► silu * ─► down ─► add + norm)

It runs where every weight multiplies a few rows by itself and the library reads every layer. A step
brings its residual stream, its angles, its slots, and one plan for all layers of a kind.
"""

import ctypes
from collections.abc import Generator, Hashable, Iterator

import numpy as np
import torch
from torch import Tensor

from ostinato.runner.attention.backend import GroupedStep
from ostinato.runner.attention.native_backend import NativeStep
from ostinato.runner.attention.registration import LayerAttention
from ostinato.runner.forward.decoder import Decoder, DecoderLayer, Projection
from ostinato.runner.forward.parts import Heads, Norm, Turns
from ostinato.runner.forward.program import Attend, Copies, Copy, Program, Record, Write
from ostinato.runner.forward.records import AddNorm, Gated, TakeApart
from ostinato.runner.native.checks import fill_rows
from ostinato.runner.native.face import Attention, Rows

MOST_ROWS = 128
"""Rows that a program's buffers have room for."""


class SmallSteps:
    """Computes steps of a few rows of a decoder, one at a time."""

    def __init__(self, decoder: Decoder, library: ctypes.CDLL) -> None:
        """Take a decoder; its program is laid down with the first step of a store."""
        self._decoder = decoder
        self._library = library
        self._can = all(
            layer.style.plain and projection.weight.few is not None
            for layer in decoder.layers
            for projection in (layer.project, layer.combine, layer.gate_up, layer.down)
        )
        self._laid: _LaidDown | None = None

    def run(self, embedded: Tensor, turns: Turns, step: LayerAttention) -> Tensor | None:
        """Compute a step, if it is one for a program.

        Args:
            embedded: What goes into the first layer, shape (num_rows, width).
            turns: Angles of the rows.
            step: Who answers the layers' attention.

        Returns:
            Rows behind the last norm, shape (num_rows, width), valid until the next step; None if
            nothing was computed.

        Effects: writes the step's slots in every layer.
        Cost: some milliseconds more when stores are others than in the step before.
        """
        if not self._can or not self._takes(len(embedded)):
            return None
        steps = _native_steps(step, len(self._decoder.layers))
        if steps is None:
            return None
        if self._laid is None or not self._laid.fits(steps):
            self._laid = _LaidDown(self._decoder, self._library, steps)
        return self._laid.run(embedded, turns, steps)

    def _takes(self, num_rows: int) -> bool:
        """Whether so many rows are a few, with the instruction set in use."""
        few = self._decoder.layers[0].project.weight.few
        return num_rows <= MOST_ROWS and few is not None and few.takes(num_rows)


class _LaidDown:
    """A decoder's program on the stores of one runner."""

    def __init__(
        self, decoder: Decoder, library: ctypes.CDLL, steps: tuple[NativeStep, ...]
    ) -> None:
        """Lay it down; ``steps`` say which store each layer has."""
        self._decoder = decoder
        self._stores = tuple(step.store for step in steps)
        self._buffers: dict[tuple[str, int], Tensor] = {}
        self._slots = {id(s): np.zeros(MOST_ROWS, dtype=np.int64) for s in self._stores}
        self._copies = {id(s): Copies() for s in self._stores}
        self._shared: dict[Hashable, Attention] = {}
        self._kinds: list[tuple[int, Attention]] = []
        self._joined: list[tuple[Tensor, tuple[Tensor, ...]]] = []
        self._program = Program(library, list(self._records()), MOST_ROWS)

    def fits(self, steps: tuple[NativeStep, ...]) -> bool:
        """Whether steps are on the stores that it was laid down for."""
        return all(step.store is store for step, store in zip(steps, self._stores, strict=True))

    def run(self, embedded: Tensor, turns: Turns, steps: tuple[NativeStep, ...]) -> Tensor:
        """Compute a step; see ``SmallSteps``."""
        num_rows, dim = turns.cosines.shape
        self._rows("stream", embedded.shape[1])[:num_rows].copy_(embedded)
        self._rows("cosines", dim)[:num_rows].copy_(turns.cosines)
        self._rows("sines", dim)[:num_rows].copy_(turns.sines)
        for step in {id(step): step for step in steps}.values():
            assert len(step.slots) == num_rows, "a slot for each row"
            self._slots[id(step.store)][:num_rows] = step.slots.ids
            copies, (sources, targets) = self._copies[id(step.store)], step.copies
            assert len(sources) == len(targets), "each has somewhere to go"
            copies.sources, copies.targets = sources.address, targets.address
            copies.num_slots = len(targets)
        for layer, shared in self._kinds:
            own = self._decoder.layers[layer]
            of_kind = steps[layer].of_kind(layer, own.shape.num_heads, own.style.window)
            ctypes.memmove(ctypes.byref(shared), ctypes.byref(of_kind), ctypes.sizeof(shared))
        for joined, biases in self._joined:
            torch.cat(biases, out=joined)
        self._program.run(num_rows, torch.get_num_threads())
        return self._rows("normed", embedded.shape[1])[:num_rows]

    def _records(self) -> Iterator[Record]:
        """Yield the operations of a step, first to last."""
        layers = self._decoder.layers
        width = layers[0].input_norm.weight.shape[0]
        stream, normed = self._rows("stream", width), self._rows("normed", width)
        yield AddNorm.of(stream, None, layers[0].input_norm, normed)
        for index, layer in enumerate(layers):
            attended = yield from self._attention(index, layer, normed)
            combined = yield from self._product(layer.combine, attended, "added")
            yield AddNorm.of(stream, combined, layer.output_norm, normed)
            gate_up = yield from self._product(layer.gate_up, normed, "gate_up")
            gated = self._rows("gated", gate_up.shape[1] // 2)
            yield Gated.of(gate_up, gated)
            down = yield from self._product(layer.down, gated, "added")
            yield AddNorm.of(stream, down, self._norm_behind(index), normed)

    def _attention(
        self, index: int, layer: DecoderLayer, normed: Tensor
    ) -> Generator[Record, None, Tensor]:
        """Yield what leads from normed rows to what they attend to; returns where that is."""
        shape, rows = layer.shape, self._rows
        num_values, num_kv = shape.num_heads * shape.dim, shape.num_kv_heads * shape.dim
        projected = yield from self._product(layer.project, normed, "projected")
        turns = Turns(rows("cosines", shape.dim), rows("sines", shape.dim))
        heads = Heads(rows("queries", num_values), rows("keys", num_kv), rows("values", num_kv))
        yield TakeApart.of(projected, shape, turns, heads)
        keys, values = (_rows_of(t, shape.dim) for t in (heads.keys, heads.values))
        store, kept = self._stores[index], self._stores[index].spec.layers[index]
        assert kept.num_kv_heads == shape.num_kv_heads, kept
        assert kept.key_dim == kept.value_dim == shape.dim, kept
        yield Write(store.of_layer(index), keys, values, self._slots[id(store)].ctypes.data, 0)
        yield Copy(store.of_layer(index), ctypes.addressof(self._copies[id(store)]))
        attended = rows("attended", num_values)
        own = Attention(
            kv=store.of_layer(index),
            queries=_rows_of(heads.queries, shape.dim),
            output=_rows_of(attended, shape.dim),
            scale=layer.style.scale,
        )
        yield Attend(own, ctypes.addressof(self._of_kind(index)))
        return attended

    def _product(
        self, projection: Projection, inputs: Tensor, name: str
    ) -> Generator[Record, None, Tensor]:
        """Yield a product; returns where it is put."""
        few = projection.weight.few
        assert few is not None, "looked at before"
        outputs = self._rows(name, projection.weight.num_rows)
        bias = projection.bias()
        if bias is not None and len(projection.biases) > 1:
            self._joined.append((bias, projection.biases))
        yield few.record(inputs, bias, outputs)
        return outputs

    def _of_kind(self, index: int) -> Attention:
        """Return where what layers of a kind share is put in each step."""
        layer, store = self._decoder.layers[index], self._stores[index]
        kind = (id(store), layer.style.window or 0, layer.shape.num_heads, store.spec.layers[index])
        if kind not in self._shared:
            self._shared[kind] = Attention()
            self._kinds.append((index, self._shared[kind]))
        return self._shared[kind]

    def _norm_behind(self, index: int) -> Norm:
        layers = self._decoder.layers
        return self._decoder.norm if index + 1 == len(layers) else layers[index + 1].input_norm

    def _rows(self, name: str, width: int) -> Tensor:
        """Return a buffer; layers share those of one name and width."""
        buffer = self._buffers.get((name, width))
        if buffer is None:
            buffer = torch.zeros(MOST_ROWS, width, dtype=torch.bfloat16)
            self._buffers[name, width] = buffer
        return buffer


def _native_steps(step: LayerAttention, num_layers: int) -> tuple[NativeStep, ...] | None:
    """Return who answers each layer; None unless the library does."""
    each: tuple[LayerAttention, ...] = (step,) * num_layers
    if isinstance(step, GroupedStep):
        each = tuple(step.steps[group] for group in step.of_layer)
    native = tuple(one for one in each if isinstance(one, NativeStep))
    return native if len(native) == num_layers else None


def _rows_of(buffer: Tensor, dim: int) -> Rows:
    """Describe a buffer of heads to the library, shape (MOST_ROWS, num_heads * dim)."""
    num_heads, rows = buffer.shape[1] // dim, Rows()
    fill_rows(rows, buffer.view(MOST_ROWS, num_heads, dim), MOST_ROWS, num_heads, dim)
    return rows
