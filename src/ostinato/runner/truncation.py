"""Leaves out tokens that may not be drawn.

``min_p``, then ``top_k``, then ``top_p``, each on what the one before has left, as in vLLM. The
last two keep the most likely tokens down to some point, so that they are two numbers per row: the
score of the last token that stays, and how many of the tokens with just this score stay::

    scores    9   7   4   1   4   4        floor 4, places 2
    stays     x   x   x       x            at the floor, the lowest ids

Neither number needs the vocabulary in order: the tokens that matter are among the first few. Where
``top_p`` reaches further than ``_HEAD_TOKENS``, those rows alone are looked at again, further down.

Sources: top-k, Fan et al., arXiv 1805.04833; top-p, Holtzman et al., arXiv 1904.09751; min-p,
Nguyen et al., arXiv 2407.01082.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ostinato.core.sampling_params import SamplingParams

_HEAD_TOKENS = 1024
"""Tokens put in order for ``top_p`` at first; trained models seldom spread 0.95 over more."""

_HEAD_GROWTH = 16
"""How many times more tokens the next look takes in, for the rows that need it."""


@dataclass(frozen=True, slots=True)
class TopKTopP:
    """Where the list of tokens by score ends.

    Attributes:
        floors: Score of the last token that stays, shape (num_rows, 1).
        places: How many of the tokens with this score stay, shape (num_rows, 1).
    """

    floors: Tensor
    places: Tensor


def keep_best(scores: Tensor, cut: TopKTopP) -> Tensor:
    """Mark the tokens above each row's floor and, up to its places, those at the floor.

    Args:
        scores: Shape (num_rows, vocab).
        cut: Where to end.

    Returns:
        Booleans, shape (num_rows, vocab).

    Cost: O(num_rows * vocab), nothing is sorted.
    """
    level = scores == cut.floors
    return (scores > cut.floors) | (level & (level.cumsum(-1, dtype=torch.int32) <= cut.places))


def top_ids(scores: Tensor, count: int) -> Tensor:
    """Return the ids of the best tokens, best first; among equals the lowest id first.

    ``torch.topk`` does not say which of several equal scores it returns, so it only finds the
    floor here.

    Args:
        scores: Shape (num_rows, vocab), no NaN.
        count: How many, 0 .. vocab.

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
    """Take their mass from the tokens that ``top_k`` and ``top_p`` leave out.

    Args:
        scores: Logits, shape (num_rows, vocab).
        masses: What a token may be drawn by, int64, of the same shape; higher scores have no
            less. Integers, so that sums are exact in any order and the same in any batch.
        params: One per row.

    Effects: writes zeros into ``masses``.
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
    """Find each row's cut, looking at its best tokens and, if need be, at more of them.

    Args:
        scores: Shape (num_rows, vocab).
        masses: Shape (num_rows, vocab).
        limits: ``top_k`` (the vocabulary's size if off) and ``top_p``, each (num_rows, 1).
        num_head_tokens: How many tokens to look at first; no ``top_k`` that is on is above.
    """
    top_k, top_p = limits
    vocab = scores.shape[1]
    head = scores.topk(num_head_tokens)  # (num_rows, num_head_tokens), best first
    in_k = torch.arange(num_head_tokens, device=scores.device) < top_k
    head_masses = masses.gather(1, head.indices) * in_k
    up_to = head_masses.cumsum(-1)
    totals = torch.where(top_k < vocab, up_to[:, -1:], masses.sum(-1, keepdim=True))
    # A token stays while those before it have not reached top_p. The first always does, also in
    # a row of NaN, which the sampler refuses afterwards.
    stays = up_to - head_masses < top_p * totals
    counts = torch.where(top_p < 1.0, stays.sum(-1, keepdim=True).clamp(min=1), top_k)
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
