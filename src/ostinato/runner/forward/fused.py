"""Computes a step with as few passes over memory as possible.

The results are those of the modules of ``transformers``, rounded at the same places, but one
product computes queries, keys and values, one computes gate and up, and the operations between two
products are one pass. Long steps are computed in chunks, so that the output of a product is still
in the processor's cache when the next one reads it; attention sees all rows at once::

    chunk   norm, project, RoPE │ attend │ combine, add + norm, gate_up, gate, down, add + norm,
            ───── layer 0 ───── │        │ ─────────────────── layer 0 ───────────────────────
                                │        │ project, RoPE │ attend │ ...
                                │        │ ── layer 1 ── │

After the last attention, only rows whose logits are wanted are computed.

Where the library reads every layer's keys and values, all of it is one call, see ``steps``. The
code here is for attention in torch, and for layers whose scores programs do not support.
"""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from ostinato.runner.adapters.lora import StepAdapters
from ostinato.runner.adapters.lora_updates import add_updates
from ostinato.runner.attention.registration import LayerAttention
from ostinato.runner.forward.decoder import Decoder, DecoderLayer, Projection
from ostinato.runner.forward.embedding_and_rope import Angles, Lookup, look_up_embeddings
from ostinato.runner.forward.ops import Heads, NativeOps, RopeAngles
from ostinato.runner.forward.steps import Steps
from ostinato.runner.heads import HiddenRows
from ostinato.runner.inputs import Ints
from ostinato.runner.malloc_tuning import LARGEST_KEPT_BYTES

_PRODUCT_BYTES = LARGEST_KEPT_BYTES * 7 // 8
"""Maximum bytes of one product: larger ones would cause page faults each time."""

MOST_ROWS = 512
"""Maximum rows of a product, so that its output stays in the processor's cache."""


