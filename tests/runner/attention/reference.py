"""Attention again, slow and obvious: one query, one head, one key at a time, in float64."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ostinato.runner.attention.backend import AttentionStyle


def attend_one(query: Tensor, keys: Tensor, values: Tensor, style: AttentionStyle) -> Tensor:
    """Let the last token of a sequence look back.

    Args:
        query: Shape (num_heads, key_dim).
        keys: Of the whole sequence, shape (num_tokens, num_kv_heads, key_dim).
        values: Likewise, shape (num_tokens, num_kv_heads, value_dim).
        style: How scores are made.

    Returns:
        Shape (num_heads, value_dim).
    """
    num_heads, num_kv_heads = len(query), keys.shape[1]
    first = 0 if style.window is None else max(0, len(keys) - style.window)
    heads = []
    for head in range(num_heads):
        kv_head = head * num_kv_heads // num_heads
        scores = [_score(query[head], key[kv_head], style) for key in keys[first:]]
        sink = None if style.sinks is None else float(style.sinks[head])
        weights = _softmax(scores, sink)
        heads.append(sum(w * v for w, v in zip(weights, values[first:, kv_head], strict=True)))
    return torch.stack(heads)


def attend_sequence(queries: Tensor, keys: Tensor, values: Tensor, style: AttentionStyle) -> Tensor:
    """Let the last tokens of a sequence look back: the same with matrix products.

    Args:
        queries: Of its last tokens, shape (num_queries, num_heads, key_dim).
        keys: Of the whole sequence, shape (num_tokens, num_kv_heads, key_dim).
        values: Likewise, shape (num_tokens, num_kv_heads, value_dim).
        style: How scores are made.

    Returns:
        Shape (num_queries, num_heads, value_dim).
    """
    (num_queries, num_heads, _), (num_keys, num_kv_heads, _) = queries.shape, keys.shape
    of_head = torch.arange(num_heads) * num_kv_heads // num_heads
    scores = style.scale * torch.einsum("qhd,khd->hqk", queries, keys[:, of_head])
    if style.soft_cap is not None:
        scores = style.soft_cap * torch.tanh(scores / style.soft_cap)
    distance = torch.arange(num_keys - num_queries, num_keys)[:, None] - torch.arange(num_keys)
    hidden = distance < 0
    if style.window is not None:
        hidden |= distance >= style.window
    scores = scores.masked_fill(hidden, -math.inf)
    if style.sinks is not None:
        sinks = style.sinks.double()[:, None, None].expand(-1, num_queries, 1)
        scores = torch.cat((scores, sinks), dim=2)
    weights = scores.softmax(dim=2)[:, :, :num_keys]
    return torch.einsum("hqk,khd->qhd", weights, values[:, of_head])


def _score(query: Tensor, key: Tensor, style: AttentionStyle) -> float:
    score = style.scale * float(query @ key)
    return score if style.soft_cap is None else style.soft_cap * math.tanh(score / style.soft_cap)


def _softmax(scores: Sequence[float], sink: float | None) -> list[float]:
    """A sink takes its share of the weight and brings nothing."""
    all_scores = [*scores] if sink is None else [*scores, sink]
    weights = [math.exp(score - max(all_scores)) for score in all_scores]
    return [weight / sum(weights) for weight in weights[: len(scores)]]
