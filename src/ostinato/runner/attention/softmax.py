"""A softmax computed in parts.

Either over keys tile by tile (Milakov and Gimelshein, arXiv 1805.02867), or over parts that were
computed separately, with the logarithm of their sum of exponentials::

    part 1   mean of values m1, log-sum-exp l1  ┐      l = log(exp l1 + exp l2)
    part 2   mean of values m2, log-sum-exp l2  ┘ ──►  m = m1 exp(l1 - l) + m2 exp(l2 - l)
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ostinato.runner.attention.folding import unfold_gqa


@dataclass(slots=True)
class RunningSoftmax:
    """Softmax over keys, tile by tile.

    Attributes:
        peak: Largest score so far, shape (sequences, num_kv_heads, rows, 1).
        total: Sum of exponentials relative to it, likewise.
        weighted: Weighted sum of values, shape (sequences, num_kv_heads, rows, value_dim).
    """

    peak: Tensor
    total: Tensor
    weighted: Tensor

    @classmethod
    def start(
        cls, folded: Tensor, value_dim: int, num_heads: int, sinks: Tensor | None
    ) -> "RunningSoftmax":
        """Start with the sinks only, which have weight and no value."""
        num_sequences, num_kv_heads, num_rows, _ = folded.shape
        shape = (num_sequences, num_kv_heads, num_rows, 1)
        weighted = folded.new_zeros(*shape[:3], value_dim)
        if sinks is None:
            # The lowest number rather than -inf: a tile that no row sees must not give NaN.
            peak = folded.new_full(shape, torch.finfo(folded.dtype).min)
            return cls(peak, torch.zeros_like(peak), weighted)
        group = num_heads // num_kv_heads
        by_row = sinks.to(folded.dtype).view(1, num_kv_heads, group, 1, 1)
        by_row = by_row.expand(num_sequences, -1, -1, num_rows // group, -1)
        peak = by_row.reshape(shape)
        return cls(peak, torch.ones_like(peak), weighted)

    def add(self, scores: Tensor, values: Tensor) -> None:
        """Add a tile: scores of shape (sequences, num_kv_heads, rows, keys), overwritten."""
        peak = torch.maximum(self.peak, scores.amax(dim=-1, keepdim=True))
        shrink = (self.peak - peak).exp_()
        weights = scores.sub_(peak).exp_()
        self.total = self.total * shrink + weights.sum(dim=-1, keepdim=True)
        self.weighted = self.weighted * shrink + weights @ values
        self.peak = peak

    def result(self, num_heads: int) -> "Part":
        """Return the weighted mean, heads unfolded."""
        log_sum = (self.peak + self.total.log()).squeeze(3)
        return Part(
            unfold_gqa(self.weighted / self.total, num_heads), unfold_gqa(log_sum, num_heads)
        )


@dataclass(frozen=True, slots=True)
class Part:
    """Attention over some of the keys.

    Attributes:
        mean: Weighted mean of their values, shape (sequences, num_heads, queries, value_dim).
        log_sum: Logarithm of the sum of their exponentials, shape (sequences, num_heads, queries).
    """

    mean: Tensor
    log_sum: Tensor


@dataclass(frozen=True, slots=True)
class Parts:
    """Attention of some rows, merged from partial results.

    Attributes:
        mean: Shape (num_rows, num_heads, value_dim), in float32 or wider.
        log_sum: Shape (num_rows, num_heads), likewise.
    """

    mean: Tensor
    log_sum: Tensor

    @classmethod
    def empty(cls, queries: Tensor, value_dim: int) -> "Parts":
        """Allocate for rows; queries are (num_rows, num_heads, key_dim)."""
        dtype = torch.promote_types(queries.dtype, torch.float32)
        return cls(
            queries.new_empty(*queries.shape[:2], value_dim, dtype=dtype),
            queries.new_empty(*queries.shape[:2], dtype=dtype),
        )

    def add(self, rows: Tensor, mean: Tensor, log_sum: Tensor) -> None:
        """Merge another part of some rows.

        Args:
            rows: Indices of the rows, each once, shape (num_rows,).
            mean: Shape (num_rows, num_heads, value_dim).
            log_sum: Shape (num_rows, num_heads).
        """
        before = self.log_sum.index_select(0, rows)
        after = torch.logaddexp(before, log_sum.to(before.dtype))
        kept = self.mean.index_select(0, rows).mul_((before - after).exp_()[..., None])
        kept.addcmul_(mean.to(kept.dtype), (log_sum - after).exp_()[..., None])
        self.mean.index_copy_(0, rows, kept)
        self.log_sum.index_copy_(0, rows, after)
