"""A softmax computed in parts.

Over tiles of keys (Milakov and Gimelshein, arXiv 1805.02867), or over runs of keys that other rows
see as well, each with the logarithm of its sum of exponentials::

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


@dataclass(frozen=True, slots=True)
class PartialSoftmax:
    """Attention of some rows over some of the keys.

    Attributes:
        mean: Weighted mean of their values, shape (num_rows, num_heads, value_dim).
        log_sum: Logarithm of the sum of their exponentials, shape (num_rows, num_heads, 1).
    """

    mean: Tensor
    log_sum: Tensor

    @classmethod
    def empty(cls, queries: Tensor, value_dim: int, sinks: Tensor | None) -> "PartialSoftmax":
        """Return attention over no keys but sinks, which have weight and no value.

        In float32 or wider.
        """
        dtype = torch.promote_types(queries.dtype, torch.float32)
        mean = queries.new_zeros(*queries.shape[:2], value_dim, dtype=dtype)
        log_sum = queries.new_full((*queries.shape[:2], 1), -torch.inf, dtype=dtype)
        if sinks is not None:
            log_sum[:] = sinks[:, None]
        return cls(mean, log_sum)

    @classmethod
    def of_tile(cls, scores: Tensor, values: Tensor, num_heads: int) -> "PartialSoftmax":
        """Return attention over a tile of keys, of which a row may see none.

        Args:
            scores: Shape (num_kv_heads, num_folded_rows, num_keys), overwritten.
            values: Shape (num_kv_heads, num_keys, value_dim).
            num_heads: Heads of queries.
        """
        log_sum = scores.logsumexp(dim=-1, keepdim=True)
        weights = scores.sub_(_finite(log_sum)).exp_()
        return cls(unfold_heads(weights @ values, num_heads), unfold_heads(log_sum, num_heads))

    def add(self, rows: Tensor, part: "PartialSoftmax") -> None:
        """Merge attention over other keys, of each of some rows, shape (num_rows,), in place."""
        before = self.log_sum[rows]
        after = torch.logaddexp(before, part.log_sum)
        mean = self.mean[rows].mul_((before - _finite(after)).exp_())
        mean.addcmul_(part.mean, (part.log_sum - _finite(after)).exp_())
        self.mean[rows], self.log_sum[rows] = mean, after


def _finite(log_sum: Tensor) -> Tensor:
    """Return the lowest number in place of -inf, so that differences are numbers."""
    return log_sum.clamp(min=torch.finfo(log_sum.dtype).min)
