"""What sequences hold when some layers see a window only: pictures of both groups.

Blocks of four; a window of five tokens needs the block before the one that is being filled. A
hit has to be valid in every group.
"""

import pytest

from ostinato.core.errors import ConfigError
from ostinato.core.identity import ImageSpan
from ostinato.settings import PrefixCacheConfig, TenantShare, WindowConfig
from ostinato.tenants.terms import PINNED, LeaseStatus
from tests.support.cache.cache_views import prefix_key, windows_of
from tests.support.cache.tiny_cache import TinyCache, tiny_cache
from tests.support.cache.tiny_scheduler import tiny_scheduler

ALPHABET = "ABCDEFGHIJKLMNOPQRST"


def windowed(index: str, *windows: tuple[int, int], num_blocks: int = 12, **more) -> TinyCache:
    """Return a cache with windows, each a size and a number of blocks."""
    configs = tuple(WindowConfig(*window) for window in windows)
    return tiny_cache(num_blocks, index=index, windows=configs, **more)


def scan(cache: TinyCache, group_blocks: int) -> None:
    """Push everything out of window pools of so many blocks, and nothing out of group 0."""
    cache.serve("z" * 4 * group_blocks, writes=False)


# --- what leaves a window, and when ---------------------------------------------------------


def test_blocks_leave_the_window_when_the_step_has_run(index):
    """The queries of the step still saw them; of the next step, none does."""
    cache = windowed(index, (5, 6))
    cache.plan("one", "ABCDEFGHIJ")
    assert cache.window_blocks("one") == "0 1 2"
    cache.commit()
    assert cache.window_blocks("one") == ". 1 2", "token 10 sees tokens 6 to 10"
    assert cache.window_picture().startswith("ABCD:evictable EFGH:held IJ:private free")
    assert cache.picture().startswith("ABCD:held EFGH:held IJ:private"), "group 0 keeps all"


def test_a_block_leaves_with_the_very_token_that_no_longer_sees_it(index):
    """With a window of five, token 12 sees 8 to 12: the block of tokens 4 to 7 goes then."""
    cache = windowed(index, (5, 6))
    cache.admit("one", "ABCDEFGHIJ")
    cache.append("one", "K")
    assert cache.window_blocks("one") == ". 1 2"
    cache.append("one", "L")
    assert cache.window_blocks("one") == ". . 2", "twelve tokens computed"


def test_blocks_that_leave_together_go_deepest_first(index):
    """So that of a window that is cut short by evictions, the beginning is left."""
    cache = windowed(index, (1, 6))
    cache.admit("one", "ABCDEFGHIJKL")
    window = windows_of(cache.manager)[0]
    assert list(window.pool.free_order()) == [3, 4, 5, 2, 1, 0]


def test_private_blocks_that_leave_are_free_at_once(index):
    """Who does not write leaves nothing behind, in no group."""
    cache = windowed(index, (5, 6))
    cache.admit("one", "ABCDEFGHIJ", writes=False)
    assert cache.window_picture().count("free") == 4
    assert cache.window_blocks("one") == ". 1 2"


# --- hits -----------------------------------------------------------------------------------


def test_a_hit_holds_the_window_before_its_end_and_null_blocks_before_that(index):
    cache = windowed(index, (5, 8))
    cache.serve("ABCDEFGHIJKL")
    reader = cache.admit("reader", "ABCDEFGHIJKLM")
    assert reader.num_shared == 12
    assert cache.window_blocks("reader").split()[:2] == [".", "."]
    assert cache.window_picture().startswith("ABCD:evictable EFGH:evictable IJKL:held M:private")


def test_where_the_window_is_gone_a_hit_ends_without_harm_to_group_0(index):
    """Group 0 still has it all; who computes it anew makes it whole again."""
    cache = windowed(index, (5, 3), num_blocks=20)
    cache.serve("ABCDEFGH")
    scan(cache, 3)
    assert cache.match("ABCDEFGHI").num_tokens == 0
    assert "ABCD:evictable EFGH:evictable" in cache.picture()

    again = cache.serve("ABCDEFGH")
    assert again.num_computed_here == 8
    assert cache.match("ABCDEFGHI").num_tokens == 8
    if index == "radix":
        assert cache.picture().count("ABCD") == 1, "the duplicate in group 0 was given back"


# --- tails ----------------------------------------------------------------------------------


def test_a_tail_is_copied_in_every_group(index):
    cache = windowed(index, (5, 8))
    cache.serve("ABCDEFGH")
    sequence = cache.plan("other", "ABCDEFXY")
    assert (sequence.num_shared, sequence.num_copied) == (4, 2)
    tables = [cache.blocks("other")[1], int(cache.window_blocks("other").split()[1])]
    assert [(run.group, run.source, run.target, run.num_tokens) for run in sequence.copies] == [
        (0, 4, 4 * tables[0], 2),
        (1, 4, 4 * tables[1], 2),
    ]
    cache.commit()


