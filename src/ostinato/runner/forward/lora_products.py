"""The low-rank updates that an adapter adds to each product.

A product may join several linear layers (queries, keys and values; gate and up): an adapter's
update of it has one part per layer, each with the columns that it changes::

    product     [ queries        | keys  | values ]
    parts         down_q, up_q     -       down_v, up_v
"""

import ctypes
from weakref import WeakKeyDictionary

from ostinato.runner.forward.decoder import PRODUCTS, Decoder
from ostinato.runner.lora import LoraAdapter, StepAdapters
from ostinato.runner.lora_records import Layer, Part, Segment


class AdapterParts:
    """Adapters as the library reads them, for the products of one decoder."""

    def __init__(self, decoder: Decoder) -> None:
        """Note which linear layers each product joins."""
        self._joined: list[list[tuple[str, int]]] = []
        for layer in decoder.layers:
            for product in PRODUCTS:
                self._joined.append(layer.joined(product))
        self._known: WeakKeyDictionary[LoraAdapter, tuple[ctypes.Array[Layer], list[object]]]
        self._known = WeakKeyDictionary()

    def segments_of(self, adapters: StepAdapters) -> list[Segment]:
        """Describe a step's segments."""
        return [
            Segment(segment.first, segment.end, ctypes.addressof(self._layers(segment.adapter)))
            for segment in adapters.segments
        ]

    def _layers(self, adapter: LoraAdapter) -> "ctypes.Array[Layer]":
        """Return an adapter's updates of every product; made once."""
        if adapter not in self._known:
            layers, kept = (Layer * len(self._joined))(), list[object]()
            for layer, joined in zip(layers, self._joined, strict=True):
                found = [(adapter.layers.get(name), first) for name, first in joined]
                parts = [Part.of(update, first) for update, first in found if update is not None]
                array = (Part * len(parts))(*parts)
                kept.append(array)
                layer.parts, layer.num_parts = ctypes.addressof(array), len(parts)
            self._known[adapter] = layers, kept
        return self._known[adapter][0]
