"""What is special about the radix index: nodes that grow in place, split, and count for all.

A table's path is the deepest node that it holds; ``up`` walks from there to the root.
"""

from tests.support.cache.tiny_cache import TinyCache, tiny_cache


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


def test_the_source_of_a_copy_is_held_alone():
    """EFG is copied out of EFGH; what follows EFGH in its node may go meanwhile."""
    cache = tiny_cache(8, 4)
    cache.serve("ABCDEFGHIJKLMNOP")
    cache.plan("reader", "ABCDEFGX")
    assert cache.picture().startswith("ABCD:held EFGH:held IJKL:evictable MNOP:evictable")
    cache.commit()
    assert cache.picture().startswith("ABCD:held EFGH:evictable IJKL:evictable MNOP:evictable")
