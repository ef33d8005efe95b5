"""Attention in plain torch, on any device and in any dtype.

Two ways; the first that supports a layer is used:

* *fused*: ``scaled_dot_product_attention``, FlashAttention's tiling (Dao et al., arXiv
  2205.14135) without its scores ever in memory;
* *explicit*: two matrix products and a running softmax over tiles of keys (Milakov and
  Gimelshein, arXiv 1805.02867), for soft caps, sinks, and contexts too long to gather at once.

Blocks that several sequences share are read once (law 2): all their rows look at the shared run
in one product per key/value head, and what comes out is put together with what each sees
besides, see ``softmax``.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from ostinato.runner.attention.backend import AttentionStep, AttentionStyle
from ostinato.runner.attention.cascade import Tile, flash, knows_log_sums, read_run, scores_of
from ostinato.runner.attention.folding import fold_gqa, gather_rows, scatter_rows, unfold_gqa
from ostinato.runner.attention.kv_gather import gather
from ostinato.runner.attention.read_plan import ReadBatch, ReadLimits, ReadPlan, SharingCost
from ostinato.runner.attention.reads import ReadPlans
from ostinato.runner.attention.softmax import Part, Parts, RunningSoftmax
from ostinato.runner.inputs import AttentionMetadata
from ostinato.runner.kv_store import KVSpec, KVStore
from ostinato.runner.plain_store import PlainKVStore
from ostinato.runner.settings import ReadOnce


@dataclass(frozen=True, slots=True)
class ScratchLimits:
    """Limits of the backend's scratch memory, in bytes.

    Attributes:
        gather_bytes: Keys and values of one batch; small enough that they stay in cache.
        fused_bytes: Keys and values of one sequence, above which they are read in tiles.
        score_bytes: Scores or masks of one batch.
        mask_memo_bytes: Masks kept from one layer to the next.
    """

    gather_bytes: int = 4 * 2**20
    fused_bytes: int = 256 * 2**20
    score_bytes: int = 32 * 2**20
    mask_memo_bytes: int = 64 * 2**20


@dataclass(frozen=True, slots=True)
class SharingBytes:
    """The cost of reading once, in bytes of keys and values that could be read instead.

    Attributes:
        per_run: For a reading of its own: some calls, whatever its length.
        per_value: For putting one value of one row together with its other parts.
    """

    per_run: int = 2**20
    per_value: int = 32


SHARING: dict[ReadOnce, SharingBytes | None] = {
    "auto": SharingBytes(),
    "always": SharingBytes(per_run=0, per_value=0),
    "never": None,
}
"""The cost for a value of the setting ``read_once``."""


class TorchAttention:
    """Reads scattered blocks with gathers, masks and matrix products."""

    def __init__(
        self,
        scratch: ScratchLimits | None = None,
        sharing: SharingBytes | None = SHARING["auto"],
    ) -> None:
        """Create the backend.

        Args:
            scratch: Memory for itself.
            sharing: When blocks that sequences share are read once for all of them; None never
                does.
        """
        self.scratch = scratch or ScratchLimits()
        self.sharing = sharing

    def new_store(
        self,
        spec: KVSpec,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        layers: Sequence[int] | None = None,
    ) -> KVStore:
        """Make a store; see ``AttentionBackend``."""
        return PlainKVStore(spec, num_blocks, block_size, dtype, device, layers)

    def start(self, metadata: AttentionMetadata, store: KVStore) -> "TorchStep":
        """Begin a step; see ``AttentionBackend``."""
        return TorchStep(metadata, store, self)

    def read(
        self,
        step: "TorchStep",
        layer: int,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        style: AttentionStyle,
    ) -> Tensor:
        """Attend; see ``AttentionStep``."""
        num_tokens, num_heads, _ = queries.shape
        output = queries.new_empty(num_tokens, num_heads, values.shape[2])
        # Fused kernels need keys and values of one size; otherwise all scores would be in memory.
        unrounded = keys.dtype == values.dtype == step.store.dtype
        fresh = style.plain and unrounded and keys.shape[2] == values.shape[2]
        limits = self._limits(queries, keys, values, style)
        plan = step.reads.plan(style.window, limits, allow_fresh=fresh)
        for batch in plan.alone:
            picked = gather_rows(queries, batch)
            if batch.blocks is None:
                attended = _causal(
                    picked, gather_rows(keys, batch), gather_rows(values, batch), style
                )
            elif style.plain and batch.num_keys <= limits.max_width:
                attended = self._fused(step, layer, batch, picked, style)
            else:
                attended = self._explicit(step, layer, batch, picked, style, limits).mean
            scatter_rows(output, attended.to(output.dtype), batch)
        if plan.shared:
            sharers = queries.index_select(0, plan.sharers)
            attended = self._shared(step, layer, plan, sharers, style, limits)
            output.index_copy_(0, plan.sharers, attended.to(output.dtype))
        return output

    def _limits(
        self, queries: Tensor, keys: Tensor, values: Tensor, style: AttentionStyle
    ) -> ReadLimits:
        """Return the limits of a batch, from the bytes of one key and one score.

        An explicit layer holds about three score matrices of its softmax at a time.
        """
        score_width = max(4, queries.element_size())
        per_pair = queries.shape[1] * score_width * (1 if style.plain else 3)
        per_key = _row_bytes(keys) + _row_bytes(values)
        max_keys = max(1, self.scratch.gather_bytes // per_key)
        return ReadLimits(
            max_keys=max_keys,
            max_pairs=max(1, self.scratch.score_bytes // per_pair),
            max_width=max(max_keys, self.scratch.fused_bytes // per_key)
            if style.plain
            else max_keys,
            sharing=self._sharing_cost(per_key, queries.shape[1] * values.shape[2]),
        )

    def _sharing_cost(self, bytes_per_key: int, values_per_row: int) -> SharingCost | None:
        """Return the cost of reading once, in keys."""
        if self.sharing is None:
            return None
        return SharingCost(
            self.sharing.per_run / bytes_per_key,
            self.sharing.per_value * values_per_row / bytes_per_key,
        )

    def _fused(
        self,
        step: "TorchStep",
        layer: int,
        batch: ReadBatch,
        queries: Tensor,
        style: AttentionStyle,
    ) -> Tensor:
        """Attend in one call; returns (sequences, num_heads, queries, value_dim)."""
        keys, values = gather(step, layer, batch, queries.dtype)
        folded = fold_gqa(queries, keys.shape[1])
        mask = self._mask(step, batch, style.window, folded)
        attended = scaled_dot_product_attention(
            folded, keys, values, attn_mask=mask, scale=style.scale
        )
        return unfold_gqa(attended, queries.shape[1])

    def _mask(
        self, step: "TorchStep", batch: ReadBatch, window: int | None, folded: Tensor
    ) -> Tensor:
        """Return what is added to the scores, (sequences, 1, folded rows, keys).

        Layers of a kind share it as long as the memo has room.
        """
        memo = step.reads.masks
        repeats = folded.shape[2] // batch.num_queries
        kind = (id(batch), window, repeats, folded.dtype)
        if kind in memo:
            return memo[kind]
        seen = batch.visible(window)[:, None]
        mask = torch.zeros(seen.shape, dtype=folded.dtype, device=folded.device)
        mask = mask.masked_fill_(~seen, -torch.inf)[:, :, None]
        mask = mask.expand(-1, -1, repeats, -1, -1).flatten(2, 3)
        if sum(m.nbytes for m in memo.values()) + mask.nbytes <= self.scratch.mask_memo_bytes:
            memo[kind] = mask
        return mask

    def _explicit(
        self,
        step: "TorchStep",
        layer: int,
        batch: ReadBatch,
        queries: Tensor,
        style: AttentionStyle,
        limits: ReadLimits,
    ) -> Part:
        """Attend tile by tile."""
        assert batch.blocks is not None
        num_heads = queries.shape[1]
        precision = torch.promote_types(queries.dtype, torch.float32)
        softmax: RunningSoftmax | None = None
        block_size = step.metadata.block_size
        num_columns = max(1, limits.max_keys // batch.num_sequences // block_size)
        for column in range(0, batch.blocks.shape[1], num_columns):
            keys, values = gather(step, layer, batch, precision, column, num_columns)
            if softmax is None:
                folded = fold_gqa(queries.to(precision), keys.shape[1])
                softmax = RunningSoftmax.start(folded, values.shape[3], num_heads, style.sinks)
            first = column * block_size
            seen = batch.visible(style.window, first, first + keys.shape[2])
            softmax.add(scores_of(folded, keys, style, seen), values)
        assert softmax is not None
        return softmax.result(num_heads)

    def _shared(
        self,
        step: "TorchStep",
        layer: int,
        plan: ReadPlan,
        queries: Tensor,
        style: AttentionStyle,
        limits: ReadLimits,
    ) -> Tensor:
        """Attend to shared runs and tails; returns (num_sharers, num_heads, value_dim)."""
        parts: Parts | None = None
        for batch in plan.tails:
            part = self._tail(step, layer, batch, gather_rows(queries, batch), style, limits)
            if parts is None:
                parts = Parts.room_for(queries, part.mean.shape[3])
            scatter_rows(parts.mean, part.mean.to(parts.mean.dtype), batch)
            scatter_rows(parts.log_sum, part.log_sum.to(parts.log_sum.dtype), batch)
        assert parts is not None, "the step's own tokens are always in a tail"
        tile = Tile.of(step, limits)
        for read in plan.shared:
            for part in read_run(step, layer, read, queries, style, tile):
                parts.add(read.rows, part.mean[0].transpose(0, 1), part.log_sum[0].T)
        return parts.mean

    def _tail(
        self,
        step: "TorchStep",
        layer: int,
        batch: ReadBatch,
        queries: Tensor,
        style: AttentionStyle,
        limits: ReadLimits,
    ) -> Part:
        """Attend to the parts that sequences do not share."""
        spec = step.store.spec.layers[layer]
        if not knows_log_sums(queries, spec, style) or batch.num_keys > limits.max_width:
            return self._explicit(step, layer, batch, queries, style, limits)
        keys, values = gather(step, layer, batch, queries.dtype)
        folded = fold_gqa(queries, keys.shape[1])
        mask = self._mask(step, batch, style.window, folded)
        return flash(folded, keys, values, style, queries.shape[1], mask)


class TorchStep(AttentionStep):
    """One step, read by torch.

    Attributes:
        reads: Which sequences are read together, worked out once for all layers.
    """

    def __init__(
        self, metadata: AttentionMetadata, store: KVStore, attention: TorchAttention
    ) -> None:
        """Bind a step; plans are computed lazily."""
        super().__init__(metadata, store)
        self.reads = ReadPlans(metadata, store.zero_block)
        self._attention = attention

    def read(
        self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, style: AttentionStyle
    ) -> Tensor:
        """Attend; see ``AttentionStep``."""
        return self._attention.read(self, layer, queries, keys, values, style)


def _causal(queries: Tensor, keys: Tensor, values: Tensor, style: AttentionStyle) -> Tensor:
    """Attend within fresh sequences, whose keys are all in the step."""
    return scaled_dot_product_attention(
        queries,
        keys,
        values,
        is_causal=queries.shape[2] > 1,
        scale=style.scale,
        enable_gqa=queries.shape[1] != keys.shape[1],
    )


def _row_bytes(tensor: Tensor) -> int:
    """Bytes of one token, (num_tokens, heads, dim)."""
    return tensor.shape[1] * tensor.shape[2] * tensor.element_size()
