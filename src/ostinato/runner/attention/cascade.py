"""Reads a shared run once for all rows that see it.

All rows of all sequences that share the run are stacked, heads folded in, so that each key/value
head is one product (Hydragen, Juravsky et al., arXiv 2402.05099)::

    rows of A, B, C, ...   (1, num_kv_heads, heads per kv head * rows, key_dim)
    keys of the run        (1, num_kv_heads, num_keys, key_dim)

Every row sees every key, so there is no mask. Long runs are read in tiles.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from ostinato.runner.attention.backend import AttentionStep, AttentionStyle
from ostinato.runner.attention.folding import fold_gqa, unfold_gqa
from ostinato.runner.attention.read_plan import ReadLimits, SharedRead
from ostinato.runner.attention.softmax import Part, RunningSoftmax
from ostinato.runner.kv.kv_store import LayerKV


def read_run(
    step: AttentionStep,
    layer: int,
    read: SharedRead,
    queries: Tensor,
    style: AttentionStyle,
    limits: ReadLimits,
) -> Iterator[Part]:
    """Attend from rows to a run.

    Args:
        step: Has the store.
        layer: Index of the layer.
        read: The run and its rows.
        queries: Queries of all sharers, shape (num_sharers, num_heads, key_dim).
        style: Parameters of attention; sinks are ignored, since the tails count them.
        limits: How many keys to read at a time.

    Yields:
        Partial results of shape (1, num_heads, num_rows, ...), to be merged.
    """
    num_heads = queries.shape[1]
    rows = queries.index_select(0, read.rows).transpose(0, 1)[None]
    if knows_log_sums(queries, step.store.spec.layers[layer], style):
        for keys, values in _tiles(step, layer, read, queries.dtype, limits):
            yield flash(fold_gqa(rows, keys.shape[1]), keys, values, style, num_heads)
        return
    precision = torch.promote_types(queries.dtype, torch.float32)
    softmax: RunningSoftmax | None = None
    for keys, values in _tiles(step, layer, read, precision, limits):
        if softmax is None:
            folded = fold_gqa(rows.to(precision), keys.shape[1])
            softmax = RunningSoftmax.start(folded, values.shape[3], num_heads, None)
        softmax.add(scores_of(folded, keys, style), values)
    assert softmax is not None, "no run is empty"
    yield softmax.result(num_heads)


def _tiles(
    step: AttentionStep, layer: int, read: SharedRead, dtype: torch.dtype, limits: ReadLimits
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield keys and values of some blocks at a time, (1, num_kv_heads, keys, dim) each."""
    num_blocks = max(1, limits.max_keys // step.metadata.block_size)
    for blocks in read.blocks.split(num_blocks, dim=1):
        keys, values = step.store.gather(layer, blocks)
        yield keys.transpose(1, 2).to(dtype), values.transpose(1, 2).to(dtype)


def knows_log_sums(queries: Tensor, layer: LayerKV, style: AttentionStyle) -> bool:
    """Return whether the fused kernel that also returns log-sum-exps supports a layer."""
    return queries.device.type == "cpu" and style.plain and layer.key_dim == layer.value_dim


def flash(
    folded: Tensor,
    keys: Tensor,
    values: Tensor,
    style: AttentionStyle,
    num_heads: int,
    mask: Tensor | None = None,
) -> Part:
    """Attend in one call of torch's FlashAttention for CPUs, which returns log-sum-exps.

    Args:
        folded: Shape (sequences, num_kv_heads, rows, dim).
        keys: Shape (sequences, num_kv_heads, keys, dim).
        values: Likewise.
        style: Parameters of attention.
        num_heads: Query heads.
        mask: Added to the scores, shape (sequences, 1, rows, keys).
    """
    mean, log_sum = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        folded, keys, values, 0.0, False, attn_mask=mask, scale=style.scale
    )
    return Part(unfold_gqa(mean, num_heads), unfold_gqa(log_sum, num_heads))


def scores_of(
    folded: Tensor, keys: Tensor, style: AttentionStyle, seen: Tensor | None = None
) -> Tensor:
    """Return scores, shape (sequences, num_kv_heads, rows, keys).

    Args:
        folded: Queries, shape (sequences, num_kv_heads, rows, dim).
        keys: Shape (sequences, num_kv_heads, keys, dim).
        style: Parameters of attention.
        seen: Mask of the keys that each query sees, shape (sequences, queries, keys); None is all.
    """
    scores = (folded @ keys.transpose(2, 3)).mul_(style.scale)
    if style.soft_cap is not None:
        scores.div_(style.soft_cap).tanh_().mul_(style.soft_cap)
    if seen is not None:
        by_query = scores.view(*scores.shape[:2], -1, *seen.shape[1:])
        by_query.masked_fill_(~seen[:, None, None], -torch.inf)
    return scores