class Workspace:
    """Named buffers of rows; each grows to the largest step and is reused by the next.

    If they were freed after each step, the kernel would zero every page again, see
    ``malloc_tuning``.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        """Start empty."""
        self._dtype = dtype
        self._buffers: dict[str, Tensor] = {}

    def rows(self, name: str, num_rows: int, width: int) -> Tensor:
        """Return an uninitialized buffer, shape (num_rows, width); a name has one width."""
        buffer = self._buffers.get(name)
        if buffer is None or buffer.shape[0] < num_rows:
            buffer = torch.zeros(num_rows, width, dtype=self._dtype)
            self._buffers[name] = buffer
        return buffer[:num_rows]


class FusedForward:
    """Computes the steps of a decoder; called like a ``ModelCall``, one step at a time."""

    def __init__(self, decoder: Decoder, ops: NativeOps) -> None:
        """Wrap a decoder with packed weights."""
        self._decoder = decoder
        self._ops = ops
        self._angles = Angles(decoder.rotary, decoder.layers[0].input_norm.weight)
        self._steps = Steps(decoder, ops.library)
        self._workspace = Workspace(decoder.head.weight.dtype)
        self._chunk_rows = _chunk_rows(decoder)

    def __call__(
        self,
        input_ids: Ints,
        position_ids: Ints | None,
        step: LayerAttention | None,
        rows: Ints | None = None,
        adapters: StepAdapters | None = None,
        vectors: Tensor | None = None,
        *,
        hidden: HiddenRows | None = None,
    ) -> Tensor:
        """Return logits, shape (num_rows, vocab_size); arguments as in ``ModelCall``."""
        assert position_ids is not None and step is not None, "a step of ours"
        decoder = self._decoder
        if vectors is None:
            given = look_up_embeddings(decoder.embedding, input_ids)
        else:
            given = Lookup.whole(vectors)
        looked_up = self._angles.of(position_ids)
        found = self._steps.run(given, looked_up, step, rows, adapters, hidden)
        if found is not None:
            return found
        stream = given.rows()  # (num_tokens, width): the residual stream, added to in place
        angles = RopeAngles(*looked_up.rows().chunk(2, dim=1))
        normed = self._workspace.rows("normed", *stream.shape)
        for first, last in self._chunks(len(stream)):
            into = normed[first:last]
            self._ops.add_norm(stream[first:last], None, decoder.layers[0].input_norm, into)
        for index in range(len(decoder.layers)):
            attended = self._attend(index, normed, angles, step, adapters)
            if rows is not None and index == len(decoder.layers) - 1:
                stream, attended = stream[rows], attended[rows]
                adapters = None if adapters is None else adapters.of_rows(rows)
            for first, last in self._chunks(len(stream)):
                self._feed_forward(index, attended[first:last], stream, normed, first, adapters)
        if hidden is not None:
            hidden.rows = normed[: len(stream)].clone()
        return self._logits(normed, len(stream))

    def _attend(
        self,
        index: int,
        normed: Tensor,
        angles: RopeAngles,
        step: LayerAttention,
        adapters: StepAdapters | None,
    ) -> Tensor:
        """Project the normed rows and attend; (num_tokens, num_heads * dim)."""
        layer, num_tokens = self._decoder.layers[index], len(angles.cosines)
        shape = layer.shape
        heads = self._heads(layer, num_tokens)
        for first, last in self._chunks(num_tokens):
            projected = self._product(index, "project", normed[first:last], first, adapters)
            part = heads.rows(first, last)
            self._ops.heads(projected, shape, angles.rows(first, last), part)
        attended = step.attend(
            index,
            heads.queries.view(num_tokens, shape.num_heads, shape.dim),
            heads.keys.view(num_tokens, shape.num_kv_heads, shape.dim),
            heads.values.view(num_tokens, shape.num_kv_heads, shape.dim),
            layer.style,
        )
        return attended.reshape(num_tokens, -1)

    def _feed_forward(
        self,
        index: int,
        attended: Tensor,
        stream: Tensor,
        normed: Tensor,
        first: int,
        adapters: StepAdapters | None,
    ) -> None:
        """Compute some rows from attention to the norm of the next layer."""
        layer = self._decoder.layers[index]
        last = first + len(attended)
        stream, into = stream[first:last], normed[first:last]
        combined = self._product(index, "combine", attended, first, adapters)
        self._ops.add_norm(stream, combined, layer.output_norm, into)
        gate_up = self._product(index, "gate_up", into, first, adapters)
        gated = self._workspace.rows("gated", len(gate_up), gate_up.shape[1] // 2)
        self._ops.gated(gate_up, gated)
        down = self._product(index, "down", gated, first, adapters)
        self._ops.add_norm(stream, down, self._decoder.norm_after(index), into)

    def _product(
        self, index: int, name: str, rows: Tensor, first: int, adapters: StepAdapters | None
    ) -> Tensor:
        """Multiply some rows, from row ``first`` of the step on, and add the adapters' updates."""
        layer = self._decoder.layers[index]
        product = _multiply(getattr(layer, name), rows)
        if adapters is not None:
            step = adapters.of_rows(np.arange(first, first + len(rows)))
            for module, column in layer.joined(name):
                add_updates(module, rows, product[:, column:], step)
        return product

    def _chunks(self, num_rows: int) -> Iterator[tuple[int, int]]:
        """Cut rows into chunks; yields first and last + 1."""
        for first in range(0, num_rows, self._chunk_rows):
            yield first, min(first + self._chunk_rows, num_rows)

    def _heads(self, layer: DecoderLayer, num_tokens: int) -> Heads:
        """Return buffers for the heads of a step; layers of one shape share them."""
        shape, rows = layer.shape, self._workspace.rows
        width, kv_width = shape.num_heads * shape.dim, shape.num_kv_heads * shape.dim
        return Heads(
            rows(f"queries {width}", num_tokens, width),
            rows(f"keys {kv_width}", num_tokens, kv_width),
            rows(f"values {kv_width}", num_tokens, kv_width),
        )

    def _logits(self, normed: Tensor, num_rows: int) -> Tensor:
        head = self._decoder.head
        parts = [_multiply(head, normed[first:last]) for first, last in self._chunks(num_rows)]
        if not parts:
            return head.weight.multiply(normed[:0])
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def _chunk_rows(decoder: Decoder) -> int:
    """Return the number of rows of a chunk."""
    layers = decoder.layers
    widest = max(
        max(layer.gate_up.weight.num_rows, layer.project.weight.num_rows) for layer in layers
    )
    fitting = _PRODUCT_BYTES // (widest * decoder.head.weight.dtype.itemsize)
    return max(1, min(MOST_ROWS, fitting))


def _multiply(projection: Projection, rows: Tensor) -> Tensor:
    return projection.weight.multiply(rows, projection.bias())
