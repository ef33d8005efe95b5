"""How many blocks and states each group of layers gets of a given memory.

An even share gives every group the same number of blocks. Full attention keeps all of a prefix and
a window only the end, so a window gets what all running sequences could hold at once, or half of
the even share if that is more (the ends of cached prefixes), and the rest goes to full attention.

Memory is split between states and blocks such that traffic fills both at the same time: a
checkpoint of a fixed size per interval of new tokens, and the blocks of those tokens.
"""

from collections.abc import Sequence

from ostinato.core.config import SchedulerConfig
from ostinato.core.errors import ConfigError
from ostinato.settings import window_blocks

_PREFIXES_PER_BLOCK = 4
"""Blocks of group 0 per block of a window, where group 0 has no bytes and only lists prefixes."""

TOKENS_PER_CHECKPOINT = 4096
"""New tokens per checkpoint until traffic is measured: between long prompts and short turns."""


def split_pools(
    even: int,
    block_bytes: Sequence[int],
    windows: Sequence[int],
    block_size: int,
    scheduling: SchedulerConfig,
) -> tuple[int, list[int]]:
    """Split memory between the groups of a model.

    Args:
        even: Blocks of each group if all got the same number.
        block_bytes: Of one block, for full attention first, then for each window.
        windows: Tokens that each window sees.
        block_size: Tokens per block.
        scheduling: How many sequences and tokens run at once.

    Returns:
        Blocks of full attention, and those of each window.
    """
    if not block_bytes[0]:
        return even * _PREFIXES_PER_BLOCK, [even] * len(windows)
    held = [_max_held(window, block_size, scheduling) for window in windows]
    sizes = [min(even, max(even // 2, blocks)) for blocks in held]
    pairs = zip(sizes, block_bytes[1:], strict=True)
    left = sum((even - size) * each for size, each in pairs)
    return even + left // block_bytes[0], sizes


def split_states(
    memory_bytes: int,
    block_bytes: int,
    state_bytes: int,
    block_size: int,
    scheduling: SchedulerConfig,
    tokens_per_checkpoint: int = TOKENS_PER_CHECKPOINT,
) -> tuple[int, int]:
    """Split memory between blocks and states.

    Each running sequence gets two slots first: its own, and one for the state at the end of its
    answer. If that took more than half of the memory, fewer will run at once. The rest is split
    such that both pools fill at the same time.

    Args:
        memory_bytes: For all.
        block_bytes: Of one block, in all layers that keep tokens; 0 if none does.
        state_bytes: Of one state, in all layers that keep one.
        block_size: Tokens per block.
        scheduling: How many sequences run at once.
        tokens_per_checkpoint: New tokens per checkpoint, as counted: published blocks times
            block size over checkpoints kept.

    Returns:
        Blocks, and slots for states; without ``block_bytes`` as many blocks as list the prefixes
        of all states.

    Raises:
        ConfigError: Not one block and the states of one sequence fit.
    """
    min_bytes = 2 * state_bytes + block_bytes
    if memory_bytes < min_bytes:
        raise ConfigError(
            f"kv_cache_memory={memory_bytes:,} bytes do not hold a block and two states of "
            f"{state_bytes:,} bytes, which one sequence needs: give at least {min_bytes:,}"
        )
    running = min(2 * scheduling.max_num_seqs, max(2, memory_bytes // (2 * state_bytes)))
    left = memory_bytes - running * state_bytes
    if not block_bytes:
        slots = running + left // state_bytes
        return max(1, slots * tokens_per_checkpoint // block_size), slots
    per_checkpoint = state_bytes + tokens_per_checkpoint * block_bytes // block_size
    slots = running + left // per_checkpoint
    return max(1, (memory_bytes - slots * state_bytes) // block_bytes), slots


def _max_held(window: int, block_size: int, scheduling: SchedulerConfig) -> int:
    """Return the most blocks of a window that all running sequences could hold at once."""
    step = -(-scheduling.max_num_batched_tokens // block_size)
    return scheduling.max_num_seqs * (window_blocks(window, block_size) + 1) + step