def test_a_tail_is_copied_only_if_the_window_has_the_block_too(index):
    """EFGH is gone from the window: only ABCD hits, and nothing is copied in group 0 either."""
    cache = windowed(index, (5, 4), num_blocks=20)
    cache.serve("ABCDEFGH")
    cache.admit("keeps", "ABCDE", reads=True)
    scan(cache, 2)
    assert "EFGH:evictable" not in cache.window_picture()
    match = cache.match("ABCDEFXY")
    assert (match.num_shared_tokens, match.num_copied_tokens) == (4, 0)


def test_a_block_with_an_image_counts_its_tokens_and_not_its_extras(index):
    """What is live, for an erasure that overwrites the rest, ends with the block."""
    cache = windowed(index, (5, 4))
    cache.serve("ABCC", images=[ImageSpan(b"a cat", 2, 2)])
    live = cache.prefix_cache.admin.live_slots()
    assert live == [{0: 4}, {0: 4}]


# --- forks, failures, duplicates ------------------------------------------------------------


def test_a_fork_shares_what_is_published_in_its_window_and_copies_the_rest(index):
    cache = windowed(index, (5, 8))
    cache.plan("parent", "ABCDEFGHIJ")
    child = cache.fork("parent", "child")
    assert cache.window_blocks("parent") == "0 1 2"
    assert cache.window_blocks("child") == "0 1 3"
    assert [(run.group, run.num_tokens) for run in child.copies] == [(0, 2), (1, 2)]
    cache.commit()
    assert cache.window_blocks("child") == ". 1 3"


def test_a_failed_step_leaves_nothing_in_a_window(index):
    cache = windowed(index, (5, 4))
    cache.plan("one", "ABCDEFGHIJ")
    assert "ABCD:held EFGH:held" in cache.window_picture()
    cache.fail()
    assert cache.window_picture() == "free free free free"
    assert cache.match("ABCDEFGHIJ").num_tokens == 0


def test_windows_keep_every_copy_and_the_oldest_serves(index):
    cache = windowed(index, (5, 8))
    cache.serve("ABCD")
    cache.serve("ABCD", reads=False)
    assert cache.window_picture().count("ABCD:evictable") == 2
    cache.plan("reader", "ABCDE")
    assert cache.window_picture().split()[0] == "ABCD:held"
    cache.commit()


# --- room -----------------------------------------------------------------------------------


def test_what_a_window_cannot_hold_is_no_admission_in_any_group(index):
    """``plan`` compares the state before and after; a window that is full refuses for all."""
    cache = windowed(index, (5, 2))
    cache.admit("holds both", "ABCDEFGH", upto=8)
    cache.append("holds both", "I")
    assert cache.window_picture() == "I:private EFGH:held"
    assert cache.plan("refused", "12") is None
    assert cache.manager.pool.num_free == 12 - 3


@pytest.mark.parametrize("window", [1, 2, 5, 6, 9])
def test_the_smallest_window_pool_gets_any_sequence_to_its_end(index, window):
    """In as many steps as it takes; what is read is right, says the fake runner."""
    least = -(-(window - 1) // 4) + 1
    tiny = tiny_scheduler(16, index=index, windows=(WindowConfig(window, least),))
    tiny.serve("long", ALPHABET * 2, max_tokens=12)
    assert len(tiny.outputs["long"]) == 12


def test_a_window_pool_that_cannot_hold_one_window_is_refused(index):
    """The message names the window, what it needs, what it has, and what to change."""
    WindowConfig(9, 3)
    with pytest.raises(ConfigError, match=r"window of 9 tokens needs 3 blocks of 4.*pool has 2"):
        PrefixCacheConfig(8, 4, index=index, windows=(WindowConfig(9, 2),))


# --- leases and tenants ---------------------------------------------------------------------


def test_a_lease_holds_the_window_before_its_end_and_no_more(index):
    cache = windowed(index, (5, 6), num_blocks=20)
    cache.serve("ABCDEFGHIJKL")
    receipt = cache.prefix_cache.admin.lease(prefix_key("ABCDEFGHIJKL"), PINNED)
    assert receipt.status == LeaseStatus.ACCEPTED
    scan(cache, 5)
    assert cache.match("ABCDEFGHIJKLM").num_tokens == 12
    assert "IJKL:held" in cache.window_picture()
    assert "EFGH" not in cache.window_picture()


def test_an_ended_request_tells_at_once_what_its_quota_took(index):
    """Its blocks are trimmed after the step; events need not wait for the next one."""
    cache = tiny_cache(
        8, index=index, tenant_shares={b"a": TenantShare(0, 1)}, keep_event_batches=4
    )
    cached: set[bytes] = set()

    def hear(batch):
        for event in batch.events:
            digests = set(event.digests)
            cached.symmetric_difference_update(digests)

    cache.prefix_cache.events.subscribe(hear)
    cache.serve("ABCDEFGH", tenant=b"a")
    assert cache.picture().count("evictable") == 1
    assert len(cached) == 1
