"""The low-rank updates that an adapter adds to each product.

A product may join several linear layers (queries, keys and values; gate and up): an adapter's
update of it has one part per layer, each with the columns that it changes::

    product     [ queries        | keys  | values ]
    parts         down_q, up_q     -       down_v, up_v
"""

from weakref import WeakKeyDictionary

from ostinato.runner.forward.decoder import PRODUCTS, Decoder
from ostinato.runner.inputs import Ints
from ostinato.runner.lora import LoraAdapter, StepAdapters
from ostinato.runner.lora_records import Part, UpdateList


class AdapterParts:
    """Adapters as the library reads them, for the products of one decoder."""

    def __init__(self, decoder: Decoder) -> None:
        """Note which linear layers each product joins."""
        self._joined = [layer.joined(product) for layer in decoder.layers for product in PRODUCTS]
        self._known: WeakKeyDictionary[LoraAdapter, UpdateList] = WeakKeyDictionary()

    def groups_of(self, adapters: StepAdapters) -> list[tuple[Ints, UpdateList]]:
        """Describe a step's adapters: the rows and the updates of each."""
        rows = adapters.rows_of_each()
        return [(rows[adapter], self._updates(adapter)) for adapter in rows]

    def _updates(self, adapter: LoraAdapter) -> UpdateList:
        """Return an adapter's updates of every product; made once."""
        if adapter not in self._known:
            self._known[adapter] = UpdateList(
                [
                    [
                        Part.of(layer, first)
                        for name, first in joined
                        if (layer := adapter.layers.get(name)) is not None
                    ]
                    for joined in self._joined
                ]
            )
        return self._known[adapter]
