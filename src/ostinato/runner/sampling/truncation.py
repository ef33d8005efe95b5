"""Truncates the distribution of the next token.

``min_p``, then ``top_k``, then ``top_p``, each applied to the result of the one before, as in vLLM.
The last two keep the most likely tokens up to some point, which two numbers per row define: the
score of the last token that is kept, and how many of the tokens with this score are kept::

    scores    9   7   4   1   4   4        floor 4, places 2
    kept      x   x   x       x            at the floor, the lowest ids

Neither number needs a sorted vocabulary: the tokens that matter are among the first few. Rows whose
``top_p`` needs more than ``_HEAD_TOKENS`` tokens are computed again with more.

Sources: top-k, Fan et al., arXiv 1805.04833; top-p, Holtzman et al., arXiv 1904.09751; min-p,
Nguyen et al., arXiv 2407.01082.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ostinato.core.sampling_params import SamplingParams

_HEAD_TOKENS = 1024
"""Tokens sorted for ``top_p`` at first; trained models rarely spread 0.95 over more."""

_HEAD_GROWTH = 16
"""Factor on the number of tokens, for the rows that need more."""


@dataclass(frozen=True, slots=True)
class TopKTopP:
    """Where the list of tokens by score ends.

    Attributes:
        floors: Score of the last token that is kept, shape (num_rows, 1).
        places: How many of the tokens with this score are kept, shape (num_rows, 1).
    """

    floors: Tensor
    places: Tensor


def keep_best(scores: Tensor, cut: TopKTopP) -> Tensor:
    """Return the mask of the tokens of scores that ``cut`` keeps, both of shape (num_rows, vocab).

    Cost: O(num_rows * vocab), nothing is sorted.
    """
    level = scores == cut.floors
    return (scores > cut.floors) | (level & (level.cumsum(-1, dtype=torch.int32) <= cut.places))


def top_ids(scores: Tensor, count: int) -> Tensor:
    """Return the ids of the ``count`` best tokens, best first; equal scores by id, lowest first.

    ``torch.topk`` does not define which of several equal scores it returns, so it only gives the
    floor here.

    Args:
        scores: Shape (num_rows, vocab), no NaN.
        count: 0 .. vocab.

    Returns:
        Ids, shape (num_rows, count).
    """
    if count == 0:
        return torch.zeros(len(scores), 0, dtype=torch.int64, device=scores.device)
    best = scores.topk(count).values  # (num_rows, count), best first
    ids = keep_best(scores, _cut_after(best, count)).nonzero()[:, 1]  # ascending in each row
    ids = ids.view(len(scores), count)
    order = scores.gather(1, ids).sort(descending=True, stable=True).indices
    return ids.gather(1, order)


def truncate(scores: Tensor, masses: Tensor, params: Sequence[SamplingParams]) -> None:
    """Set the weights of the tokens that ``top_k`` and ``top_p`` exclude to zero, in place.

    Args:
        scores: Logits, shape (num_rows, vocab).
        masses: Weights of the tokens, int64, of the same shape; a higher score never has a lower
            weight. Integers, so that sums are exact in any order and the same in any batch.
        params: One per row.
    """
    vocab = scores.shape[1]
    top_k = [p.top_k if 0 < p.top_k < vocab else vocab for p in params]
    top_p = [p.top_p for p in params]
    if min(top_k) == vocab and min(top_p) >= 1.0:
        return
    limits = (
        torch.tensor(top_k, device=scores.device)[:, None],
        torch.tensor(top_p, dtype=torch.float64, device=scores.device)[:, None],
    )
    widest_k = max([1, *(k for k in top_k if k < vocab)])
    num_head_tokens = max(widest_k, _HEAD_TOKENS if min(top_p) < 1.0 else 1)
    cut = _find_cut(scores, masses, limits, min(num_head_tokens, vocab))
    masses.masked_fill_(~keep_best(scores, cut), 0)


def _find_cut(
    scores: Tensor, masses: Tensor, limits: tuple[Tensor, Tensor], num_head_tokens: int
) -> TopKTopP:
    """Find each row's cut among its best tokens; with more of them if necessary.

    Args:
        scores: Shape (num_rows, vocab).
        masses: Shape (num_rows, vocab).
        limits: ``top_k`` (the vocabulary's size if off) and ``top_p``, each (num_rows, 1).
        num_head_tokens: Number of tokens to try first; not below any ``top_k`` that is on.
    """
    top_k, top_p = limits
    vocab = scores.shape[1]
    head = scores.topk(num_head_tokens)  # (num_rows, num_head_tokens), best first
    in_k = torch.arange(num_head_tokens, device=scores.device) < top_k
    head_masses = masses.gather(1, head.indices) * in_k
    up_to = head_masses.cumsum(-1)
    totals = torch.where(top_k < vocab, up_to[:, -1:], masses.sum(-1, keepdim=True))
    # A token is kept while those before it have not reached top_p. The first always is, also in
    # a row of NaN, which the sampler refuses afterwards.
    kept = up_to - head_masses < top_p * totals
    counts = torch.where(top_p < 1.0, kept.sum(-1, keepdim=True).clamp(min=1), top_k)
    cut = _cut_after(head.values, counts.clamp(max=num_head_tokens))
    everything = counts == vocab
    cut.floors.masked_fill_(everything, float("-inf"))
    cut.places.masked_fill_(everything, vocab)
    known = everything | (top_k < vocab) | (up_to[:, -1:] >= top_p * totals)
    rows = (~known).nonzero()[:, 0]
    if len(rows) and num_head_tokens < vocab:
        further = min(num_head_tokens * _HEAD_GROWTH, vocab)
        rest = _find_cut(scores[rows], masses[rows], (top_k[rows], top_p[rows]), further)
        cut.floors[rows], cut.places[rows] = rest.floors, rest.places
    return cut


def _cut_after(best: Tensor, counts: Tensor | int) -> TopKTopP:
    """Return the cut that keeps some of the best tokens.

    Args:
        best: Scores, best first, shape (num_rows, num_best).
        counts: How many tokens to keep, 1 .. num_best; one number, or shape (num_rows, 1).
    """
    kept = torch.as_tensor(counts, device=best.device).expand(len(best), 1)
    floors = best.gather(1, kept - 1)
    return TopKTopP(floors, kept - (best > floors).sum(-1, keepdim=True))
