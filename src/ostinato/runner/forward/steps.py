"""Computes a step without Python between its operations.

A decode step is over in some tens of milliseconds and has some three hundred operations: called one
by one, Python would take an eighth of it. So they are laid down as one program, from the ids to the
logits, with stores and attention in between::

    vectors, angles ─► norm ─► n × (q k v ─► turn ─► store, copy ─► attend ─► combine ─► add + norm
                                    ─► gate up ─► silu * ─► down ─► add + norm) ─► head

A long step goes from one attention to the next in chunks, each in the place of the one before, so
that what one operation leaves is still in the processor's cache when the next needs it. Attention
alone sees all rows at once, and behind the last one only rows whose logits are wanted go on.

It runs where the library reads every layer's keys and values. A step brings its ids, positions and
slots, and one plan for all layers of a kind.
"""

import ctypes
from collections.abc import Generator, Hashable, Iterator

import numpy as np
import torch
from torch import Tensor

from ostinato.runner.attention.backend import GroupedStep
from ostinato.runner.attention.native_backend import NativeStep
from ostinato.runner.attention.registration import LayerAttention
from ostinato.runner.forward.arena import Arena
from ostinato.runner.forward.decoder import PRODUCTS, Decoder, DecoderLayer, Projection
from ostinato.runner.forward.embedding_and_rope import Lookup
from ostinato.runner.forward.layer_specs import Heads, Norm, RopeAngles
from ostinato.runner.forward.lora_products import AdapterParts
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
from ostinato.runner.forward.records import AddNorm, Gated, TakeApart
from ostinato.runner.inputs import Ints
from ostinato.runner.lora import StepAdapters
from ostinato.runner.lora_records import Groups, LoraProduct
from ostinato.runner.native.checks import address_of, fill_rows, within
from ostinato.runner.native.ctypes_api import Attention, Rows
from ostinato.runner.native.packed import Matrix, Product, row_stride

ROWS_PER_CHUNK = 384
"""Rows that go from one attention to the next together: what one operation leaves is still in the
processor's cache when the next needs it, and a weight is not read too often."""

_FEWEST_ROWS = 128
"""Rows that any program has room for."""


class Steps:
    """Computes steps of a decoder, one at a time."""

    def __init__(self, decoder: Decoder, library: ctypes.CDLL) -> None:
        """Take a decoder; its program is laid down with the first step of a store."""
        self._decoder = decoder
        self._library = library
        self._can = all(layer.style.plain for layer in decoder.layers)
        self._laid: dict[bool, _LaidDown] = {}  # whether adapters take part

    def run(
        self,
        vectors: Lookup,
        angles: Lookup,
        step: LayerAttention,
        wanted: Ints | None,
        adapters: StepAdapters | None = None,
    ) -> Tensor | None:
        """Compute a step, if it is one for a program.

        Args:
            vectors: What goes into the first layer, rows of its width.
            angles: Cosines and sines of the rows, side by side.
            step: Who answers the layers' attention.
            wanted: Rows whose logits are wanted, shape (num_wanted,); None wants all.
            adapters: Rows that adapters compute; None is none.

        Returns:
            Logits, fresh, shape (num_wanted, vocab_size); None if nothing was computed.

        Effects: writes the step's slots in every layer.
        Cost: some milliseconds more when stores are others than in the step before.
        """
        steps = _native_steps(step, len(self._decoder.layers)) if self._can else None
        if steps is None:
            return None
        laid = self._laid.get(adapters is not None)
        if laid is None or not laid.fits(steps, len(vectors)):
            lora = None if adapters is None else AdapterParts(self._decoder)
            room = _room_for(len(vectors))
            laid = _LaidDown(self._decoder, self._library, steps, room, lora)
            self._laid[adapters is not None] = laid
        everything = np.arange(len(vectors)) if wanted is None else wanted
        return laid.run(vectors, angles, steps, everything, adapters)


