"""Attention again, slow and obvious: one sequence at a time, with matrix products, in float64."""

import math

import torch
from torch import Tensor

from ostinato.runner.attention.backend import AttentionStyle


def attend_sequence(queries: Tensor, keys: Tensor, values: Tensor, style: AttentionStyle) -> Tensor:
    """Let the last tokens of a sequence look back.

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
