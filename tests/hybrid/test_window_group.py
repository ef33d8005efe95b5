"""What a sliding window needs at a boundary: every pattern of cached blocks against one rule.

Blocks are published by really computing a chain, and lost by really evicting them.
"""

from itertools import product

import pytest

from ostinato.assembly import build_cache
from ostinato.cache.manager import CacheManager
from ostinato.core.identity import Identity, PrefixKey
from ostinato.settings import PrefixCacheConfig, WindowConfig, window_blocks
from tests.support.cache.cache_views import held_windows, windows_of

pytestmark = pytest.mark.one_case_in(3)

ROOM = 40
"""Blocks of each window pool: enough that nothing is evicted by accident."""


def longest(full: int, windows: list[tuple[int, set[int]]], size: int) -> int:
    """Say how long a hit is, in blocks.

    The longest prefix of which full attention has every block, and each window has the last
    ceil((window - 1) / size) blocks before its end, or all if there are fewer.
    """
    for end in range(full, -1, -1):
        if all(
            cached.issuperset(range(max(0, end - -(-(window - 1) // size)), end))
            for window, cached in windows
        ):
            return end
    raise AssertionError("nothing is a prefix of everything")


def chain(index: str, size: int, windows: list[int], num_blocks: int, full: int) -> CacheManager:
    """Compute a chain of blocks, and evict its tail from full attention beyond ``full`` blocks."""
    configs = tuple(WindowConfig(window, ROOM) for window in windows)
    manager = build_cache(PrefixCacheConfig(num_blocks, size, index=index, windows=configs)).manager
    _serve(manager, range(num_blocks * size), writes=True)
    if full < num_blocks:
        _serve(manager, [999] * ((num_blocks - full) * size), writes=False)
    return manager


def _serve(manager: CacheManager, tokens, writes: bool) -> None:
    key = PrefixKey(Identity(), tokens)
    admitted = manager.admit(key, manager.match(key, 0), writes)
    assert admitted is not None
    manager.publish(admitted[0], len(key))
    manager.commit()
    manager.release(admitted[0], len(key))


def evict_all_but(manager: CacheManager, kept: list[set[int]]) -> None:
    """Evict from each window the places of the chain that are not to stay."""
    size, gone = manager.block_size, set()
    for window, places in zip(windows_of(manager), kept, strict=True):
        gone |= {id(c) for c in window.copies() if _first_token(c) // size not in places}
    manager.remove(lambda entry: id(entry) in gone)


def _first_token(copy) -> int:
    """The tokens of the chain count up from 0, so a block's first one tells its place."""
    return int.from_bytes(copy.content.name[:4], "little")


def subsets(num_blocks: int) -> list[set[int]]:
    """Return every pattern of cached and uncached blocks."""
    flags = product([False, True], repeat=num_blocks)
    return [{place for place, cached in enumerate(each) if cached} for each in flags]


@pytest.mark.parametrize(
    ("size", "window", "num_blocks"),
    [
        *[(1, window, 5) for window in (1, 2, 3, 4, 6)],
        *[(2, window, 5) for window in (1, 2, 3, 4, 5, 6, 9)],
        *[(3, window, 5) for window in (1, 2, 4, 5, 7, 8)],
        (2, 5, 7),
    ],
)
def test_a_hit_is_the_longest_prefix_valid_in_every_group(index, size, window, num_blocks):
    """All patterns of one window, under every depth of full attention."""
    key = PrefixKey(Identity(), range(num_blocks * size + 1))
    for full in range(num_blocks + 1):
        for kept in subsets(num_blocks):
            manager = chain(index, size, [window], num_blocks, full)
            evict_all_but(manager, [kept])
            expected = longest(full, [(window, kept)], size)
            assert manager.match(key).num_tokens == expected * size, (full, kept)


@pytest.mark.parametrize(("size", "windows"), [(2, [3, 6]), (2, [2, 4]), (1, [2, 4])])
def test_a_hit_is_valid_in_two_windows_at_once(index, size, windows):
    """All patterns of both, in chains of four blocks."""
    key = PrefixKey(Identity(), range(4 * size + 1))
    for full, first, second in product((3, 4), subsets(4), subsets(4)):
        manager = chain(index, size, windows, 4, full)
        evict_all_but(manager, [first, second])
        expected = longest(full, list(zip(windows, [first, second], strict=True)), size)
        assert manager.match(key).num_tokens == expected * size, (full, first, second)


def test_whatever_hits_can_be_held_and_gone_on_from(index):
    """After each pattern the hit is admitted: its window is held, and only that."""
    size, window, num_blocks = 2, 5, 5
    for kept in subsets(num_blocks):
        manager = chain(index, size, [window], num_blocks + 1, num_blocks)
        evict_all_but(manager, [kept])
        key = PrefixKey(Identity(), range(num_blocks * size + 1))
        match = manager.match(key)
        table, copies = manager.admit(key, match)
        held = [
            place for place, copy in enumerate(held_windows(table)[0].copies) if copy is not None
        ]
        end = len(match.blocks)
        assert held == list(range(max(0, end - 2), end)) and not copies
        manager.publish(table, len(key))
        manager.commit()
        manager.release(table, len(key))
        manager.check()


def test_the_first_block_that_is_still_needed():
    """A window of 9 in blocks of 4: token 14 sees 6 to 14, so it needs block 1 and later."""
    config = PrefixCacheConfig(9, 4, windows=(WindowConfig(9, 9),))
    window = windows_of(build_cache(config).manager)[0]
    assert window.first_needed(14) == 1
    assert [window.first_needed(n) for n in (0, 8, 11, 12, 15, 16)] == [0, 0, 0, 1, 1, 2]


@pytest.mark.parametrize("size", [1, 2, 3, 4, 16])
@pytest.mark.parametrize("window", [1, 2, 3, 4, 5, 8, 16, 17, 33])
def test_what_one_sequence_needs_is_what_the_least_pool_has(window, size):
    """At any length, from the first block needed to the one of the next token."""
    config = PrefixCacheConfig(9, size, windows=(WindowConfig(window, 99),))
    group = windows_of(build_cache(config).manager)[0]
    most = max(length // size - group.first_needed(length) + 1 for length in range(200))
    assert most == window_blocks(window, size)
