"""Computes a step without Python between its operations.

A decode step takes some tens of milliseconds and has about three hundred operations: if Python
called them one by one, it would take an eighth of the time. So they form one program, from the ids
to the logits, with stores and attention in between::

    vectors, angles ─► norm ─► n × (q k v ─► RoPE ─► store, copy ─► attend ─► combine ─► add + norm
                                    ─► gate up ─► silu * ─► down ─► add + norm) ─► head

Between two attentions a long step is computed in chunks that use the same buffers, so that the
output of one operation is still in the processor's cache when the next reads it. Attention sees all
rows at once. After the last attention, only rows whose logits are wanted are computed.

A program runs where the library reads every layer's keys and values. Each step sets its ids,
positions and slots, and one plan for all layers of a kind.
"""

import ctypes
from collections.abc import Generator, Hashable, Iterator

import numpy as np
import torch
from torch import Tensor

from ostinato.runner.adapters.lora import StepAdapters
from ostinato.runner.adapters.lora_updates import AdapterUpdates, Groups, LoraProduct
from ostinato.runner.attention.backend import GroupedStep
from ostinato.runner.attention.native_backend import NativeStep
from ostinato.runner.attention.registration import LayerAttention
from ostinato.runner.forward.arena import Arena
from ostinato.runner.forward.decoder import PRODUCTS, Decoder, DecoderLayer, Projection
from ostinato.runner.forward.embedding_and_rope import Lookup
from ostinato.runner.forward.ops import AddNorm, Gated, Heads, RopeAngles, SplitHeads
from ostinato.runner.forward.program import (
    Attend,
    Copies,
    Copy,
    GatedProduct,
    Program,
    Record,
    Take,
    Write,
)
from ostinato.runner.heads import HiddenRows
from ostinato.runner.inputs import Ints
from ostinato.runner.native.checks import address_of, fill_rows, within
from ostinato.runner.native.ctypes_api import Attention, Rows
from ostinato.runner.native.packed import Matrix, Product, row_stride

ROWS_PER_CHUNK = 384
"""Rows of a chunk: few enough that the output of an operation stays in the processor's cache, and
enough that weights are not read too often."""

_MIN_ROWS = 128
"""Rows that every program has buffers for."""


class Steps:
    """Computes steps of a decoder, one at a time."""

    def __init__(self, decoder: Decoder, library: ctypes.CDLL) -> None:
        """Take a decoder; its program is built in the first step."""
        self._decoder = decoder
        self._library = library
        self._is_supported = all(layer.style.plain for layer in decoder.layers)
        self._programs: dict[bool, _StepProgram] = {}  # by whether the step has adapters

    def run(
        self,
        vectors: Lookup,
        angles: Lookup,
        step: LayerAttention,
        wanted: Ints | None,
        adapters: StepAdapters | None = None,
        hidden: HiddenRows | None = None,
    ) -> Tensor | None:
        """Compute a step, if a program can.

        Args:
            vectors: Input of the first layer.
            angles: Cosines and sines of the rows, side by side.
            step: The attention of the layers.
            wanted: Rows whose logits are wanted, shape (num_wanted,); None wants all.
            adapters: Rows that adapters compute; None is none.
            hidden: Takes the input of the head; None keeps none.

        Returns:
            New logits, shape (num_wanted, vocab_size); None if nothing was computed.

        Effects: writes the step's slots in every layer.
        Cost: some milliseconds more when the stores are not those of the step before.
        """
        steps = _native_steps(step, len(self._decoder.layers)) if self._is_supported else None
        if steps is None:
            return None
        program = self._programs.get(adapters is not None)
        if program is None or not program.fits(steps, len(vectors)):
            lora = None
            if adapters is not None:
                layers = self._decoder.layers
                lora = AdapterUpdates([layer.joined(name) for layer in layers for name in PRODUCTS])
            most_rows = max(_MIN_ROWS, 1 << (len(vectors) - 1).bit_length())
            program = _StepProgram(self._decoder, self._library, steps, most_rows, lora)
            self._programs[adapters is not None] = program
        everything = np.arange(len(vectors)) if wanted is None else wanted
        logits = program.run(vectors, angles, steps, everything, adapters)
        if hidden is not None:
            hidden.rows = program.hidden[: len(everything)].clone()
        return logits


