"""Truncates the distribution of the next token.

``min_p``, then ``top_k``, then ``top_p``, each applied to the result of the one before, as in vLLM.
Of equal scores the lowest ids are kept.

Sources: top-k, Fan et al., arXiv 1805.04833; top-p, Holtzman et al., arXiv 1904.09751; min-p,
Nguyen et al., arXiv 2407.01082.
"""

import torch
from torch import Tensor


def truncated(scores: Tensor, masses: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Return weights without the tokens that ``top_k`` and ``top_p`` exclude.

    Nothing waits for the device.

    Args:
        scores: Logits, shape (num_rows, vocab).
        masses: Weights of the tokens, int64, of the same shape; a higher score never has a lower
            weight. Integers, so that sums are exact in any order and the same in any batch.
        top_k: The vocabulary's size where it is off, shape (num_rows, 1).
        top_p: 1 where it is off, float64, shape (num_rows, 1).
    """
    order = scores.sort(dim=-1, descending=True, stable=True).indices  # equal scores by id
    place = torch.arange(scores.shape[1], device=scores.device)
    ranked = masses.gather(1, order) * (place < top_k)
    up_to = ranked.cumsum(-1)
    # A token is kept while those before it have not reached top_p; the first always is.
    in_p = (up_to - ranked < top_p * up_to[:, -1:]) | (place == 0) | (top_p >= 1.0)
    return masses.scatter(1, order, ranked * in_p)


def top_ids(scores: Tensor, count: int) -> Tensor:
    """Return the ids of the ``count`` best tokens, best first; equal scores by id, lowest first.

    ``torch.topk`` does not define which of several equal scores it returns, so it only gives the
    score of the last token here, and how many tokens have a higher one.

    Args:
        scores: Shape (num_rows, vocab), no NaN.
        count: 0 .. vocab.

    Returns:
        Ids, shape (num_rows, count).
    """
    if count == 0:
        return torch.zeros(len(scores), 0, dtype=torch.int64, device=scores.device)
    best = scores.topk(count).values  # (num_rows, count), best first
    floors = best[:, -1:]
    places = count - (best > floors).sum(-1, keepdim=True)
    level = scores == floors
    kept = (scores > floors) | (level & (level.cumsum(-1, dtype=torch.int32) <= places))
    ids = kept.nonzero()[:, 1].view(len(scores), count)  # ascending in each row
    order = scores.gather(1, ids).sort(descending=True, stable=True).indices
    return ids.gather(1, order)
