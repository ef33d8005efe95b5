"""Who is evicted, and what each setting and counter means, on every index (law 8)."""

import pytest

from ostinato.errors import CacheInUse
from ostinato.observe.introspection import cached_blocks
from tests.support.cache.tiny_cache import tiny_cache

# --- eviction (law 8) ---------------------------------------------------------------------


@pytest.mark.parametrize("free_order", ["unused_first", "classic"])
def test_evicting_one_by_one_every_ancestor_of_a_cached_block_is_cached(index, free_order):
    """A tree of nine contents goes block by block; nothing in it is ever out of reach."""
    prompts = ["ABCDEFGHIJKL", "ABCDEFGHXYZW", "ABCD1234UV", "QRSTEFGHIJ", "ABCD12345678"]
    cache = tiny_cache(12, index=index, free_order=free_order)
    for prompt in prompts:
        cache.serve(prompt)
    cached = len(list(cached_blocks(cache.manager.index)))
    assert cached == 10
    for number in range(12):
        reachable = {
            block
            for prompt in prompts
            for match in [cache.match(prompt + "?")]
            for block in [*match.blocks, *([match.tail.block] if match.tail else [])]
        }
        assert reachable == {block.block for block in cached_blocks(cache.manager.index)}
        cache.admit(f"stranger {number}", "!", writes=False)
    assert cache.picture() == " ".join(["!:private"] * 12)


def test_of_one_request_the_deepest_block_is_evicted_first(index):
    cache = tiny_cache(3, index=index)
    cache.serve("ABCDEFGHIJ")
    assert cache.free_queue() == "2 1 0"


def test_a_block_in_use_again_is_not_the_next_to_go(index):
    """Least recently used, not first cached."""
    cache = tiny_cache(3, index=index)
    for prompt in ("ABCD", "EFGH", "IJKL"):
        cache.serve(prompt)
    cache.serve("ABC")  # a copy is a use
    cache.admit("stranger", "!")
    assert "EFGH" not in cache.picture()
    assert "ABCD" in cache.picture()


# --- settings and single blocks -----------------------------------------------------------


def test_unused_blocks_are_given_away_before_cached_ones(index):
    cache = tiny_cache(3, index=index)
    cache.serve("ABCD")
    cache.admit("short", "1", writes=False)
    cache.finish("short")
    assert cache.free_queue() == "1 2 0", "the one freed last is given first"


def test_in_classic_order_the_block_that_was_freed_first_goes_first(index):
    cache = tiny_cache(3, index=index, free_order="classic")
    cache.serve("ABCD")
    cache.admit("short", "1", writes=False)
    cache.finish("short")
    assert cache.free_queue() == "2 0 1"
    cache.admit("two blocks", "12345", writes=False)
    assert cache.blocks("two blocks") == [2, 0], "ABCD goes before the block freed last"


def test_who_does_not_write_reads_all_the_same(index):
    cache = tiny_cache(4, index=index)
    cache.serve("ABCD")
    assert cache.serve("ABCDEFGH", writes=False).num_shared == 4
    assert cache.picture() == "ABCD:evictable free free free"


def test_who_does_not_read_computes_everything_and_writes_all_the_same(index):
    cache = tiny_cache(4, index=index)
    cache.serve("ABCD")
    again = cache.serve("ABCDEFGH", reads=False)
    assert again.num_computed_here == 8
    assert cache.match("ABCDEFGHI").num_tokens == 8


def test_with_prefix_caching_off_nothing_is_kept_or_found(index):
    cache = tiny_cache(4, index=index, enable_prefix_caching=False)
    cache.plan("parent", "ABCDEFGH")
    assert cache.plan("other", "ABCD").num_shared == 0
    cache.commit()
    cache.finish("parent")
    cache.finish("other")
    assert cache.picture() == "free free free free"


def test_a_reset_is_refused_while_a_sequence_holds_blocks(index):
    cache = tiny_cache(4, index=index)
    cache.serve("ABCD")
    cache.admit("running", "ABCDE")
    with pytest.raises(CacheInUse, match="1 running sequence"):
        cache.prefix_cache.admin.reset()
    assert cache.match("ABCDE").num_tokens == 4


def test_a_reset_forgets_everything(index):
    cache = tiny_cache(4, index=index)
    cache.serve("ABCDEF")
    cache.serve("ABCDEF", tenant=b"somebody")
    cache.prefix_cache.admin.reset()
    cache.manager.check()
    assert cache.picture() == "free free free free"
    assert cache.match("ABCDEF").num_tokens == 0
    cache.serve("ABCDEF")
    assert cache.match("ABCDEF").num_tokens == 5


# --- statistics ---------------------------------------------------------------------------


def test_hits_are_counted_once_at_admission_and_preempted_ones_apart(cache):
    cache.serve("ABCDEFGH")
    cache.match("ABCDEFXY")
    cache.serve("ABCDEFXY")
    cache.serve("ABCDEFGHI", preempted=True)
    first, preempted = cache.prefix_cache.stats.first, cache.prefix_cache.stats.preempted

    assert (first.num_requests, first.query_tokens) == (2, 16)
    assert (first.shared_tokens, first.copied_tokens, first.hit_tokens) == (4, 2, 6)
    assert first.hit_ratio == 6 / 16
    assert (preempted.num_requests, preempted.hit_tokens) == (1, 8)


def test_doubled_content_is_counted(cache):
    cache.serve("ABCDEFGH")
    cache.serve("ABCDEFGHIJKL", reads=False)
    stats = cache.prefix_cache.stats
    assert (stats.published_blocks, stats.duplicate_blocks) == (3, 2)
