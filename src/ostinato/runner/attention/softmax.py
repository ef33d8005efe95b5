"""A softmax computed in parts.

Either over keys tile by tile (Milakov and Gimelshein, arXiv 1805.02867), or over parts that were
computed separately, with the logarithm of their sum of exponentials::

    part 1   mean of values m1, log-sum-exp l1  ┐      l = log(exp l1 + exp l2)
    part 2   mean of values m2, log-sum-exp l2  ┘ ──►  m = m1 exp(l1 - l) + m2 exp(l2 - l)
"""

from dataclasses import dataclass

import torch
from torch import Tensor


def fold_heads(queries: Tensor, num_kv_heads: int) -> Tensor:
    """Fold query heads that share a head of keys into its rows, so that keys are read once.

    From (num_queries, num_heads, dim) to (num_kv_heads, num_heads / num_kv_heads * num_queries,
    dim).
    """
    return queries.transpose(0, 1).reshape(num_kv_heads, -1, queries.shape[2])


def unfold_heads(folded: Tensor, num_heads: int) -> Tensor:
    """Undo ``fold_heads``: return shape (num_queries, num_heads, dim)."""
    return folded.reshape(num_heads, -1, folded.shape[2]).transpose(0, 1)


@dataclass(slots=True)
class RunningSoftmax:
    """Softmax over keys, tile by tile.

    Attributes:
        peak: Largest score so far, shape (num_kv_heads, num_rows, 1).
        total: Sum of exponentials relative to it, likewise.
        weighted: Weighted sum of values, shape (num_kv_heads, num_rows, value_dim).
    """

    peak: Tensor
    total: Tensor
    weighted: Tensor

    @classmethod
    def start(
        cls, folded: Tensor, value_dim: int, num_heads: int, sinks: Tensor | None
    ) -> "RunningSoftmax":
        """Start with the sinks only, which have weight and no value."""
        num_kv_heads, num_rows, _ = folded.shape
        weighted = folded.new_zeros(num_kv_heads, num_rows, value_dim)
        if sinks is None:
            # The lowest number rather than -inf: a tile that no row sees must not give NaN.
            peak = folded.new_full((num_kv_heads, num_rows, 1), torch.finfo(folded.dtype).min)
            return cls(peak, torch.zeros_like(peak), weighted)
        num_queries = num_rows * num_kv_heads // num_heads
        peak = sinks.to(folded.dtype).repeat_interleave(num_queries).view(num_kv_heads, num_rows, 1)
        return cls(peak, torch.ones_like(peak), weighted)

    def add(self, scores: Tensor, values: Tensor) -> None:
        """Add a tile: scores of shape (num_kv_heads, num_rows, num_keys), overwritten."""
        peak = torch.maximum(self.peak, scores.amax(dim=-1, keepdim=True))
        shrink = (self.peak - peak).exp_()
        weights = scores.sub_(peak).exp_()
        self.total = self.total * shrink + weights.sum(dim=-1, keepdim=True)
        self.weighted = self.weighted * shrink + weights @ values
        self.peak = peak

    def result(self, num_heads: int) -> "Part":
        """Return the weighted mean, heads unfolded."""
        log_sum = unfold_heads(self.peak + self.total.log(), num_heads)
        return Part(unfold_heads(self.weighted / self.total, num_heads), log_sum)


@dataclass(frozen=True, slots=True)
class Part:
    """Attention of some rows over some of the keys.

    Attributes:
        mean: Weighted mean of their values, shape (num_rows, num_heads, value_dim).
        log_sum: Logarithm of the sum of their exponentials, shape (num_rows, num_heads, 1).
    """

    mean: Tensor
    log_sum: Tensor

    @classmethod
    def empty(cls, queries: Tensor, value_dim: int) -> "Part":
        """Return attention over no keys, in float32 or wider; see ``add``."""
        dtype = torch.promote_types(queries.dtype, torch.float32)
        shape = queries.shape[:2]
        mean = queries.new_zeros(*shape, value_dim, dtype=dtype)
        return cls(mean, queries.new_full((*shape, 1), -torch.inf, dtype=dtype))

    def add(self, rows: Tensor, part: "Part") -> None:
        """Merge attention over other keys, of each of some rows, shape (num_rows,), in place."""
        before, added = self.log_sum[rows], part.log_sum.to(self.log_sum.dtype)
        after = torch.logaddexp(before, added)
        kept = self.mean[rows].mul_((before - after).exp_())
        kept.addcmul_(part.mean.to(kept.dtype), (added - after).exp_())
        self.mean[rows], self.log_sum[rows] = kept, after
