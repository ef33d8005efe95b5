"""Attention in plain torch, on any device and in any dtype.

There are two ways; the first that supports a layer is used:

* *fused*: ``scaled_dot_product_attention``, FlashAttention's tiling (Dao et al., arXiv
  2205.14135), which never stores the scores;
* *in tiles*: two matrix products and a softmax for each tile of keys (Milakov and Gimelshein, arXiv
  1805.02867), for soft caps, sinks, contexts too long to gather at once, and sequences that share
  blocks.

Blocks that several sequences share are read once (law 2): all their rows, heads folded in, attend
to the shared run in one product per key/value head (Hydragen, Juravsky et al., arXiv 2402.05099),
and the result is merged with that of their own blocks, see ``softmax``.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from ostinato.runner.attention.backend import AttentionBackend, AttentionStep, AttentionStyle
from ostinato.runner.attention.reads import Read, ReadLimits, ReadPlans, SharingCost
from ostinato.runner.attention.softmax import PartialSoftmax, fold_heads, unfold_heads
from ostinato.runner.inputs import AttentionMetadata
from ostinato.runner.kv.kv_store import KVStore
from ostinato.runner.kv.plain_store import PlainKVStore
from ostinato.runner.settings import ReadOnce


@dataclass(frozen=True, slots=True)
class ScratchLimits:
    """Limits of the backend's scratch memory, in bytes.

    Attributes:
        gather_bytes: Keys and values of a tile; small enough that they stay in cache.
        fused_bytes: Keys and values of one sequence, above which they are read in tiles.
        score_bytes: Scores or masks of one read.
    """

    gather_bytes: int = 4 * 2**20
    fused_bytes: int = 256 * 2**20
    score_bytes: int = 32 * 2**20


@dataclass(frozen=True, slots=True)
class SharingBytes:
    """The cost of reading once, in bytes of keys and values that could be read instead.

    Attributes:
        per_run: Of a separate read: some calls, whatever its length.
        per_value: Of merging one value of one row.
    """

    per_run: int = 2**20
    per_value: int = 32


SHARING: dict[ReadOnce, SharingBytes | None] = {
    "auto": SharingBytes(),
    "always": SharingBytes(per_run=0, per_value=0),
    "never": None,
}
"""The cost of reading once, by the setting ``read_once``."""


class TorchAttention(AttentionBackend):
    """Reads scattered blocks with gathers, masks and matrix products."""

    def __init__(
        self,
        scratch: ScratchLimits | None = None,
        sharing: SharingBytes | None = SHARING["auto"],
    ) -> None:
        """Create the backend.

        Args:
            scratch: Limits of scratch memory.
            sharing: Cost of reading shared blocks once for all sequences; None never does.
        """
        self.scratch = scratch or ScratchLimits()
        self.sharing = sharing

    new_store = staticmethod(PlainKVStore)
    """Makes a store; see ``AttentionBackend``."""

    def start(self, metadata: AttentionMetadata, store: KVStore) -> "TorchStep":
        """Begin a step; see ``AttentionBackend``."""
        return TorchStep(metadata, store, self.scratch, self.sharing)


class TorchStep(AttentionStep):
    """One step, read by torch.

    Attributes:
        reads: Which sequences are read together, computed once for all layers of a kind.
    """

    def __init__(
        self,
        metadata: AttentionMetadata,
        store: KVStore,
        scratch: ScratchLimits,
        sharing: SharingBytes | None,
    ) -> None:
        """Bind a step; plans are computed lazily."""
        super().__init__(metadata, store)
        self.reads = ReadPlans(metadata)
        self._scratch, self._sharing = scratch, sharing

    def read(self, layer: int, queries: Tensor, style: AttentionStyle) -> Tensor:
        """Attend; see ``AttentionStep``."""
        num_tokens, num_heads, _ = queries.shape
        output = queries.new_empty(num_tokens, num_heads, self.store.spec.layers[layer].value_dim)
        limits = self._limits(layer, queries, style)
        plan = self.reads.plan(style.window, limits)
        tiled = [*plan.tails, *plan.shared]
        for read in plan.alone:
            if style.plain and read.num_keys <= limits.max_width:
                output[read.rows] = self._fused(layer, read, queries, style).to(output.dtype)
            else:
                tiled.append(read)
        if tiled:
            whole = PartialSoftmax.empty(queries, output.shape[2], style.sinks)
            for read in tiled:
                for part in self._tiles(layer, read, queries, style, limits):
                    whole.add(read.rows, part)
            rows = torch.cat([read.rows for read in tiled])
            output[rows] = whole.mean[rows].to(output.dtype)
        return output

    def _limits(self, layer: int, queries: Tensor, style: AttentionStyle) -> ReadLimits:
        """Return the limits of a batch, from the bytes of one key and one score.

        A layer in tiles holds about three score matrices of its softmax at a time.
        """
        kept, (_, num_heads, _) = self.store.spec.layers[layer], queries.shape
        score_width = max(4, queries.element_size())
        per_pair = num_heads * score_width * (1 if style.plain else 3)
        per_key = kept.bytes_per_token(queries.dtype)
        max_keys = max_width = max(1, self._scratch.gather_bytes // per_key)
        if style.plain:
            max_width = max(max_keys, self._scratch.fused_bytes // per_key)
        sharing = None
        if self._sharing is not None:
            per_row = self._sharing.per_value * num_heads * kept.value_dim
            sharing = SharingCost(self._sharing.per_run / per_key, per_row / per_key)
        return ReadLimits(
            max_keys=max_keys,
            max_pairs=max(1, self._scratch.score_bytes // per_pair),
            max_width=max_width,
            sharing=sharing,
        )

    def _fused(self, layer: int, read: Read, queries: Tensor, style: AttentionStyle) -> Tensor:
        """Attend in one call; returns (num_queries, num_heads, value_dim)."""
        keys, values = self._gather(layer, read, queries.dtype)
        folded = fold_heads(queries[read.rows], len(keys))
        seen = read.visible(style.window).repeat(queries.shape[1] // len(keys), 1)
        attended = scaled_dot_product_attention(
            folded[None], keys[None], values[None], attn_mask=seen, scale=style.scale
        )
        return unfold_heads(attended[0], queries.shape[1])

    def _tiles(
        self, layer: int, read: Read, queries: Tensor, style: AttentionStyle, limits: ReadLimits
    ) -> Iterator[PartialSoftmax]:
        """Attend tile by tile; sinks are ignored."""
        block_size = self.metadata.block_size
        num_kv_heads = self.store.spec.layers[layer].num_kv_heads
        precision = torch.promote_types(queries.dtype, torch.float32)
        folded = fold_heads(queries[read.rows].to(precision), num_kv_heads)
        num_blocks = max(1, limits.max_keys // block_size)
        for start in range(0, len(read.blocks), num_blocks):
            keys, values = self._gather(layer, read, precision, start, start + num_blocks)
            first = start * block_size
            seen = read.visible(style.window, first, first + keys.shape[1])
            scores = _scores(folded, keys, style, seen)
            yield PartialSoftmax.of_tile(scores, values, queries.shape[1])

    def _gather(
        self, layer: int, read: Read, dtype: torch.dtype, start: int = 0, stop: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """Fetch some blocks of a read, (num_kv_heads, num_keys, dim) each."""
        keys, values = self.store.gather(layer, read.blocks[None, start:stop])
        num_keys = read.num_keys - start * self.metadata.block_size
        keys, values = (t[0, :num_keys].transpose(0, 1).to(dtype) for t in (keys, values))
        return keys, values


def _scores(folded: Tensor, keys: Tensor, style: AttentionStyle, seen: Tensor) -> Tensor:
    """Return scores, shape (num_kv_heads, num_rows, num_keys).

    Args:
        folded: Queries, shape (num_kv_heads, num_rows, dim).
        keys: Shape (num_kv_heads, num_keys, dim).
        style: Parameters of attention.
        seen: Mask of the keys that each query sees, shape (num_queries, num_keys).
    """
    scores = (folded @ keys.transpose(1, 2)).mul_(style.scale)
    if style.soft_cap is not None:
        scores.div_(style.soft_cap).tanh_().mul_(style.soft_cap)
    scores.unflatten(1, (-1, len(seen))).masked_fill_(~seen, -torch.inf)
    return scores
