"""Gathers scattered blocks into keys and values that kernels can read."""

import torch
from torch import Tensor

from ostinato.runner.attention.backend import AttentionStep
from ostinato.runner.attention.read_plan import ReadBatch


def gather(
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


def gather_run(
    step: AttentionStep, layer: int, blocks: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Fetch blocks that are full, (1, num_kv_heads, keys, dim) each.

    Args:
        step: From whose store.
        layer: Which layer.
        blocks: Block ids, shape (1, num_blocks).
        dtype: In which they are wanted.
    """
    keys, values = step.store.gather(layer, blocks)
    return keys.transpose(1, 2).to(dtype), values.transpose(1, 2).to(dtype)
