"""The fused forward of a device: a decoder as products by torch or in tiles, and kernels between.

One product gives queries, keys and values, and one gates and ups. Each thing between two products
is one kernel::

    stream ─► + addend, norm ─► project ─► norm and turn heads ─► attend ─► combine ─► addend
    stream ─► + addend, norm ─► gate, up ─► activation(gate) * up ─► down ─► addend

Experts, and whatever ``forward.structure`` knows no operation for, are called as modules. A step
with adapters, images or readouts is computed by the modules of ``transformers``, whose weights
these are.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ostinato.runner.attention.registration import LayerAttention
from ostinato.runner.forward.decoder import (
    Attention,
    Decoder,
    FeedForward,
    Mixture,
    ModuleCall,
    Part,
    Projection,
    ResidualBranch,
    sum_of,
)
from ostinato.runner.forward.embedding_and_rope import AngleKind
from ostinato.runner.forward.ops import HeadShape, Norm, RopeKind
from ostinato.runner.forward.stand_ins import call_keywords
from ostinato.runner.gpu.attention_step import padded
from ostinato.runner.gpu.device_weights import fused_kernels
from ostinato.runner.inputs import Ints
from ostinato.runner.model_call import ModelCall

if TYPE_CHECKING:
    from transformers import PreTrainedModel

GATE_TILE = 1024
"""Numbers that one program activates."""


class DeviceForward:
    """Computes the steps of a decoder; called like a ``ModelCall``.

    Attributes:
        decoder: What is computed.
        promises_bits: Whether a row has the same bits alone and in any step.
    """

    def __init__(self, decoder: Decoder, call: ModelCall, same_bits: bool) -> None:
        """Take a decoder whose weights are on the device; ``call`` calls its modules."""
        self.decoder, self._call = decoder, call
        self.promises_bits = same_bits and not self.called

    @property
    def called(self) -> str:
        """What is called as a module, and why; empty if nothing is."""
        reasons = [str(call) for call in self.decoder.calls]
        reasons += [
            f"{part.experts} is called (experts)"
            for part in self.decoder.parts()
            if isinstance(part, Mixture)
        ]
        return ", ".join(dict.fromkeys(reasons))

    def __call__(
        self,
        input_ids: Ints | Tensor,
        position_ids: Ints | Tensor | None,
        step: LayerAttention | None,
        rows: Ints | Tensor | None = None,
        *others: Any,
        **keywords: Any,
    ) -> Tensor:
        """Return logits, shape (num_rows, vocab_size); arguments as in ``ModelCall``."""
        given = (*others, *keywords.values())
        is_plain = all(each is None for each in given) and position_ids is not None
        if step is None or position_ids is None or position_ids.ndim > 1 or not is_plain:
            return self._call(input_ids, position_ids, step, rows, *others, **keywords)
        with self._call.during(step, None):
            ids, positions = self._call.tensor(input_ids), self._call.tensor(position_ids)
            return self._logits(
                _Pass(self.decoder, ids, positions, step),
                None if rows is None else self._call.tensor(rows),
            )

    def _logits(self, own: "_Pass", rows: Tensor | None) -> Tensor:
        decoder = self.decoder
        for layer in decoder.layers:
            inputs: list[Tensor] = []
            if layer.is_parallel:
                inputs = [own.normed(branch.norm) for branch in layer.branches]
                if any(each is own.stream for each in inputs):
                    own.stream = own.stream.clone()  # what is read stays as it was
            for index, branch in enumerate(layer.branches):
                read = inputs[index] if inputs else own.normed(branch.norm)
                own.add(own.part(layer.index, branch.part, read), branch)
                if inputs:
                    own.normed(None)
        if rows is not None:
            own.take(rows)
        logits = multiply(decoder.head, own.normed(decoder.norm))
        return logits if decoder.edit_logits is None else decoder.edit_logits(logits)


class _Pass:
    """One pass of a step through a decoder.

    Attributes:
        stream: The residual stream, without the last addend, shape (num_tokens, width).
    """

    def __init__(
        self, decoder: Decoder, ids: Tensor, positions: Tensor, step: LayerAttention
    ) -> None:
        self._rotary, self._positions, self._step = decoder.rotary, positions, step
        embedded = decoder.embedding(ids)
        scale = decoder.embedding_scale
        self.stream = embedded if scale == 1.0 else embedded * scale
        self._addend: Tensor | None = None
        self._scale = 1.0
        self._angles: dict[str | None, tuple[Tensor, Tensor]] = {}

    def add(self, addend: Tensor, branch: ResidualBranch) -> None:
        """Note what a branch adds to the stream."""
        if branch.norm_after is not None:
            addend = add_norm(addend, None, 1.0, branch.norm_after)
        self._addend, self._scale = addend, branch.scale

    def normed(self, norm: Norm | None) -> Tensor:
        """Add the last addend to the stream; return its rows, normed."""
        addend, self._addend = self._addend, None
        return add_norm(self.stream, addend, self._scale, norm)

    def take(self, rows: Tensor) -> None:
        """Go on with some rows alone."""
        self.stream = self.stream.index_select(0, rows)
        if self._addend is not None:
            self._addend = self._addend.index_select(0, rows)

    def part(self, index: int, part: Part, rows: Tensor) -> Tensor:
        """Return what a part of a layer makes of rows."""
        if isinstance(part, Attention):
            queries, keys, values = self._heads(part, multiply(part.project, rows))
            attended = self._step.attend(index, queries, keys, values, part.style)
            return multiply(part.combine, attended.flatten(1))
        if isinstance(part, FeedForward):
            return multiply(part.down, activated(part, multiply(part.gate_up, rows)))
        if isinstance(part, Mixture):
            return sum_of([each for each in (part.block, part.beside) if each is not None], rows)
        assert isinstance(part, ModuleCall), "no operation of a CPU alone"
        return sum_of(part.modules, rows, partial(self._keywords, part))

    def _keywords(self, part: ModuleCall, module: nn.Module) -> dict[str, Any]:
        if not part.mixes:
            return {}
        angles = None if part.angles is None else self._angles_of(part.angles)
        return call_keywords(module, self._step, angles, self._positions[None])

    def _angles_of(self, kind: AngleKind) -> tuple[Tensor, Tensor]:
        """Return cosines and sines as the model's module gives them, shape (1, num_tokens, dim)."""
        if kind.layer_type not in self._angles:
            assert self._rotary is not None, "angles have a module"
            further = () if kind.layer_type is None else (kind.layer_type,)
            self._angles[kind.layer_type] = self._rotary(
                self.stream, self._positions[None], *further
            )
        return self._angles[kind.layer_type]

    def _heads(self, part: Attention, projected: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values of projected rows, shape (num_tokens, heads, dim)."""
        shape = part.shape
        query_stride, stride, first_key, first_value = shape.places()
        angles = None
        if part.angles is not None:
            numbers = (each[0] for each in self._angles_of(part.angles))
            cosines, sines = (part.angles.layout.of_pairs(each) for each in numbers)
            angles = cosines, sines
        groups = (
            (shape.num_heads, query_stride, 0, shape.query_norm),
            (shape.num_kv_heads, stride, first_key, shape.key_norm),
        )
        queries, keys = (turned(projected, *group, shape, angles) for group in groups)
        values = _view(projected, shape.num_kv_heads, stride, first_value, shape.dim)
        return queries, keys, values


def norm_warps(width: int) -> int:
    """Return the warps of a program that norms a row: at most 32 numbers a thread."""
    return min(16, max(4, padded(width) // 1024))


def head_warps(dim: int) -> int:
    """Return the warps of a program that turns a head."""
    return 1 if dim <= 128 else 2


def multiply(projection: Projection, rows: Tensor) -> Tensor:
    """Return a projection's product of rows, biases added."""
    return projection.weight.multiply(rows, projection.bias())


def add_norm(stream: Tensor, addend: Tensor | None, scale: float, norm: Norm | None) -> Tensor:
    """Add to a stream in place, and return its rows, normed.

    Args:
        stream: Shape (num_rows, width), rows contiguous.
        addend: Likewise; None adds nothing.
        scale: Factor on the addend.
        norm: None returns the stream itself.
    """
    if (addend is None and norm is None) or not len(stream):
        return stream
    width = stream.shape[1]
    output = (
        stream if norm is None else torch.empty_like(stream, memory_format=torch.contiguous_format)
    )
    with torch.cuda.device_of(stream):
        fused_kernels().add_norm[(len(stream),)](
            stream, stream if addend is None else addend, scale, output, *_numbers(norm, stream),
            width, stream.stride(0), 0 if addend is None else addend.stride(0), output.stride(0),
            PAD=padded(width), HAS_ADDEND=addend is not None, HAS_NORM=norm is not None,
            HAS_SCALE=scale != 1.0, num_warps=norm_warps(width), **_norm_options(norm),
        )  # fmt: skip
    return output


def turned(
    projected: Tensor,
    num_heads: int,
    stride: int,
    first: int,
    norm: Norm | None,
    shape: HeadShape,
    angles: tuple[Tensor, Tensor] | None,
) -> Tensor:
    """Return heads of projected rows, normed and turned, shape (num_rows, num_heads, dim)."""
    dim = shape.dim
    if norm is not None and shape.is_norm_of_all:
        rows = projected[:, first : first + num_heads * dim]
        projected, first, norm = add_norm(rows, None, 1.0, norm), 0, None
    if (norm is None and angles is None) or not len(projected):
        return _view(projected, num_heads, stride, first, dim)
    output = projected.new_empty(len(projected), num_heads, dim)
    cosines, sines = angles or (output, output)
    is_by_head = norm is not None and norm.weight is not None and norm.weight.ndim > 1
    with torch.cuda.device_of(projected):
        fused_kernels().turn_heads[(len(projected), num_heads)](
            projected, cosines, sines, output, *_numbers(norm, projected),
            projected.stride(0), stride, first,
            0 if len(cosines) == 1 else cosines.stride(0), cosines.stride(-1),
            NUM_HEADS=num_heads, DIM=dim, PAD=padded(dim),
            ROPE_DIM=0 if angles is None else shape.rope.dim,
            IS_HALVES=shape.rope.kind == RopeKind.HALVES, ARE_ROUNDED=shape.rope.are_rounded,
            HAS_NORM=norm is not None, IS_NORM_LAST=shape.is_norm_last, IS_BY_HEAD=is_by_head,
            num_warps=head_warps(dim), **_norm_options(norm),
        )  # fmt: skip
    return output


def _view(projected: Tensor, num_heads: int, stride: int, first: int, dim: int) -> Tensor:
    """View heads in projected rows, shape (num_rows, num_heads, dim)."""
    sizes, strides = (len(projected), num_heads, dim), (projected.stride(0), stride, 1)
    return projected.as_strided(sizes, strides, projected.storage_offset() + first)


def activated(part: FeedForward, projected: Tensor) -> Tensor:
    """Return activation(gate) * up, shape (num_rows, width)."""
    width = projected.shape[1] // (1 + part.has_up)
    output = projected.new_empty(len(projected), width)
    if len(projected):
        with torch.cuda.device_of(projected):
            fused_kernels().activate[(len(projected), -(-width // GATE_TILE))](
                projected, output, width, projected.stride(0), output.stride(0),
                KIND=int(part.activation), HAS_UP=part.has_up, TILE=GATE_TILE,
            )  # fmt: skip
    return output


def _numbers(norm: Norm | None, like: Tensor) -> tuple[Tensor, Tensor, float, float]:
    """Return weight, bias, epsilon and offset; tensors that are not read where there are none."""
    if norm is None:
        return like, like, 0.0, 0.0
    weight, bias = (like if part is None else part for part in (norm.weight, norm.bias))
    return weight, bias, norm.epsilon, norm.offset


def _norm_options(norm: Norm | None) -> dict[str, bool]:
    return {
        "HAS_WEIGHT": norm is not None and norm.weight is not None,
        "HAS_BIAS": norm is not None and norm.bias is not None,
        "IS_CENTERED": norm is not None and norm.is_centered,
        "IS_ROUNDED": norm is not None and norm.is_rounded,
    }


@contextmanager
def buffers_on_cpu(model: "PreTrainedModel") -> Iterator[None]:
    """Keep a model's buffers, such as frequencies, on the CPU while it is described there."""
    kept = [
        (module, name, buffer)
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]
    for module, name, buffer in kept:
        module._buffers[name] = buffer.cpu()
    try:
        yield
    finally:
        for module, name, buffer in kept:
            module._buffers[name] = buffer
