"""Computes a step with images.

It differs from other steps in three ways:

* rows of placeholders get the encoder's vectors in place of their embeddings;
* if a model gives an image's tokens a row and a column, an image takes as many positions as its
  longer side, and the positions after it are shifted (Qwen2-VL, arXiv 2409.12191)::

      tokens      a  b  [image of 2 x 3]  c  d
      time        0  1  2 2 2 2 2 2       5  6
      row         0  1  2 2 2 3 3 3       5  6
      column      0  1  2 3 4 2 3 4       5  6

* if an image's tokens see each other (Gemma), their rows attend a second time, to all keys of the
  image. A chunk may end within an image; the rest of the image is then computed ahead in the same
  step, and its keys and values are kept for this step only::

      computed before │ this chunk            │ ahead
      a b c [i i      │ i i                   │ i i ] d
                        └─ see i i i i i i ─┘

  So chunks and hits may end anywhere, at the cost of the rest of one image per chunk.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ostinato.core.identity import ImageSpan
from ostinato.core.plan import ScheduledSequence, StepPlan
from ostinato.errors import UnsupportedModel
from ostinato.runner.adapters.lora import AdapterSegment, LoraAdapter, StepAdapters
from ostinato.runner.attention.backend import AttentionStyle
from ostinato.runner.attention.registration import LayerAttention
from ostinato.runner.images.store import ImageStore
from ostinato.runner.inputs import Ints, StepInputs
from ostinato.runner.kv.kv_store import KVStore
from ostinato.runner.kv.layer_groups import LayerGroups


@dataclass(frozen=True, slots=True)
class ImageRows:
    """The rows of a step that belong to one image.

    Attributes:
        span: Its place in the sequence.
        sequence: Its sequence.
        first: Position of its first token in the step.
        last: Position after its last token in the step.
        row: Row of its first token in the step.
        ahead: Row of the token at ``last``, if the rest is computed ahead; else -1.
    """

    span: ImageSpan
    sequence: ScheduledSequence
    first: int
    last: int
    row: int
    ahead: int

    @property
    def num_ahead(self) -> int:
        """Tokens of the image that the step computes ahead."""
        return 0 if self.ahead < 0 else self.span.end - self.last

    def rows(self) -> Tensor:
        """Return its rows in the step, in the order of their positions."""
        here = torch.arange(self.row, self.row + self.last - self.first)
        return torch.cat((here, torch.arange(self.ahead, self.ahead + self.num_ahead)))


@dataclass(frozen=True, slots=True)
class ImageStep:
    """The inputs of a model for a step with images.

    Attributes:
        vectors: Input of the first layer, shape (num_rows, width); None if it is the ids.
        later: Added to the output of each of the first layers, shape (num_later, num_rows, width);
            None adds nothing.
        positions: Shape (num_rows,) or (3, num_rows), int64.
        images: Rows of images.
        only_in_windows: Whether tokens of an image see later tokens of it only in layers with a
            sliding window.
    """

    vectors: Tensor | None
    later: Tensor | None
    positions: Ints
    images: tuple[ImageRows, ...]
    only_in_windows: bool = False


def lay_out(plan: StepPlan, inputs: StepInputs, store: ImageStore) -> ImageStep:
    """Return the inputs of a step with images; may run the encoder."""
    vision = store.vision
    images = _image_rows(plan, inputs, vision.sees_ahead)
    positions, ids = inputs.position_ids, inputs.input_ids
    if vision.family.has_grid_positions:
        shifted = [_grid_positions(sequence, store) for sequence in plan.sequences]
        positions = np.concatenate(shifted, axis=1)
    if not images:
        return ImageStep(None, None, positions[0] if positions.ndim == 2 else positions, ())
    for image in images:
        ahead = np.arange(image.last, image.last + image.num_ahead)
        positions = np.concatenate((positions, ahead), axis=-1) if len(ahead) else positions
        ids = np.concatenate((ids, np.full(len(ahead), vision.placeholder_id)))
    vectors = vision.embed(torch.from_numpy(ids).to(inputs.groups[0].device))
    later = None
    for image in images:
        image_vectors = store.vectors(image.span.digest)[image.first - image.span.start :]
        rows = image.rows().to(vectors.device)
        first, *others = image_vectors[: len(rows)].split(vectors.shape[1], dim=1)
        vectors[rows] = first
        if others:
            later = vectors.new_zeros(len(others), *vectors.shape) if later is None else later
            later[:, rows] = torch.stack(others)
    return ImageStep(vectors, later, positions, images, vision.family.only_in_windows)


def adapted_ahead(
    adapters: StepAdapters | None,
    images: tuple[ImageRows, ...],
    loaded: Mapping[bytes, LoraAdapter],
) -> StepAdapters | None:
    """Return a step's adapters, with those of the rows that are computed ahead."""
    ahead = tuple(
        AdapterSegment(image.ahead, image.ahead + image.num_ahead, loaded[identity.adapter])
        for image in images
        if (identity := image.sequence.identity).adapter
        and image.num_ahead
        and image.last >= identity.adapter_start
    )
    if not ahead:
        return adapters
    return StepAdapters((*(() if adapters is None else adapters.segments), *ahead))


