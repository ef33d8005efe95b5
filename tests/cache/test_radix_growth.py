"""Turns of one conversation become one node, and nobody can tell that they were many."""

from ostinato.cache.radix_walk import walk
from tests.support.tiny_cache import TinyCache, letters, tiny_cache


def nodes(cache: TinyCache, name: str) -> list[tuple[int, int]]:
    """Blocks and reference count of each node of a sequence, from the root on."""
    path = list(cache.sequences[name].table.path.up())
    return [(node.num_blocks, node.ref_count) for node in reversed(path)][1:]


def tree(cache: TinyCache) -> list[str]:
    """Every node but the roots as its blocks, parents first."""
    return [str(node.blocks.tolist()) for node, _ in walk(cache.manager.index._roots, 4)]


def test_turns_of_one_conversation_become_one_node():
    cache = tiny_cache(32, 4)
    for text in ("ABCDEFGH", "ABCDEFGHIJKLMNOP", "ABCDEFGHIJKLMNOPQRSTUVWX"):
        cache.serve(text)
    cache.admit("next", "ABCDEFGHIJKLMNOPQRSTUVWXYZ")
    assert nodes(cache, "next") == [(6, 1)]


def test_a_sealed_tail_that_a_turn_has_overtaken_goes_aside_and_is_evicted_first():
    cache = tiny_cache(8, 4)
    cache.serve("ABCDEFG")  # seals EFG
    cache.serve("ABCDEFGHIJKL")
    assert tree(cache) == ["[0, 2, 3]", "[1]"]
    assert cache.free_queue() == "4 5 6 7 1 3 2 0"
    assert cache.match("ABCDEFG?").num_tokens == 7  # out of block 2, which goes on
    cache.manager.check()
    cache.admit("other", "abcdefghijklmnopqrst")  # takes five: what is scratch, then the aside
    assert "[0, 2, 3]" in tree(cache) and "[1]" not in tree(cache)


def test_a_run_that_is_split_where_it_went_on_has_its_sealed_tail_again():
    cache = tiny_cache(16, 4)
    cache.serve("ABCDEFG")
    cache.serve("ABCDEFGHIJKL")
    cache.admit("another", "ABCDEFxyzwvu")
    path = list(cache.sequences["another"].table.path.up())
    assert [node.num_blocks for node in reversed(path)][1:] == [1, 2]
    assert sorted(node.blocks.tolist() for node in path[1].children)[0] == [1]
    cache.manager.check()


def test_what_was_split_stays_split():
    """A prompt of whole blocks hits all but its last block each time: one split is enough."""
    cache = tiny_cache(8, 4)
    for _ in range(3):
        cache.serve("ABCDEFGHIJKL")
        cache.manager.check()
    assert tree(cache) == ["[0, 1]", "[2]"]


def test_a_node_that_others_hold_is_not_gone_on_with():
    """Whoever holds ABCD must not come to hold what another one goes on with."""
    cache = tiny_cache(16, 4)
    cache.serve("ABCD")
    cache.admit("short", "ABCDx")
    cache.admit("long", "ABCDEFGH")
    assert nodes(cache, "short") == [(1, 2)]
    assert nodes(cache, "long") == [(1, 2), (1, 1)]


def test_a_sealed_tail_that_goes_another_way_keeps_the_next_turn_apart():
    cache = tiny_cache(16, 4)
    cache.serve("ABCDx")
    cache.serve("ABCDEFGH")
    assert sorted(tree(cache)) == ["[0]", "[1]", "[2]"]


def test_a_failed_step_leaves_the_node_as_long_as_it_was():
    cache = tiny_cache(16, 4)
    cache.serve("ABCDEFG")
    cache.plan("next", "ABCDEFGHIJKL")
    cache.fail()
    assert sorted(tree(cache)) == ["[0]", "[1]"]
    assert cache.match("ABCDEFGHIJKL").num_tokens == 7


def test_policies_that_go_by_use_see_every_turn_as_it_is():
    cache = tiny_cache(32, 4, policy="arc")
    for text in ("ABCDEFGH", "ABCDEFGHIJKLMNOP"):
        cache.serve(text)
    assert tree(cache) == ["[0, 1]", "[2, 3]"]


def test_blocks_of_one_node_are_lost_with_the_time_since_their_own_publication():
    cache = tiny_cache(4, 4)
    cache.serve("ABCD")
    cache.num_steps += 1000
    cache.serve("ABCDEFGH")
    first, second = cache.manager.index.runs()
    assert (first.idle.tolist(), second.idle.tolist()) == ([0], [1])
    assert second.born_s - first.born_s >= 1000
    cache.admit("other", "0123456789ab")  # evicts EFGH
    residencies = cache.manager.stats.residencies_s
    assert residencies.num_values == 1 and residencies.total < 1000


# --- what is remembered of a sequence is quoted from its nodes -------------------------------


def test_what_is_remembered_of_a_sequence_outlives_its_blocks():
    """The end of a run is evicted, and the run goes on with something else: both are told apart."""
    cache = tiny_cache(4, keep_explanations=8)
    cache.serve("ABCDEFGHIJKLM")
    cache.serve("QRSTUVWXY")  # takes the tail and two blocks
    cache.serve("ABCDefghi")
    assert [letters(visit.tokens) for visit in cache.manager.chronicle.visits()] == [
        "ABCDefghi",
        "QRSTUVWXY",
        "ABCDEFGHIJKLM",
    ]


def test_a_split_leaves_what_is_remembered_as_it_was():
    cache = tiny_cache(12, keep_explanations=8)
    cache.serve("ABCDEFGHIJKLM")
    cache.serve("ABCDxyz")
    cache.serve("ABCDEFGHuvw")
    visits = [letters(visit.tokens) for visit in cache.manager.chronicle.visits()]
    assert visits == ["ABCDEFGHuvw", "ABCDxyz", "ABCDEFGHIJKLM"]


def test_the_turns_of_a_conversation_keep_its_tokens_once():
    cache = tiny_cache(12, keep_explanations=8)
    for prompt in ("ABCDEFGHI", "ABCDEFGHIJKLM", "ABCDEFGHIJKLMNOPQ"):
        cache.serve(prompt)
    visits = list(cache.manager.chronicle.visits())
    assert len({id(buffer) for visit in visits for buffer, _ in visit.quotes}) == 1
    assert [visit.num_unpacked for visit in visits] == [1, 1, 1]
