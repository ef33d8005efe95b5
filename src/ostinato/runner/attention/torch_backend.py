"""How is attention computed in plain torch, on any device and in any dtype?

Two ways, and the first that can do what a layer asks for is taken:

* *fused*: ``scaled_dot_product_attention``, FlashAttention's tiling (Dao et al., arXiv
  2205.14135) without its scores ever in memory;
* *explicit*: two matrix products and a running softmax over tiles of keys (Milakov and
  Gimelshein, arXiv 1805.02867), for soft caps, sinks, and contexts too long to gather at once.

The query heads that share a key/value head are folded into rows, so that its keys are read
once for all of them::

    queries  (sequences, num_heads, queries, dim)
          -> (sequences, num_kv_heads, num_heads / num_kv_heads * queries, dim)
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from ostinato.runner.attention.backend import AttentionStep, AttentionStyle
from ostinato.runner.attention.reads import ReadBatch, ReadLimits


@dataclass(frozen=True, slots=True)
class ScratchLimits:
    """How much memory the backend may use for itself, in bytes.

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


class TorchAttention:
    """Reads scattered blocks with gathers, masks and matrix products."""

    def __init__(self, scratch: ScratchLimits | None = None) -> None:
        """Work within the given scratch memory."""
        self.scratch = scratch or ScratchLimits()

    def read(
        self,
        step: AttentionStep,
        layer: int,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        style: AttentionStyle,
    ) -> Tensor:
        """Let each query attend to its sequence up to itself; see ``AttentionBackend``."""
        num_tokens, num_heads, _ = queries.shape
        output = queries.new_empty(num_tokens, num_heads, values.shape[2])
        # Fused kernels want keys and values of one size; else all scores would be in memory.
        unrounded = keys.dtype == values.dtype == step.store.dtype
        fresh = style.plain and unrounded and keys.shape[2] == values.shape[2]
        limits = self._limits(queries, keys, values, style)
        for batch in step.reads.batches(style.window, limits, allow_fresh=fresh):
            picked = _pick(queries, batch)
            if batch.blocks is None:
                attended = _causal(picked, _pick(keys, batch), _pick(values, batch), style)
            elif style.plain and batch.num_keys <= limits.max_width:
                attended = self._fused(step, layer, batch, picked, style)
            else:
                attended = self._explicit(step, layer, batch, picked, style, limits)
            _put(output, attended, batch)
        return output

    def _limits(
        self, queries: Tensor, keys: Tensor, values: Tensor, style: AttentionStyle
    ) -> ReadLimits:
        """Say how large a batch may be, given what one key and one score weigh.

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
        )

    def _fused(
        self,
        step: AttentionStep,
        layer: int,
        batch: ReadBatch,
        queries: Tensor,
        style: AttentionStyle,
    ) -> Tensor:
        """Attend in one call; returns (sequences, num_heads, queries, value_dim)."""
        keys, values = _gather(step, layer, batch, queries.dtype)
        folded = _fold(queries, keys.shape[1])
        mask = self._mask(step, batch, style.window, folded)
        attended = scaled_dot_product_attention(
            folded, keys, values, attn_mask=mask, scale=style.scale
        )
        return _unfold(attended, queries.shape[1])

    def _mask(
        self, step: AttentionStep, batch: ReadBatch, window: int | None, folded: Tensor
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
        step: AttentionStep,
        layer: int,
        batch: ReadBatch,
        queries: Tensor,
        style: AttentionStyle,
        limits: ReadLimits,
    ) -> Tensor:
        """Attend tile by tile; returns (sequences, num_heads, queries, value_dim)."""
        assert batch.blocks is not None
        num_heads = queries.shape[1]
        precision = torch.promote_types(queries.dtype, torch.float32)
        softmax: _RunningSoftmax | None = None
        block_size = step.metadata.block_size
        num_columns = max(1, limits.max_keys // batch.num_sequences // block_size)
        for column in range(0, batch.blocks.shape[1], num_columns):
            keys, values = _gather(step, layer, batch, precision, column, num_columns)
            if softmax is None:
                folded = _fold(queries.to(precision), keys.shape[1])
                softmax = _RunningSoftmax.start(folded, values.shape[3], num_heads, style.sinks)
            first = column * block_size
            seen = batch.visible(style.window, first, first + keys.shape[2])
            scores = _scores(folded, keys, seen, style)
            softmax.add(scores, values)
        assert softmax is not None
        return _unfold(softmax.result(), num_heads).to(queries.dtype)


@dataclass(slots=True)
class _RunningSoftmax:
    """Softmax over keys that come tile by tile.

    Attributes:
        peak: Largest score so far, shape (sequences, num_kv_heads, rows, 1).
        total: Sum of exponentials relative to it, likewise.
        weighted: Sum of values so weighted, shape (sequences, num_kv_heads, rows, value_dim).
    """

    peak: Tensor
    total: Tensor
    weighted: Tensor

    @classmethod
    def start(
        cls, folded: Tensor, value_dim: int, num_heads: int, sinks: Tensor | None
    ) -> "_RunningSoftmax":
        """Begin with nothing seen but the sinks, which weigh and bring no value."""
        num_sequences, num_kv_heads, num_rows, _ = folded.shape
        shape = (num_sequences, num_kv_heads, num_rows, 1)
        weighted = folded.new_zeros(*shape[:3], value_dim)
        if sinks is None:
            # The lowest number rather than -inf: a tile in nobody's sight must not give NaN.
            peak = folded.new_full(shape, torch.finfo(folded.dtype).min)
            return cls(peak, torch.zeros_like(peak), weighted)
        group = num_heads // num_kv_heads
        by_row = sinks.to(folded.dtype).view(1, num_kv_heads, group, 1, 1)
        by_row = by_row.expand(num_sequences, -1, -1, num_rows // group, -1)
        peak = by_row.reshape(shape)
        return cls(peak, torch.ones_like(peak), weighted)

    def add(self, scores: Tensor, values: Tensor) -> None:
        """Take in a tile: scores of shape (sequences, num_kv_heads, rows, keys), overwritten."""
        peak = torch.maximum(self.peak, scores.amax(dim=-1, keepdim=True))
        shrink = (self.peak - peak).exp_()
        weights = scores.sub_(peak).exp_()
        self.total = self.total * shrink + weights.sum(dim=-1, keepdim=True)
        self.weighted = self.weighted * shrink + weights @ values
        self.peak = peak

    def result(self) -> Tensor:
        """Return the weighted mean, shape (sequences, num_kv_heads, rows, value_dim)."""
        return self.weighted / self.total


def _scores(folded: Tensor, keys: Tensor, seen: Tensor, style: AttentionStyle) -> Tensor:
    """Return masked scores, shape (sequences, num_kv_heads, rows, keys)."""
    scores = (folded @ keys.transpose(2, 3)).mul_(style.scale)
    if style.soft_cap is not None:
        scores.div_(style.soft_cap).tanh_().mul_(style.soft_cap)
    by_query = scores.view(*scores.shape[:2], -1, *seen.shape[1:])
    by_query.masked_fill_(~seen[:, None, None], -torch.inf)
    return scores


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


def _gather(
    step: AttentionStep,
    layer: int,
    batch: ReadBatch,
    dtype: torch.dtype,
    column: int = 0,
    num_columns: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Fetch some block columns of a batch, (sequences, num_kv_heads, keys, dim) each."""
    assert batch.blocks is not None
    whole = num_columns is None or num_columns >= batch.blocks.shape[1]
    blocks = batch.blocks if whole else batch.blocks[:, column : column + num_columns]  # type: ignore[operator]
    keys, values = step.store.gather(layer, blocks)
    stale = batch.stale if whole else _within(batch, keys.shape[1], column, step)
    num_keys = batch.num_keys - column * step.metadata.block_size
    picked = []
    for tensor in (keys, values):
        tensor.flatten(0, 1).index_fill_(0, stale, 0)
        picked.append(tensor[:, :num_keys].transpose(1, 2).to(dtype))
    return picked[0], picked[1]


