"""How long is the prefix that is cached in every group?

The index of group 0 says which prefixes exist; each window says at which of their ends it could
go on. A window that cannot shortens the prefix, which another window may then not like::

    group 0         ABCD EFGH IJKL MNOP     16 tokens
    window of 6               IJKL          12: MNOP is gone, and what it looks back to is there
    window of 12    ABCD EFGH IJKL          12 again: that is the hit
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ostinato.cache.prefix_index import PrefixIndex, PrefixMatch
from ostinato.cache.window_group import WindowGroup
from ostinato.core.identity import PrefixKey


def common_match(
    index: PrefixIndex[Any], windows: Sequence[WindowGroup], key: PrefixKey, num_tokens: int
) -> PrefixMatch:
    """Find the longest cached prefix that is of use in group 0 and in every window; no effects.

    Args:
        index: Of group 0.
        windows: At least one.
        key: The sequence.
        num_tokens: How many of its tokens may hit.

    Returns:
        The match; its tail, if any, is one that every window has.
    """
    match = index.match(key, num_tokens)
    end = _common_end(windows, key, len(match.blocks))
    if end < len(match.blocks):
        return index.match(key, end * match.block_size)
    if match.tail is None:
        return match
    name = index.tail_name(match.tail)
    tails = tuple(window.find_tail(key, end, name) for window in windows)
    if None in tails:
        return index.match(key, end * match.block_size)
    return replace(match, window_tails=tails)


def without_tail(match: PrefixMatch) -> PrefixMatch:
    """Return a match without what would be copied."""
    return replace(match, tail=None, window_tails=())


def _common_end(windows: Sequence[WindowGroup], key: PrefixKey, end: int) -> int:
    """Return the longest prefix, in blocks, that every window can go on from."""
    while True:
        before = end
        for window in windows:
            end = window.longest_hit(key, end)
        if end == before:
            return end
