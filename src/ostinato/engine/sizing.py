"""How many blocks does each group of layers get?

A number of blocks is taken as it is, for every group. Bytes, given or a share of the
machine's memory, are shared out: of a prefix, group 0 keeps all and a window only the end. So
windows get what all running sequences could hold at once, or half of an even share if that is
more (the ends of cached prefixes), and what is left goes to group 0.
"""

from dataclasses import dataclass

import torch

from ostinato.core.config import SchedulerConfig, WindowConfig, window_blocks
from ostinato.engine.config import EngineConfig
from ostinato.runner.kv_store import KVSpec
from ostinato.runner.layer_groups import LayerGroups
from ostinato.runner.memory import num_blocks_for

_PREFIXES_PER_BLOCK = 4
"""Blocks of group 0 per block of a window, where group 0 has no bytes and only lists prefixes."""


@dataclass(frozen=True, slots=True)
class PoolSizes:
    """Blocks per group.

    Attributes:
        num_blocks: Of group 0.
        windows: Of each window.
    """

    num_blocks: int
    windows: tuple[WindowConfig, ...] = ()

    @property
    def all(self) -> list[int]:
        """Blocks of every group, in order."""
        return [self.num_blocks, *(window.num_blocks for window in self.windows)]


def size_pools(
    config: EngineConfig,
    scheduling: SchedulerConfig,
    spec: KVSpec,
    groups: LayerGroups,
    dtype: torch.dtype,
    device: torch.device,
) -> PoolSizes:
    """Share memory out among the groups of a model.

    Raises:
        ConfigError: Not even one block fits, or not one sequence's window.
    """
    per_block = [
        groups.bytes_per_token(spec, group, dtype) * config.block_size
        for group in range(groups.num_groups)
    ]
    even = num_blocks_for(
        bytes_per_block=sum(per_block),
        block_size=config.block_size,
        max_num_seqs=scheduling.max_num_seqs,
        max_model_len=scheduling.max_model_len,
        num_blocks=config.num_blocks,
        kv_cache_memory=config.kv_cache_memory,
        device=device,
    )
    if config.num_blocks is not None:
        # As many as were asked for, but never fewer than one sequence needs to go on.
        least = [window_blocks(window, config.block_size) for window in groups.windows]
        sizes = [max(even, blocks) for blocks in least]
    elif per_block[0]:
        held = [_most_held(window, config.block_size, scheduling) for window in groups.windows]
        sizes = [min(even, max(even // 2, blocks)) for blocks in held]
    else:
        sizes = [even] * len(groups.windows)
    windows = zip(groups.windows, sizes, strict=True)
    return PoolSizes(
        _full_blocks(config, even, per_block, sizes),
        tuple(WindowConfig(window, size) for window, size in windows),
    )


def _most_held(window: int, block_size: int, scheduling: SchedulerConfig) -> int:
    """Return the most blocks of a window that all running sequences could hold at once."""
    step = -(-scheduling.max_num_batched_tokens // block_size)
    return scheduling.max_num_seqs * (window_blocks(window, block_size) + 1) + step


def _full_blocks(config: EngineConfig, even: int, per_block: list[int], windows: list[int]) -> int:
    """Give group 0 what the windows left."""
    if config.num_blocks is not None:
        return even
    if not per_block[0]:
        return even * _PREFIXES_PER_BLOCK
    pairs = zip(windows, per_block[1:], strict=True)
    left = sum((even - size) * each for size, each in pairs)
    return even + left // per_block[0]
