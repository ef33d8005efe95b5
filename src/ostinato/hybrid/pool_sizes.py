"""How many blocks, and how many states, does each group of layers get of a given memory?

An even share gives every group as many blocks. Of a prefix, full attention keeps all and a window
only the end, so a window gets what all running sequences could hold at once, or half of the even
share if that is more (the ends of cached prefixes), and the rest goes to full attention.

A state has the same size whatever came before it. Each running sequence needs one and a spare one,
and of what is cached every ``TOKENS_PER_CHECKPOINT`` tokens get one: so the split follows from what
a state and a token of the model take, 61 MiB and 20 KiB in one, a few KiB of both in another.
"""

from collections.abc import Sequence

from ostinato.core.config import SchedulerConfig
from ostinato.settings import window_blocks

TOKENS_PER_CHECKPOINT = 1024
"""Cached tokens per checkpoint: a prompt of some thousand tokens is kept with one where it parts
from another, one at its end, and one or two turns that follow it."""

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


def split_states(
    num_bytes: int, state_bytes: int, token_bytes: int, scheduling: SchedulerConfig
) -> int:
    """Share memory out between states and the blocks of all groups.

    Args:
        num_bytes: To be shared.
        state_bytes: Of one sequence's state, over all layers.
        token_bytes: Of one token's keys and values, over all layers.
        scheduling: How many sequences of which length run at once.

    Returns:
        Slots for states, at least 2; the bytes left over are for blocks.
    """
    running = min(2 * scheduling.max_num_seqs, num_bytes // 2 // state_bytes)
    rest = num_bytes - running * state_bytes
    checkpoints = rest // (state_bytes + TOKENS_PER_CHECKPOINT * token_bytes)
    return max(2, running + min(checkpoints, most_checkpoints(scheduling)))


def most_checkpoints(scheduling: SchedulerConfig) -> int:
    """Return how many checkpoints go with the tokens of all sequences that could run at once."""
    return -(-scheduling.max_num_seqs * scheduling.max_model_len // TOKENS_PER_CHECKPOINT)


def _most_held(window: int, block_size: int, scheduling: SchedulerConfig) -> int:
    """Return the most blocks of a window that all running sequences could hold at once."""
    step = -(-scheduling.max_num_batched_tokens // block_size)
    return scheduling.max_num_seqs * (window_blocks(window, block_size) + 1) + step
