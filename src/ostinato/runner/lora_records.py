"""Adds the low-rank updates of adapters to the outputs of linear layers.

In float32 and bfloat16 on a CPU by the native library, whose sums of a row do not depend on the
rows beside it (``native/include/ostinato_ops.h`` is the other side); elsewhere in torch.
"""

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from ostinato.runner.lora import LoraLayer, StepAdapters
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
    def of(cls, layer: LoraLayer, first_output: int = 0) -> "Part":
        """Describe an update, which the caller keeps alive."""
        rank, num_outputs = layer.up.shape
        assert layer.down.is_contiguous() and layer.up.is_contiguous(), "plain matrices"
        down, up = layer.down.data_ptr(), layer.up.data_ptr()
        return cls(down, up, first_output, num_outputs, rank, layer.scale)


class Layer(ctypes.Structure):
    """``ost_lora_layer``: an adapter's updates of one product."""

    _fields_ = (("parts", ctypes.c_void_p), ("num_parts", ctypes.c_int64))


class Segment(ctypes.Structure):
    """``ost_lora_segment``: rows of one adapter."""

    _fields_ = (
        ("first_row", ctypes.c_int64),
        ("end_row", ctypes.c_int64),
        ("layers", ctypes.c_void_p),
    )


class Segments(ctypes.Structure):
    """``ost_lora_step``: the rows of a step that adapters compute."""

    _fields_ = (("segments", ctypes.c_void_p), ("num_segments", ctypes.c_int64))

    def take(self, segments: Sequence[Segment]) -> None:
        """Take over a step's segments, and keep them alive."""
        self.kept = (Segment * len(segments))(*segments)
        self.segments, self.num_segments = ctypes.addressof(self.kept), len(segments)


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
        cls, inputs: Tensor, outputs: Tensor, step: Segments, layer: int = 0, first_row: int = 0
    ) -> "LoraProduct":
        """Check and describe.

        Args:
            inputs: What the product reads, shape (num_rows, num_inputs).
            outputs: What it wrote, shape (num_rows, num_outputs).
            step: Segments; the caller keeps them, and what they point to, alive.
            layer: Which product of the model.
            first_row: Of the step, that the tensors begin with.
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


def add_updates(name: str, inputs: Tensor, outputs: Tensor, adapters: StepAdapters) -> None:
    """Add the updates of one linear layer to its outputs, in place.

    Args:
        name: Of the layer.
        inputs: Shape (num_tokens, in_features).
        outputs: Shape (num_tokens, out_features).
        adapters: Of the step.
    """
    found = [(segment, segment.adapter.layers.get(name)) for segment in adapters.segments]
    updates = [(segment, layer) for segment, layer in found if layer is not None]
    native = library()
    if native is None or inputs.device.type != "cpu" or inputs.dtype not in _DTYPES:
        for segment, layer in updates:
            layer.add(inputs[segment.first : segment.end], outputs[segment.first : segment.end])
        return
    parts = [Part.of(layer) for _, layer in updates]
    layers = [Layer(ctypes.addressof(part), 1) for part in parts]
    step = Segments()
    step.take(
        [
            Segment(segment.first, segment.end, ctypes.addressof(layer))
            for (segment, _), layer in zip(updates, layers, strict=True)
        ]
    )
    native.ost_ops_lora(ctypes.byref(LoraProduct.of(inputs, outputs, step)))