class _LaidDown:
    """A decoder's program on the stores of one runner."""

    def __init__(
        self,
        decoder: Decoder,
        library: ctypes.CDLL,
        steps: tuple[NativeStep, ...],
        most_rows: int,
        lora: AdapterParts | None,
    ) -> None:
        """Lay it down for so many rows; ``steps`` say which store each layer has."""
        self._decoder = decoder
        self._lora = lora
        self._on_all, self._on_some = Groups(), Groups()  # of a step, and of its wanted rows
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
        """Whether there is room, and steps are on the stores that it was laid down for."""
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
            self._on_all.take(self._lora.groups_of(adapters))
            self._on_some.take(self._lora.groups_of(adapters.of_rows(wanted)))
        num_rows, num_wanted = len(vectors), len(wanted)
        assert len(angles) == num_rows, "angles for each row"
        self._takes["stream"].look_up(vectors)
        self._takes["turns"].look_up(angles)
        assert within(wanted, num_rows) and wanted.flags.c_contiguous, "rows of the step"
        for name in ("wanted stream", "wanted attended"):
            self._takes[name].rows = address_of(wanted)
        for step in {id(step): step for step in steps}.values():
            assert len(step.slots) == num_rows, "a slot for each row"
            self._slots[id(step.store)][:num_rows] = step.slots.ids
            copies, (sources, targets) = self._copies[id(step.store)], step.copies
            assert len(sources) == len(targets), "each has somewhere to go"
            copies.sources, copies.targets = sources.address, targets.address
            copies.num_slots = len(targets)
        for layer, shared in self._kinds:
            of_layer = self._decoder.layers[layer]
            of_kind = steps[layer].of_kind(layer, of_layer.shape.num_heads, of_layer.style.window)
            ctypes.memmove(ctypes.byref(shared), ctypes.byref(of_kind), ctypes.sizeof(shared))
        for joined, biases in self._joined:
            torch.cat(biases, out=joined)
        return self._run(num_rows, num_wanted)

    def _run(self, num_rows: int, num_wanted: int) -> Tensor:
        """Run the program into fresh logits."""
        size = self._decoder.head.weight.num_rows
        block = torch.empty(num_wanted, row_stride(size), dtype=self._arena.dtype)
        self._head.outputs = Matrix.of(block)
        self._program.run(num_rows, num_wanted, torch.get_num_threads())
        return block[:, :size]

    def _records(self) -> Iterator[Record]:
        """Yield the operations on all rows of a step, first to last."""
        layers = self._decoder.layers
        width = layers[0].input_norm.weight.shape[0]
        stream, normed = self._first_chunk("stream", width), self._chunk("normed", width)
        yield self._take("stream", stream)
        yield self._take("turns", self._first_chunk("turns", 2 * layers[0].shape.dim))
        yield AddNorm.of(stream, None, layers[0].input_norm, normed)
        for index, layer in enumerate(layers):
            attended = yield from self._attention(index, layer, normed)
            if index + 1 < len(layers):
                yield from self._feed_forward(index, attended, stream, normed)

    def _on_wanted(self) -> Iterator[Record]:
        """Yield what comes behind the last attention, on those rows whose logits are wanted."""
        decoder, last = self._decoder, len(self._decoder.layers) - 1
        combine, width = decoder.layers[last].combine, decoder.norm.weight.shape[0]
        everything = {
            "stream": self._arena.rows("stream", width),
            "attended": self._arena.rows("attended", combine.weight.num_columns),
        }
        wanted = {}
        for name, rows in everything.items():
            wanted[name] = self._chunk(f"wanted {name}", rows.shape[1])
            take = self._take(f"wanted {name}", wanted[name])
            take.from_table(rows)
            yield take
        normed = self._first_chunk("wanted normed", width)
        yield from self._feed_forward(last, wanted["attended"], wanted["stream"], normed)
        logits = normed.new_empty(len(normed), decoder.head.weight.num_rows)
        self._head = self._record(decoder.head, normed, logits)  # each step brings its own logits
        yield self._head

    def _take(self, name: str, output: Tensor) -> Take:
        """Return an operation that a step tells what to take."""
        self._takes[name] = Take.into(output)
        return self._takes[name]

    def _feed_forward(
        self, index: int, attended: Tensor, stream: Tensor, normed: Tensor
    ) -> Generator[Record, None, None]:
        """Yield what leads from attention to the norm of the next layer."""
        layer = self._decoder.layers[index]
        combined = yield from self._product(index, "combine", attended, "added")
        yield AddNorm.of(stream, combined, layer.output_norm, normed)
        product, gate_up = self._product_into(layer.gate_up, normed, "gate_up")
        gated = self._chunk("gated", gate_up.shape[1] // 2)
        if self._lora is None:
            yield GatedProduct(product, Gated.of(gate_up, gated))
        else:
            yield product
            yield self._updates(index, "gate_up", normed, gate_up)
            yield Gated.of(gate_up, gated)
        down = yield from self._product(index, "down", gated, "added")
        yield AddNorm.of(stream, down, self._norm_behind(index), normed)

    def _attention(
        self, index: int, layer: DecoderLayer, normed: Tensor
    ) -> Generator[Record, None, Tensor]:
        """Yield what leads from normed rows to what they attend to; returns where that is."""
        shape, rows = layer.shape, self._first_chunk
        num_values, num_kv = shape.num_heads * shape.dim, shape.num_kv_heads * shape.dim
        projected = yield from self._product(index, "project", normed, "projected")
        turns = RopeAngles(*rows("turns", 2 * shape.dim).chunk(2, dim=1))
        heads = Heads(rows("queries", num_values), rows("keys", num_kv), rows("values", num_kv))
        yield TakeApart.of(projected, shape, turns, heads)
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
        """Yield a layer's product, and what adapters add to it; returns where it is put."""
        projection = getattr(self._decoder.layers[index], name)
        product, outputs = self._product_into(projection, inputs, into)
        yield product
        if self._lora is not None:
            yield self._updates(index, name, inputs, outputs)
        return outputs

    def _updates(self, index: int, name: str, inputs: Tensor, outputs: Tensor) -> LoraProduct:
        """Describe what adapters add; behind the last attention, only wanted rows go on."""
        is_on_some = index + 1 == len(self._decoder.layers) and name != "project"
        step = self._on_some if is_on_some else self._on_all
        place = index * len(PRODUCTS) + list(PRODUCTS).index(name)
        return LoraProduct.of(inputs, outputs, step, place)

    def _product_into(
        self, projection: Projection, inputs: Tensor, name: str
    ) -> tuple[Product, Tensor]:
        """Return a product and where it is put."""
        outputs = self._chunk(name, projection.weight.num_rows)
        return self._record(projection, inputs, outputs), outputs

    def _record(self, projection: Projection, inputs: Tensor, outputs: Tensor) -> Product:
        """Describe a product; biases that are joined for it are joined anew in each step."""
        bias = projection.bias()
        if bias is not None and len(projection.biases) > 1:
            self._joined.append((bias, projection.biases))
        return projection.weight.record(inputs, bias, outputs)

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

    def _chunk(self, name: str, width: int) -> Tensor:
        return self._arena.chunk(name, width)

    def _first_chunk(self, name: str, width: int) -> Tensor:
        return self._arena.first_chunk(name, width)


def _room_for(num_rows: int) -> int:
    """Return how many rows to make room for: few programs are laid down, whatever comes."""
    return max(_FEWEST_ROWS, 1 << (num_rows - 1).bit_length())


def _width_in_arena(decoder: Decoder) -> int:
    """Return how many numbers of a row are in the arena."""
    layers, width = decoder.layers, decoder.norm.weight.shape[0]
    widths = {("combined", layer.combine.weight.num_columns) for layer in layers}
    widths |= {("projected", layer.project.weight.num_rows) for layer in layers}
    widths |= {("gate_up", layer.gate_up.weight.num_rows) for layer in layers}
    widths |= {("gated", layer.down.weight.num_columns) for layer in layers}
    return 3 * row_stride(width) + sum(row_stride(width) for _, width in widths)


def _native_steps(step: LayerAttention, num_layers: int) -> tuple[NativeStep, ...] | None:
    """Return who answers each layer; None unless the library does."""
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