class _StepProgram:
    """A decoder's program on the stores of one runner."""

    def __init__(
        self,
        decoder: Decoder,
        library: ctypes.CDLL,
        steps: tuple[NativeStep, ...],
        most_rows: int,
        lora: AdapterUpdates | None,
    ) -> None:
        """Build it for up to so many rows; ``steps`` give the store of each layer."""
        self._decoder = decoder
        self._lora = lora
        self._on_all_rows, self._on_wanted_rows = Groups(), Groups()
        self._stores = tuple(step.store for step in steps)
        dtype = decoder.norm.weight.dtype
        self._arena = Arena(most_rows, ROWS_PER_CHUNK, _width_in_arena(decoder), dtype)
        self._slots = {id(s): np.zeros(most_rows, dtype=np.int64) for s in self._stores}
        self._copies = {id(s): Copies() for s in self._stores}
        self._shared: dict[Hashable, Attention] = {}
        self._kinds: list[tuple[int, Attention]] = []
        self._joined: list[tuple[Tensor, tuple[Tensor, ...]]] = []
        self._takes: dict[str, Take] = {}
        self._head: Product
        self._program = Program(
            library, list(self._records()), list(self._on_wanted()), self._arena
        )

    def fits(self, steps: tuple[NativeStep, ...], num_rows: int) -> bool:
        """Whether buffers are large enough, and the stores are those that it was built for."""
        return num_rows <= self._arena.most_rows and all(
            step.store is store for step, store in zip(steps, self._stores, strict=True)
        )

    def run(
        self,
        vectors: Lookup,
        angles: Lookup,
        steps: tuple[NativeStep, ...],
        wanted: Ints,
        adapters: StepAdapters | None,
    ) -> Tensor:
        """Compute a step; see ``Steps``."""
        if adapters is not None and self._lora is not None:
            self._on_all_rows.take(self._lora.groups_of(adapters))
            self._on_wanted_rows.take(self._lora.groups_of(adapters.of_rows(wanted)))
        num_rows, num_wanted = len(vectors), len(wanted)
        assert len(angles) == num_rows, "angles for each row"
        self._takes["stream"].look_up(vectors)
        self._takes["angles"].look_up(angles)
        assert within(wanted, num_rows) and wanted.flags.c_contiguous, "rows of the step"
        for name in ("wanted stream", "wanted attended"):
            self._takes[name].rows = address_of(wanted)
        for step in {id(step): step for step in steps}.values():
            assert len(step.slots) == num_rows, "a slot for each row"
            self._slots[id(step.store)][:num_rows] = step.slots.ids
            copies, (sources, targets) = self._copies[id(step.store)], step.copies
            assert len(sources) == len(targets), "a target for each"
            copies.sources, copies.targets = sources.address, targets.address
            copies.num_slots = len(targets)
        for layer, shared in self._kinds:
            of_layer = self._decoder.layers[layer]
            of_kind = steps[layer].of_kind(layer, of_layer.shape.num_heads, of_layer.style.window)
            ctypes.memmove(ctypes.byref(shared), ctypes.byref(of_kind), ctypes.sizeof(shared))
        for joined, biases in self._joined:
            torch.cat(biases, out=joined)
        size = self._decoder.head.weight.num_rows
        block = torch.empty(num_wanted, row_stride(size), dtype=self._arena.dtype)
        self._head.outputs = Matrix.of(block)
        self._program.run(num_rows, num_wanted, torch.get_num_threads())
        return block[:, :size]

    def _records(self) -> Iterator[Record]:
        """Yield the operations on all rows of a step, first to last."""
        layers = self._decoder.layers
        width = layers[0].input_norm.weight.shape[0]
        arena = self._arena
        stream, normed = arena.first_chunk("stream", width), arena.chunk("normed", width)
        yield self._take("stream", stream)
        yield self._take("angles", arena.first_chunk("angles", 2 * layers[0].shape.dim))
        yield AddNorm.of(stream, None, layers[0].input_norm, normed)
        for index, layer in enumerate(layers):
            attended = yield from self._attention(index, layer, normed)
            if index + 1 < len(layers):
                yield from self._feed_forward(index, attended, stream, normed)

    def _on_wanted(self) -> Iterator[Record]:
        """Yield the operations after the last attention, on the rows whose logits are wanted."""
        decoder, last = self._decoder, len(self._decoder.layers) - 1
        combine, width = decoder.layers[last].combine, decoder.norm.weight.shape[0]
        everything = {
            "stream": self._arena.rows("stream", width),
            "attended": self._arena.rows("attended", combine.weight.num_columns),
        }
        wanted = {}
        for name, rows in everything.items():
            wanted[name] = self._arena.chunk(f"wanted {name}", rows.shape[1])
            take = self._take(f"wanted {name}", wanted[name])
            take.from_table(rows)
            yield take
        self.hidden = self._arena.rows("wanted normed", width)
        normed = self._arena.first_chunk("wanted normed", width)
        yield from self._feed_forward(last, wanted["attended"], wanted["stream"], normed)
        logits = normed.new_empty(len(normed), decoder.head.weight.num_rows)
        self._head = self._record(decoder.head, normed, logits)  # each step sets its own logits
        yield self._head

    def _take(self, name: str, output: Tensor) -> Take:
        """Return a copy of rows of a table, which each step sets."""
        self._takes[name] = Take.into(output)
        return self._takes[name]

    def _feed_forward(
        self, index: int, attended: Tensor, stream: Tensor, normed: Tensor
    ) -> Generator[Record, None, None]:
        """Yield the operations from attention to the norm of the next layer."""
        layer = self._decoder.layers[index]
        combined = yield from self._product(index, "combine", attended, "added")
        yield AddNorm.of(stream, combined, layer.output_norm, normed)
        product, gate_up = self._product_into(layer.gate_up, normed, "gate_up")
        gated = self._arena.chunk("gated", gate_up.shape[1] // 2)
        if self._lora is None:
            yield GatedProduct(product, Gated.of(gate_up, gated))
        else:
            yield product
            yield self._updates(index, "gate_up", normed, gate_up)
            yield Gated.of(gate_up, gated)
        down = yield from self._product(index, "down", gated, "added")
        yield AddNorm.of(stream, down, self._decoder.norm_after(index), normed)

    def _attention(
        self, index: int, layer: DecoderLayer, normed: Tensor
    ) -> Generator[Record, None, Tensor]:
        """Yield the operations from normed rows to attention; returns the attended rows."""
        shape, rows = layer.shape, self._arena.first_chunk
        num_values, num_kv = shape.num_heads * shape.dim, shape.num_kv_heads * shape.dim
        projected = yield from self._product(index, "project", normed, "projected")
        angles = RopeAngles(*rows("angles", 2 * shape.dim).chunk(2, dim=1))
        heads = Heads(rows("queries", num_values), rows("keys", num_kv), rows("values", num_kv))
        yield SplitHeads.of(projected, shape, angles, heads)
        keys, values = (_rows_of(t, shape.dim) for t in (heads.keys, heads.values))
        store, kept = self._stores[index], self._stores[index].spec.layers[index]
        assert kept.num_kv_heads == shape.num_kv_heads, kept
        assert kept.key_dim == kept.value_dim == shape.dim, kept
        yield Write(store.of_layer(index), keys, values, self._slots[id(store)].ctypes.data, 0)
        yield Copy(store.of_layer(index), ctypes.addressof(self._copies[id(store)]))
        own = Attention(
            kv=store.of_layer(index),
            queries=_rows_of(self._arena.rows("queries", num_values), shape.dim),
            output=_rows_of(self._arena.rows("attended", num_values), shape.dim),
            scale=layer.style.scale,
        )
        yield Attend(own, ctypes.addressof(self._of_kind(index)))
        return rows("attended", num_values)

    def _product(
        self, index: int, name: str, inputs: Tensor, into: str
    ) -> Generator[Record, None, Tensor]:
        """Yield a layer's product and the adapters' updates of it; returns the output."""
        projection = getattr(self._decoder.layers[index], name)
        product, outputs = self._product_into(projection, inputs, into)
        yield product
        if self._lora is not None:
            yield self._updates(index, name, inputs, outputs)
        return outputs

    def _updates(self, index: int, name: str, inputs: Tensor, outputs: Tensor) -> LoraProduct:
        """Describe the adapters' updates of a product."""
        is_on_wanted = index + 1 == len(self._decoder.layers) and name != "project"
        step = self._on_wanted_rows if is_on_wanted else self._on_all_rows
        place = index * len(PRODUCTS) + list(PRODUCTS).index(name)
        return LoraProduct.of(inputs, outputs, step, place)

    def _product_into(
        self, projection: Projection, inputs: Tensor, name: str
    ) -> tuple[Product, Tensor]:
        """Return a product and its output."""
        outputs = self._arena.chunk(name, projection.weight.num_rows)
        return self._record(projection, inputs, outputs), outputs

    def _record(self, projection: Projection, inputs: Tensor, outputs: Tensor) -> Product:
        """Describe a product; biases of several layers are concatenated again in each step."""
        bias = projection.bias()
        if bias is not None and len(projection.biases) > 1:
            self._joined.append((bias, projection.biases))
        return projection.weight.record(inputs, bias, outputs)

    def _of_kind(self, index: int) -> Attention:
        """Return the arguments that layers of a kind share, which each step sets."""
        layer, store = self._decoder.layers[index], self._stores[index]
        kind = (id(store), layer.style.window or 0, layer.shape.num_heads, store.spec.layers[index])
        if kind not in self._shared:
            self._shared[kind] = Attention()
            self._kinds.append((index, self._shared[kind]))
        return self._shared[kind]


def _width_in_arena(decoder: Decoder) -> int:
    """Return how many numbers the arena has for each row of a chunk."""
    layers, width = decoder.layers, decoder.norm.weight.shape[0]
    widths = {("combined", layer.combine.weight.num_columns) for layer in layers}
    widths |= {("projected", layer.project.weight.num_rows) for layer in layers}
    widths |= {("gate_up", layer.gate_up.weight.num_rows) for layer in layers}
    widths |= {("gated", layer.down.weight.num_columns) for layer in layers}
    return 3 * row_stride(width) + sum(row_stride(width) for _, width in widths)


def _native_steps(step: LayerAttention, num_layers: int) -> tuple[NativeStep, ...] | None:
    """Return the native attention of each layer; None unless all layers have one."""
    if not isinstance(step, GroupedStep):
        return None
    native = tuple(
        one for group in step.of_layer if isinstance(one := step.steps[group], NativeStep)
    )
    return native if len(native) == num_layers else None


def _rows_of(buffer: Tensor, dim: int) -> Rows:
    """Describe a buffer of heads to the library, shape (num_rows, num_heads * dim)."""
    num_rows, num_heads, rows = buffer.shape[0], buffer.shape[1] // dim, Rows()
    fill_rows(rows, buffer.view(num_rows, num_heads, dim), num_rows, num_heads, dim)
    return rows
