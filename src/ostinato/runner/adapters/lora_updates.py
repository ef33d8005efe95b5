"""Adds the low-rank updates of adapters to the outputs of linear layers.

In float32 and bfloat16 on a CPU by the native library, where a row's sums do not depend on the
other rows (``native/include/ostinato_ops.h`` is the other side); elsewhere in torch.

A product of the fused forward may join several linear layers (queries, keys and values; gate and
up). An adapter's update of it has one part per layer, each with the columns that it changes::

    product     [ queries        | keys  | values ]
    parts         down_q, up_q     -       down_v, up_v
"""

import ctypes
from collections.abc import Iterable, Sequence
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from ostinato.runner.adapters.lora import LoraAdapter, LoraLayer, PackedLoraLayer, StepAdapters
from ostinato.runner.inputs import Ints
from ostinato.runner.native.ctypes_api import floats, int32s, int64s, pointers
from ostinato.runner.native.library import library
from ostinato.runner.native.packed import required_library

_DTYPES = {torch.float32: 0, torch.bfloat16: 1}


class _Part(ctypes.Structure):
    """``ost_lora_part``: one linear layer's update."""

    _fields_ = (
        *pointers("down", "up"),
        *int64s("first_output"),
        *int32s("num_outputs", "rank", "first_own", "num_own"),
        *floats("scale"),
    )

    @classmethod
    def of(cls, layer: LoraLayer | PackedLoraLayer, first_output: int = 0) -> "_Part":
        """Describe an update, which the caller keeps alive."""
        assert isinstance(layer, PackedLoraLayer), "the library reads packed factors"
        down, up = layer.down, layer.up
        assert down.num_rows == up.num_columns, "one rank"
        own = layer.first_own, layer.num_own, layer.scale
        return cls(down.address, up.address, first_output, up.num_rows, down.num_rows, *own)


class _Layer(ctypes.Structure):
    """``ost_lora_layer``: an adapter's updates of one product."""

    _fields_ = (*pointers("parts"), *int64s("num_parts"))


class UpdateList:
    """An adapter's updates of some products, each with a part for every linear layer it joins.

    Attributes:
        address: Address of the first ``ost_lora_layer``.
    """

    def __init__(self, products: Sequence[Sequence[_Part]]) -> None:
        """Describe the updates; the caller keeps the adapter alive."""
        self._parts = [(_Part * len(parts))(*parts) for parts in products]
        layers = [_Layer(ctypes.addressof(parts), len(parts)) for parts in self._parts]
        self._layers = (_Layer * len(layers))(*layers)
        self.address = ctypes.addressof(self._layers)


class _Group(ctypes.Structure):
    """``ost_lora_group``: rows of one adapter."""

    _fields_ = (*pointers("rows"), *int64s("num_rows"), *pointers("layers"))


class Groups(ctypes.Structure):
    """``ost_lora_step``: the rows of a step that adapters compute."""

    _fields_ = (*pointers("groups"), *int64s("num_groups"))

    @classmethod
    def of(cls, groups: Sequence[tuple[Ints, UpdateList]]) -> "Groups":
        """Return the rows and updates of some adapters."""
        step = cls()
        step.take(groups)
        return step

    def take(self, groups: Sequence[tuple[Ints, UpdateList]]) -> None:
        """Set the rows and updates of a step's adapters, and keep them alive."""
        records = [_Group(rows.ctypes.data, len(rows), updates.address) for rows, updates in groups]
        self.kept = (_Group * len(records))(*records), groups
        self.groups, self.num_groups = ctypes.addressof(self.kept[0]), len(records)


class LoraProduct(ctypes.Structure):
    """``ost_lora``: add the updates of one product."""

    _fields_ = (
        *pointers("inputs"),
        *int64s("input_stride"),
        *pointers("outputs"),
        *int64s("output_stride"),
        *pointers("step"),
        *int64s("layer", "first_row", "num_rows"),
        *int32s("num_inputs", "dtype", "num_threads"),
    )

    @classmethod
    def of(cls, inputs: Tensor, outputs: Tensor, step: Groups, layer: int = 0) -> "LoraProduct":
        """Check and describe.

        Args:
            inputs: What the product reads, shape (num_rows, num_inputs).
            outputs: What it wrote, shape (num_rows, num_outputs).
            step: Rows of adapters; the caller keeps them alive.
            layer: Which product of the model.
        """
        for tensor in (inputs, outputs):
            assert tensor.dtype == inputs.dtype and tensor.stride(1) == 1, "contiguous rows"
            assert tensor.device.type == "cpu" and len(tensor) == len(inputs), tensor.shape
        return cls(
            inputs.data_ptr(),
            inputs.stride(0),
            outputs.data_ptr(),
            outputs.stride(0),
            ctypes.addressof(step),
            layer,
            0,
            len(inputs),
            inputs.shape[1],
            _DTYPES[inputs.dtype],
            torch.get_num_threads(),
        )


Joined = Sequence[tuple[str, int]]
"""The linear layers that a product joins: name and first output."""


class AdapterUpdates:
    """The updates of the products of one decoder, described once per adapter.

    Attributes:
        places: The first product of each part, by the part's id.
    """

    def __init__(self, parts: Iterable[tuple[object, Sequence[Joined]]]) -> None:
        """Take the products of each part, which the caller keeps alive."""
        self.places: dict[int, int] = {}
        self._products: list[Joined] = []
        for part, products in parts:
            self.places[id(part)] = len(self._products)
            self._products += products
        self._known: WeakKeyDictionary[LoraAdapter, UpdateList] = WeakKeyDictionary()

    def groups_of(self, adapters: StepAdapters) -> list[tuple[Ints, UpdateList]]:
        """Return the rows and the updates of each adapter of a step."""
        rows = adapters.rows_of_each()
        return [(rows[adapter], self._updates(adapter)) for adapter in rows]

    def _updates(self, adapter: LoraAdapter) -> UpdateList:
        if adapter not in self._known:
            layers = adapter.layers
            self._known[adapter] = UpdateList(
                [
                    [_Part.of(layers[name], first) for name, first in joined if name in layers]
                    for joined in self._products
                ]
            )
        return self._known[adapter]


def can_pack(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the native library computes the updates of a model."""
    return library() is not None and device.type == "cpu" and dtype in _DTYPES


def add_updates(name: str, inputs: Tensor, outputs: Tensor, adapters: StepAdapters) -> None:
    """Add the updates of one linear layer to its outputs, in place.

    Args:
        name: Name of the layer.
        inputs: Shape (num_tokens, in_features).
        outputs: Shape (num_tokens, out_features).
        adapters: Adapters of the step.
    """
    groups: list[tuple[Ints, UpdateList]] = []
    for adapter, rows in adapters.rows_of_each().items():
        layer = adapter.layers.get(name)
        if isinstance(layer, LoraLayer):
            layer.add(inputs, outputs, torch.from_numpy(rows).to(inputs.device))
        elif layer is not None:
            groups.append((rows, UpdateList([[_Part.of(layer)]])))
    if groups:
        add_product(inputs, outputs, Groups.of(groups), 0)


def add_product(inputs: Tensor, outputs: Tensor, step: Groups, layer: int) -> None:
    """Add the updates of one product of a step; see ``LoraProduct``."""
    required_library().ost_ops_lora(ctypes.byref(LoraProduct.of(inputs, outputs, step, layer)))