def _within(batch: ReadBatch, width: int, column: int, step: AttentionStep) -> Tensor:
    """Return the stale keys of one tile, counted through its own sequences."""
    assert batch.blocks is not None
    block_size = step.metadata.block_size
    full_width = batch.blocks.shape[1] * block_size
    sequences, places = batch.stale // full_width, batch.stale % full_width - column * block_size
    inside = (places >= 0) & (places < width)
    return (sequences * width + places)[inside]


def _pick(tensor: Tensor, batch: ReadBatch) -> Tensor:
    """Take a batch's rows, (num_tokens, heads, dim) to (sequences, heads, queries, dim)."""
    picked = tensor.index_select(0, batch.rows)
    shape = (batch.num_sequences, batch.num_queries, *tensor.shape[1:])
    return picked.view(shape).transpose(1, 2)


def _put(output: Tensor, attended: Tensor, batch: ReadBatch) -> None:
    """Put a batch's result, (sequences, heads, queries, dim), into its rows; drop the padding."""
    rows, content = batch.rows, attended.transpose(1, 2).flatten(0, 1)
    if batch.real is not None:
        rows, content = rows[batch.real], content[batch.real]
    output.index_copy_(0, rows, content)


def _fold(queries: Tensor, num_kv_heads: int) -> Tensor:
    """Turn query heads that share a key head into rows of it."""
    num_sequences, _, _, dim = queries.shape
    return queries.reshape(num_sequences, num_kv_heads, -1, dim)


def _unfold(attended: Tensor, num_heads: int) -> Tensor:
    """Undo ``_fold``."""
    num_sequences, num_kv_heads, num_rows, dim = attended.shape
    return attended.reshape(num_sequences, num_heads, num_rows * num_kv_heads // num_heads, dim)


def _row_bytes(tensor: Tensor) -> int:
    """Bytes of one token, (num_tokens, heads, dim)."""
    return tensor.shape[1] * tensor.shape[2] * tensor.element_size()
