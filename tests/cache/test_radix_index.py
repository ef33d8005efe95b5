"""What is special about the radix index: nodes that grow in place, split, and count for all.

A table's path is the deepest node that it holds; ``up`` walks from there to the root.
"""

import pytest

from ostinato.core.errors import StaleMatch
from tests.support.cache_views import prefix_key
from tests.support.tiny_cache import TinyCache, tiny_cache


def nodes(cache: TinyCache, name: str) -> list[tuple[int, int]]:
    """Blocks and reference count of each node of a sequence, from the root on."""
    path = list(cache.sequences[name].table.path.up())
    return [(node.num_blocks, node.ref_count) for node in reversed(path)][1:]


def test_a_prompt_is_one_node_however_long_it_is():
    cache = tiny_cache(300, 4)
    cache.admit("long", "ABCD" * 256)
    assert nodes(cache, "long") == [(256, 1)]


def test_decoding_grows_the_node_in_place():
    """The depth of the tree is that of its branches, not the number of steps."""
    cache = tiny_cache(64, 4)
    cache.admit("chat", "ABCDEF")
    node = cache.sequences["chat"].table.path
    cache.append("chat", "abcdefghijklmnopqrstuvwxyz" * 4)
    assert nodes(cache, "chat") == [(27, 1)]
    assert cache.sequences["chat"].table.path is node


def test_chunks_of_a_prompt_grow_one_node():
    cache = tiny_cache(8, 4)
    cache.admit("chunked", "ABCDEFGHIJKL", upto=4)
    for upto in (7, 8, 12):
        cache.advance("chunked", upto)
        cache.commit()
    assert nodes(cache, "chunked") == [(3, 1)]


def test_a_node_is_split_where_a_second_request_leaves_it():
    """The upper part is held by both; the first request's path still ends in its own node."""
    cache = tiny_cache(8, 4)
    cache.admit("one", "ABCDEFGHIJKL")
    own = cache.sequences["one"].table.path
    cache.admit("two", "ABCDEFGHWXYZ")
    assert nodes(cache, "one") == [(2, 2), (1, 1)]
    assert nodes(cache, "two") == [(2, 2), (1, 1)]
    assert cache.sequences["one"].table.path is own
    assert own.start == 2


def test_a_match_is_stale_once_another_admission_has_split_its_node():
    cache = tiny_cache(8, 4)
    cache.serve("ABCDEFGH")
    first, second = prefix_key("ABCDX"), prefix_key("ABCDY")
    match = cache.manager.match(second)
    assert cache.manager.admit(first, cache.manager.match(first)) is not None
    with pytest.raises(StaleMatch):
        cache.manager.admit(second, match)


def test_references_are_counted_by_node():
    """A path of three branches touches three counters, whatever the number of blocks."""
    cache = tiny_cache(16, 4)
    cache.admit("one", "ABCDEFGHIJKLMNOP")
    cache.admit("two", "ABCDEFGHIJKL1234")
    cache.admit("three", "ABCD123456781234")
    assert nodes(cache, "one") == [(1, 3), (2, 2), (1, 1)]
    cache.finish("two")
    assert nodes(cache, "one") == [(1, 2), (2, 1), (1, 1)]


def test_behind_a_split_both_branches_go_on_growing_in_place():
    cache = tiny_cache(16, 4)
    cache.admit("one", "ABCDEFGH")
    cache.admit("two", "ABCDWXYZ")
    cache.append("one", "123456789")
    cache.append("two", "123456789")
    assert nodes(cache, "one") == nodes(cache, "two") == [(1, 2), (3, 1)]


def test_a_node_that_somebody_else_holds_is_not_grown():
    """The follower must not come to hold what its leader generates."""
    cache = tiny_cache(8, 4)
    cache.admit("leader", "ABCD")
    cache.admit("follower", "ABCDE")
    cache.append("leader", "WXYZ")
    assert nodes(cache, "leader") == [(1, 2), (1, 1)]
    assert nodes(cache, "follower") == [(1, 2)]


def test_reading_half_of_an_idle_node_leaves_its_rest_evictable():
    """The rest keeps its place in the queue, before what was released later."""
    cache = tiny_cache(8, 4)
    cache.serve("ABCDEFGHIJKL")
    cache.serve("1234")
    cache.admit("reader", "ABCDE")
    assert cache.free_queue() == "5 6 7 2 1 3"
    assert cache.picture().startswith("ABCD:held EFGH:evictable IJKL:evictable")


def test_the_source_of_a_copy_is_held_alone():
    """EFG is copied out of EFGH; what follows EFGH in its node may go meanwhile."""
    cache = tiny_cache(8, 4)
    cache.serve("ABCDEFGHIJKLMNOP")
    cache.plan("reader", "ABCDEFGX")
    assert cache.picture().startswith("ABCD:held EFGH:held IJKL:evictable MNOP:evictable")
    cache.commit()
    assert cache.picture().startswith("ABCD:held EFGH:evictable IJKL:evictable MNOP:evictable")


def test_a_run_is_evicted_from_its_end_as_far_as_needed():
    cache = tiny_cache(4, 4)
    cache.serve("ABCDEFGHIJKLMNOP")
    cache.admit("stranger", "12345678", writes=False)
    assert cache.picture() == "ABCD:evictable EFGH:evictable 5678:private 1234:private"


def test_content_that_was_computed_twice_is_kept_once():
    """The second table points to the first's blocks when the step is over."""
    cache = tiny_cache(8, 4)
    cache.admit("one", "ABCDEFGHI")
    cache.plan("two", "ABCDEFGHIJKLM", reads=False)
    assert cache.blocks("two") == [3, 4, 5, 6]
    cache.commit()
    assert cache.blocks("two") == [0, 1, 5, 6]
    assert nodes(cache, "two") == [(2, 2), (1, 1)]
    assert cache.free_queue() == "4 3 7"


def test_a_fork_of_a_table_with_duplicates_shares_the_first_copies():
    """The child never holds a block that its parent gives back at the end of the step."""
    cache = tiny_cache(12, 4)
    cache.admit("one", "ABCDEFGHI")
    cache.plan("two", "ABCDEFGHIJKLM", reads=False)
    child = cache.fork("two", "child")
    assert child.blocks == [0, 1, 5, 7]
    cache.commit()
    assert cache.blocks("two") == [0, 1, 5, 6]
