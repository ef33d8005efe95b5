"""How many blocks does each group of layers get?

A number of blocks is taken as it is, for every group. Bytes, given or a share of the machine's
memory, are shared out as ``hybrid.pool_sizes`` says.
"""

from dataclasses import dataclass

import torch

from ostinato.core.config import SchedulerConfig, WindowConfig, window_blocks
from ostinato.engine.config import EngineConfig
from ostinato.hybrid.pool_sizes import split_pools
from ostinato.runner.kv_store import KVSpec
from ostinato.runner.layer_groups import LayerGroups
from ostinato.runner.memory import num_blocks_for


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
        full = even
        sizes = [max(even, window_blocks(w, config.block_size)) for w in groups.windows]
    else:
        full, sizes = split_pools(even, per_block, groups.windows, config.block_size, scheduling)
    windows = zip(groups.windows, sizes, strict=True)
    return PoolSizes(full, tuple(WindowConfig(window, size) for window, size in windows))