def _image_rows(plan: StepPlan, inputs: StepInputs, sees_ahead: bool) -> tuple[ImageRows, ...]:
    image_rows = []
    next_ahead = len(inputs.input_ids)
    for sequence, start in zip(plan.sequences, inputs.groups[0].starts.tolist(), strict=False):
        for span in sequence.images:
            first, last = max(span.start, sequence.start), min(span.end, sequence.end)
            if first >= last:
                continue
            row = start + first - sequence.start
            ahead = next_ahead if sees_ahead and last < span.end else -1
            image_rows.append(ImageRows(span, sequence, first, last, row, ahead))
            next_ahead += image_rows[-1].num_ahead
    return tuple(image_rows)


def _grid_positions(sequence: ScheduledSequence, store: ImageStore) -> Ints:
    """Return time, row and column of a sequence's new tokens, shape (3, num_new_tokens)."""
    start, end = sequence.start, sequence.end
    positions = np.tile(np.arange(start, end), (3, 1))
    shift = 0
    for span in sequence.images:
        grid = store.grid(span.digest)
        first, last = max(span.start, start), min(span.end, end)
        if first < last:
            within = np.arange(first, last) - span.start
            places = (0 * within, within // grid.columns, within % grid.columns)
            positions[:, first - start : last - start] = span.start + shift + np.stack(places)
        shift += max(grid.rows, grid.columns) - span.length
        after = max(span.end - start, 0)
        positions[:, after:] = np.arange(start + after, max(end, start + after)) + shift
    return positions


class SeeingAhead:
    """A step's attention in which each token of an image sees the whole image.

    A ``LayerAttention``; rows after those of the plan are computed ahead.
    """

    def __init__(
        self,
        inner: LayerAttention,
        step: ImageStep,
        num_rows: int,
        stores: tuple[KVStore, ...],
        groups: LayerGroups,
    ) -> None:
        """Use ``inner`` for the plan's ``num_rows`` rows, then attend again for images."""
        self._inner, self._step, self._num_rows = inner, step, num_rows
        self._stores, self._groups = stores, groups
        self.states = inner.states

    def attend(
        self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, style: AttentionStyle
    ) -> Tensor:
        """Attend in one layer; shapes as in ``AttentionStep.attend``."""
        planned = slice(0, self._num_rows)
        seen = self._inner.attend(layer, queries[planned], keys[planned], values[planned], style)
        attended = seen.new_empty(len(queries), *seen.shape[1:])
        attended[planned] = seen
        group = self._groups.of_layer[layer]
        is_causal = self._step.only_in_windows and style.window is None
        for image in self._step.images:
            if is_causal and not image.num_ahead:
                continue
            rows = image.rows().to(queries.device)
            begin = 0 if style.window is None else max(0, image.first - style.window + 1)
            kept = self._stores[group].read(layer, self._slots(image, group, begin))
            ahead = slice(image.ahead, image.ahead + image.num_ahead) if image.num_ahead else None
            if ahead is not None:
                kept = (torch.cat((kept[0], keys[ahead])), torch.cat((kept[1], values[ahead])))
            places = image.first - begin, is_causal
            attended[rows] = _attend_both_ways(queries[rows], *kept, *places, style)
        return attended

    def _slots(self, image: ImageRows, group: int, begin: int) -> Tensor:
        """Return the slots from position ``begin`` to the end of the chunk."""
        store = self._stores[group]
        places = np.arange(begin, image.last)
        table = np.frombuffer(image.sequence.tables[group], dtype=np.uint32).astype(np.int64)
        slots = table[places // store.block_size] * store.block_size + places % store.block_size
        return torch.from_numpy(slots).to(store.device)


def _attend_both_ways(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    first: int,
    is_causal: bool,
    style: AttentionStyle,
) -> Tensor:
    """Attend to all keys within the window before each query, and to all after it.

    Args:
        queries: Shape (num_queries, num_heads, key_dim).
        keys: Shape (num_keys, num_kv_heads, key_dim).
        values: Shape (num_keys, num_kv_heads, value_dim).
        first: Index of the first query's own key.
        is_causal: Whether keys after a query are masked after all.
        style: Parameters of attention.
    """
    if style.sinks is not None:
        raise UnsupportedModel("attention sinks among the tokens of an image are not computed")
    dtype = torch.promote_types(queries.dtype, torch.float32)
    repeats = queries.shape[1] // keys.shape[1]
    keys, values = (t.to(dtype).repeat_interleave(repeats, dim=1) for t in (keys, values))
    scores = torch.einsum("qhd,khd->hqk", queries.to(dtype), keys) * style.scale
    if style.soft_cap is not None:
        scores = torch.tanh(scores / style.soft_cap) * style.soft_cap
    places = torch.arange(len(keys), device=keys.device)
    own = first + torch.arange(len(queries), device=keys.device)
    if is_causal:
        scores.masked_fill_(places > own[:, None], -torch.inf)
    if style.window is not None:
        scores.masked_fill_(places <= own[:, None] - style.window, -torch.inf)
    return torch.einsum("hqk,khd->qhd", scores.softmax(dim=-1), values).to(queries.dtype)
