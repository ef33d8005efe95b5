"""How many blocks does each group of layers get of a given memory?

An even share gives every group as many blocks. Of a prefix, full attention keeps all and a window
only the end, so a window gets what all running sequences could hold at once, or half of the even
share if that is more (the ends of cached prefixes), and the rest goes to full attention.
"""

from collections.abc import Sequence

from ostinato.core.config import SchedulerConfig
from ostinato.settings import window_blocks

_PREFIXES_PER_BLOCK = 4
"""Blocks of group 0 per block of a window, where group 0 has no bytes and only lists prefixes."""


def split_pools(
    even: int,
    block_bytes: Sequence[int],
    windows: Sequence[int],
    block_size: int,
    scheduling: SchedulerConfig,
) -> tuple[int, list[int]]:
    """Share memory out among the groups of a model.

    Args:
        even: Blocks of each group, were all to get as many.
        block_bytes: Of one block, for full attention first, then for each window.
        windows: Tokens that each window sees.
        block_size: Tokens per block.
        scheduling: How many sequences and tokens run at once.

    Returns:
        Blocks of full attention, and those of each window.
    """
    if not block_bytes[0]:
        return even * _PREFIXES_PER_BLOCK, [even] * len(windows)
    held = [_most_held(window, block_size, scheduling) for window in windows]
    sizes = [min(even, max(even // 2, blocks)) for blocks in held]
    pairs = zip(sizes, block_bytes[1:], strict=True)
    left = sum((even - size) * each for size, each in pairs)
    return even + left // block_bytes[0], sizes


def _most_held(window: int, block_size: int, scheduling: SchedulerConfig) -> int:
    """Return the most blocks of a window that all running sequences could hold at once."""
    step = -(-scheduling.max_num_batched_tokens // block_size)
    return scheduling.max_num_seqs * (window_blocks(window, block_size) + 1) + step
