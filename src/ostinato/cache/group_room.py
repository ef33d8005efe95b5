"""How many tokens would fit?

Asked before anything is changed (law 6). Blocks that a sequence would hold are free until it does,
so they are taken off what is free; and a source of a copy likewise, if nobody holds it::

    free = scratch + evictable - matched and idle - the idle source of a copy
"""

from ostinato.cache.block_table import BlockTable
from ostinato.cache.groups import Groups
from ostinato.cache.prefix_index import PrefixMatch
from ostinato.core.identity import PrefixKey


def room_to_admit(groups: Groups, key: PrefixKey, match: PrefixMatch, num_tokens: int) -> int:
    """Return how many tokens could have slots in every group if a match were held.

    Group 0 gives slots to the whole prompt or to none of it; windows as far as they go.

    Args:
        groups: What is cached, and where.
        key: The sequence.
        match: What would be held of it.
        num_tokens: How many slots are wanted.

    Returns:
        At most ``num_tokens``; 0 if group 0 lacks blocks. Effects: none.
    """
    held = len(match.blocks)
    missing = -(-len(key.tokens) // groups.block_size) - held
    if missing > groups.pool.num_scratch or groups.config.allotments:
        free = groups.allocators[0].num_free_for(key.identity.owner)
        free -= groups.index.num_idle_blocks(match)
        if match.tail is not None and not match.tail.entry.ref_count:
            free -= 1
        if missing > free:
            return 0
    if not groups.windows:
        return num_tokens
    tenant = key.identity.owner
    for number, window in enumerate(groups.windows):
        free = groups.allocators[number + 1].num_free_for(tenant)
        free -= window.num_idle_blocks(key, held)
        if match.window_tails and not match.window_tails[number].ref_count:
            free -= 1
        num_tokens = min(num_tokens, (held + free) * groups.block_size)
    return num_tokens


def room_to_grow(groups: Groups, table: BlockTable, num_tokens: int) -> int:
    """Return how many tokens could have slots in every group, at most ``num_tokens``."""
    for allocator, blocks in zip(groups.allocators, table.groups, strict=True):
        if groups.blocks_for(num_tokens) > len(blocks):
            free = allocator.num_free_for(table.tenant)
            num_tokens = min(num_tokens, (len(blocks) + free) * groups.block_size)
    return num_tokens
