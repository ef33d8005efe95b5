"""Attention in plain torch, on any device and in any dtype.

There are two ways; the first that supports a layer is used:

* *fused*: ``scaled_dot_product_attention``, FlashAttention's tiling (Dao et al., arXiv
  2205.14135), which never stores the scores;
* *explicit*: two matrix products and a running softmax over tiles of keys (Milakov and
  Gimelshein, arXiv 1805.02867), for soft caps, sinks, contexts too long to gather at once, and
  sequences that share blocks.

Blocks that several sequences share are read once (law 2): all their rows, heads folded in, attend
to the shared run in one product per key/value head (Hydragen, Juravsky et al., arXiv 2402.05099),
and the result is merged with that of their own blocks, see ``softmax``.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from ostinato.runner.attention.backend import AttentionBackend, AttentionStep, AttentionStyle
from ostinato.runner.attention.folding import fold_gqa, gather_rows, scatter_rows, unfold_gqa
from ostinato.runner.attention.read_plan import ReadBatch, ReadLimits, ReadPlan, SharingCost
from ostinato.runner.attention.reads import ReadPlans
from ostinato.runner.attention.softmax import Part, Parts, RunningSoftmax
from ostinato.runner.inputs import AttentionMetadata
from ostinato.runner.kv.kv_store import KVStore
from ostinato.runner.kv.plain_store import PlainKVStore
from ostinato.runner.settings import ReadOnce


@dataclass(frozen=True, slots=True)
class ScratchLimits:
    """Limits of the backend's scratch memory, in bytes.

    Attributes:
        gather_bytes: Keys and values of one batch; small enough that they stay in cache.
        fused_bytes: Keys and values of one sequence, above which they are read in tiles.
        score_bytes: Scores or masks of one batch.
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
        self.reads = ReadPlans(metadata, store.zero_block)
        self._scratch, self._sharing = scratch, sharing

    def read(self, layer: int, queries: Tensor, style: AttentionStyle) -> Tensor:
        """Attend; see ``AttentionStep``."""
        num_tokens, num_heads, _ = queries.shape
        output = queries.new_empty(num_tokens, num_heads, self.store.spec.layers[layer].value_dim)
        limits = self._limits(layer, queries, style)
        plan = self.reads.plan(style.window, limits)
        for batch in plan.alone:
            rows = gather_rows(queries, batch)
            if style.plain and batch.num_keys <= limits.max_width:
                attended = self._fused(layer, batch, rows, style)
            else:
                attended = self._explicit(layer, batch, rows, style, limits).mean
            scatter_rows(output, attended.to(output.dtype), batch)
        if plan.shared:
            sharers = queries.index_select(0, plan.sharers)
            attended = self._shared(layer, plan, sharers, style, limits)
            output.index_copy_(0, plan.sharers, attended.to(output.dtype))
        return output

    def _limits(self, layer: int, queries: Tensor, style: AttentionStyle) -> ReadLimits:
        """Return the limits of a batch, from the bytes of one key and one score.

        An explicit layer holds about three score matrices of its softmax at a time.
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

    def _fused(
        self, layer: int, batch: ReadBatch, queries: Tensor, style: AttentionStyle
    ) -> Tensor:
        """Attend in one call; returns (sequences, num_heads, queries, value_dim)."""
        keys, values = self._gather(layer, batch, queries.dtype)
        folded = fold_gqa(queries, keys.shape[1])
        repeats = folded.shape[2] // batch.num_queries
        seen = batch.visible(style.window).repeat(1, repeats, 1)[:, None]
        attended = scaled_dot_product_attention(
            folded, keys, values, attn_mask=seen, scale=style.scale
        )
        return unfold_gqa(attended, queries.shape[1])

    def _explicit(
        self,
        layer: int,
        batch: ReadBatch,
        queries: Tensor,
        style: AttentionStyle,
        limits: ReadLimits,
    ) -> Part:
        """Attend tile by tile."""
        num_heads = queries.shape[1]
        precision = torch.promote_types(queries.dtype, torch.float32)
        softmax: RunningSoftmax | None = None
        block_size = self.metadata.block_size
        num_columns = max(1, limits.max_keys // batch.num_sequences // block_size)
        for column in range(0, batch.blocks.shape[1], num_columns):
            keys, values = self._gather(layer, batch, precision, column, num_columns)
            if softmax is None:
                folded = fold_gqa(queries.to(precision), keys.shape[1])
                softmax = RunningSoftmax.start(folded, values.shape[3], num_heads, style.sinks)
            first = column * block_size
            seen = batch.visible(style.window, first, first + keys.shape[2])
            softmax.add(_scores(folded, keys, style, seen), values)
        assert softmax is not None
        return softmax.result(num_heads)

    def _shared(
        self,
        layer: int,
        plan: ReadPlan,
        queries: Tensor,
        style: AttentionStyle,
        limits: ReadLimits,
    ) -> Tensor:
        """Attend to shared runs and tails; returns (num_sharers, num_heads, value_dim)."""
        parts: Parts | None = None
        for batch in plan.tails:
            part = self._explicit(layer, batch, gather_rows(queries, batch), style, limits)
            if parts is None:
                parts = Parts.empty(queries, part.mean.shape[3])
            scatter_rows(parts.mean, part.mean.to(parts.mean.dtype), batch)
            scatter_rows(parts.log_sum, part.log_sum.to(parts.log_sum.dtype), batch)
        assert parts is not None, "the step's own tokens are always in a tail"
        without_sinks = replace(style, sinks=None)  # the tails count them
        for batch in plan.shared:
            rows = gather_rows(queries, batch)
            part = self._explicit(layer, batch, rows, without_sinks, limits)
            parts.add(batch.rows, part.mean[0].transpose(0, 1), part.log_sum[0].T)
        return parts.mean

    def _gather(
        self,
        layer: int,
        batch: ReadBatch,
        dtype: torch.dtype,
        column: int = 0,
        num_columns: int | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Fetch some block columns of a batch, (sequences, num_kv_heads, keys, dim) each."""
        stop = None if num_columns is None else column + num_columns
        keys, values = self.store.gather(layer, batch.blocks[:, column:stop])
        block_size, width = self.metadata.block_size, keys.shape[1]
        stale = batch.stale
        if width < batch.blocks.shape[1] * block_size:  # counted through the tile's own keys
            full_width = batch.blocks.shape[1] * block_size
            sequences, places = stale // full_width, stale % full_width - column * block_size
            stale = (sequences * width + places)[(places >= 0) & (places < width)]
        num_keys = batch.num_keys - column * block_size
        for tensor in (keys, values):
            tensor.flatten(0, 1).index_fill_(0, stale, 0)
        keys, values = (t[:, :num_keys].transpose(1, 2).to(dtype) for t in (keys, values))
        return keys, values


def _scores(folded: Tensor, keys: Tensor, style: AttentionStyle, seen: Tensor) -> Tensor:
    """Return scores, shape (sequences, num_kv_heads, rows, keys).

    Args:
        folded: Queries, shape (sequences, num_kv_heads, rows, dim).
        keys: Shape (sequences, num_kv_heads, keys, dim).
        style: Parameters of attention.
        seen: Mask of the keys that each query sees, shape (sequences, queries, keys).
    """
    scores = (folded @ keys.transpose(2, 3)).mul_(style.scale)
    if style.soft_cap is not None:
        scores.div_(style.soft_cap).tanh_().mul_(style.soft_cap)
    by_query = scores.view(*scores.shape[:2], -1, *seen.shape[1:])
    by_query.masked_fill_(~seen[:, None, None], -torch.inf)
    return scores
