"""Adds the low-rank updates of adapters to the outputs of linear layers.

In float32 and bfloat16 on a CPU by the native library, whose sums of a row do not depend on the
rows beside it (``native/include/ostinato_ops.h`` is the other side); elsewhere in torch.
"""

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from ostinato.runner.inputs import Ints
from ostinato.runner.lora import LoraLayer, PackedLoraLayer, StepAdapters
from ostinato.runner.native.checks import address_of
from ostinato.runner.native.library import library

_DTYPES = {torch.float32: 0, torch.bfloat16: 1}


class Part(ctypes.Structure):
    """``ost_lora_part``: one linear layer's update."""

    _fields_ = (
        ("down", ctypes.c_void_p),
        ("up", ctypes.c_void_p),
        ("first_output", ctypes.c_int64),
        ("num_outputs", ctypes.c_int32),
        ("rank", ctypes.c_int32),
        ("scale", ctypes.c_float),
    )

    @classmethod
    def of(cls, layer: LoraLayer | PackedLoraLayer, first_output: int = 0) -> "Part":
        """Describe an update, which the caller keeps alive."""
        assert isinstance(layer, PackedLoraLayer), "the library reads packed factors"
        down, up = layer.down, layer.up
        assert down.num_rows == up.num_columns, "one rank"
        return cls(down.address, up.address, first_output, up.num_rows, down.num_rows, layer.scale)


class _Layer(ctypes.Structure):
    """``ost_lora_layer``: an adapter's updates of one product."""

    _fields_ = (("parts", ctypes.c_void_p), ("num_parts", ctypes.c_int64))


class UpdateList:
    """An adapter's updates of some products, each with a part for every linear layer it joins.

    Attributes:
        address: Address of the first ``ost_lora_layer``.
    """

    def __init__(self, products: Sequence[Sequence[Part]]) -> None:
        """Lay them down; the caller keeps the adapter alive."""
        self._parts = [(Part * len(parts))(*parts) for parts in products]
        layers = [_Layer(ctypes.addressof(parts), len(parts)) for parts in self._parts]
        self._layers = (_Layer * len(layers))(*layers)
        self.address = ctypes.addressof(self._layers)


class _Group(ctypes.Structure):
    """``ost_lora_group``: rows of one adapter."""

    _fields_ = (
        ("rows", ctypes.c_void_p),
        ("num_rows", ctypes.c_int64),
        ("layers", ctypes.c_void_p),
    )


class Groups(ctypes.Structure):
    """``ost_lora_step``: the rows of a step that adapters compute."""

    _fields_ = (("groups", ctypes.c_void_p), ("num_groups", ctypes.c_int64))

    def take(self, groups: Sequence[tuple[Ints, UpdateList]]) -> None:
        """Take over the rows of a step's adapters and their updates, and keep them alive."""
        found = [_Group(address_of(rows), len(rows), updates.address) for rows, updates in groups]
        self.kept = (_Group * len(found))(*found), groups
        self.groups, self.num_groups = ctypes.addressof(self.kept[0]), len(found)


class LoraProduct(ctypes.Structure):
    """``ost_lora``: add the updates of one product."""

    _fields_ = (
        ("inputs", ctypes.c_void_p),
        ("input_stride", ctypes.c_int64),
        ("outputs", ctypes.c_void_p),
        ("output_stride", ctypes.c_int64),
        ("step", ctypes.c_void_p),
        ("layer", ctypes.c_int64),
        ("first_row", ctypes.c_int64),
        ("num_rows", ctypes.c_int64),
        ("num_inputs", ctypes.c_int32),
        ("dtype", ctypes.c_int32),
        ("num_threads", ctypes.c_int32),
    )

    @classmethod
    def of(
        cls, inputs: Tensor, outputs: Tensor, step: Groups, layer: int = 0, first_row: int = 0
    ) -> "LoraProduct":
        """Check and describe.

        Args:
            inputs: What the product reads, shape (num_rows, num_inputs).
            outputs: What it wrote, shape (num_rows, num_outputs).
            step: Rows of adapters; the caller keeps them alive.
            layer: Which product of the model.
            first_row: Row of the step at which the tensors begin.
        """
        for tensor in (inputs, outputs):
            assert tensor.dtype == inputs.dtype and tensor.stride(1) == 1, "rows side by side"
            assert tensor.device.type == "cpu" and len(tensor) == len(inputs), tensor.shape
        return cls(
            inputs.data_ptr(),
            inputs.stride(0),
            outputs.data_ptr(),
            outputs.stride(0),
            ctypes.addressof(step),
            layer,
            first_row,
            len(inputs),
            inputs.shape[1],
            _DTYPES[inputs.dtype],
            torch.get_num_threads(),
        )


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
            groups.append((rows, UpdateList([[Part.of(layer)]])))
    native = library()
    if groups and native is not None:
        step = Groups()
        step.take(groups)
        native.ost_ops_lora(ctypes.byref(LoraProduct.of(inputs, outputs, step)))
