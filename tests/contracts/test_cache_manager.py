"""What the cache manager promises on every index: references, refusals, copies, failures.

Laws 1, 5, 6 and 9.
"""

from ostinato.observe.introspection import cached_blocks
from tests.support.cache.tiny_cache import Sequence, tiny_cache


def _runs(sequence: Sequence) -> list[tuple[str, str, int]]:
    """Copies as block.offset: "0.2" is the third slot of block 0."""
    size = sequence.block_size
    return [
        (f"{run.source // size}.{run.source % size}", f"{run.target // size}.{run.target % size}",
         run.num_tokens)
        for run in sequence.copies
    ]  # fmt: skip


def test_a_look_up_changes_nothing(index):
    """No reference, no time of use: admission alone takes both (``match`` compares the state)."""
    cache = tiny_cache(4, index=index)
    cache.serve("ABCD")
    cache.serve("WXYZ")
    queue = cache.free_queue()
    cache.match("ABCDE")
    assert cache.free_queue() == queue


def test_admission_holds_what_it_hits_and_renews_its_time_of_use(index):
    cache = tiny_cache(4, index=index)
    cache.serve("ABCD")
    cache.serve("WXYZ")
    assert cache.free_queue() == "2 3 0 1"
    cache.admit("reader", "ABCDE")
    assert cache.picture() == "ABCD:held WXYZ:evictable E:private free"
    cache.finish("reader")
    assert cache.free_queue() == "3 1 2 0", "E is sealed; WXYZ is the oldest now"


def test_when_nothing_runs_all_blocks_are_free(cache):
    """Law 9, with contents and all reference counts at zero."""
    cache.admit("one", "ABCDEFGHIJ")
    cache.plan("two", "ABCDEFXY")
    cache.fork("two", "three")
    cache.commit()
    for name in ("two", "one", "three"):
        cache.finish(name)
    assert cache.manager.pool.num_free == 8
    assert cache.manager.num_live_tables == 0
    assert {cached.ref_count for cached in cached_blocks(cache.manager.index)} == {0}


# --- refusals (law 6) -----------------------------------------------------------------------


def test_a_prompt_that_does_not_fit_changes_nothing(index):
    """``plan`` compares the whole state before and after."""
    cache = tiny_cache(3, index=index)
    cache.serve("ABCDEFGH")
    cache.admit("running", "1234")
    assert cache.plan("refused", "ABCDEFGHIJKL") is None


def test_a_sequence_that_cannot_grow_keeps_what_it_has(index):
    """``append`` compares the whole state before and after."""
    cache = tiny_cache(2, index=index)
    cache.admit("running", "ABCDEFG")
    assert cache.append("running", "H")
    assert not cache.append("running", "I")
    assert cache.picture() == "ABCD:held EFGH:held"


def test_a_fork_that_does_not_fit_changes_nothing(index):
    """Its private block would need a copy; ``fork`` compares the whole state."""
    cache = tiny_cache(2, index=index)
    cache.plan("parent", "ABCDEF")
    assert cache.fork("parent", "child") is None


def test_the_copy_is_given_up_when_only_its_source_is_in_the_way(index):
    """One block: the prompt could copy BC of it, but needs the block itself."""
    cache = tiny_cache(1, index=index)
    cache.serve("ABCD")
    assert cache.match("ABCX").num_tokens == 3
    admitted = cache.admit("instead", "ABCX")
    assert (admitted.num_shared, admitted.num_copied) == (0, 0)
    assert cache.picture() == "ABCX:held"


def test_the_source_of_a_copy_outlives_the_step_and_no_longer(index):
    """The block may not be allocated before the copy has run."""
    cache = tiny_cache(3, index=index)
    cache.serve("ABCD")
    cache.plan("reader", "ABCX")
    assert cache.picture().split()[0] == "ABCD:held"
    assert cache.plan("greedy", "12345678") is None
    cache.commit()
    assert cache.picture().split()[0] == "ABCD:evictable"
    assert cache.plan("greedy", "12345678") is not None


# --- copies -------------------------------------------------------------------------------


def test_a_copy_of_a_copy_reads_the_first_source(index):
    """Copies of one step run side by side: none may read what another one writes.

    The second request takes ABC out of the block that the first one fills with AB (copied
    from block 0) and CX (computed); the third takes ABCX and YZ from the blocks of both.
    """
    cache = tiny_cache(8, 6, index=index)
    cache.serve("AB....")
    assert _runs(cache.plan("first", "ABCX..")) == [("0.0", "1.0", 2)]
    assert _runs(cache.plan("second", "ABCXYZ")) == [("0.0", "2.0", 2), ("1.2", "2.2", 2)]
    assert _runs(cache.plan("third", "ABCXYW")) == [
        ("0.0", "3.0", 2),
        ("1.2", "3.2", 2),
        ("2.4", "3.4", 1),
    ]
    cache.commit()


# --- forks --------------------------------------------------------------------------------


def test_a_fork_shares_published_blocks_and_copies_private_ones(cache):
    cache.plan("parent", "ABCDEF")
    child = cache.fork("parent", "child")
    assert child.blocks == [0, 2]
    assert _runs(child) == [("1.0", "2.0", 2)]
    cache.commit()
    assert cache.picture().startswith("ABCD:held EF:private EF:private")


# --- failed steps (law 5) -----------------------------------------------------------------


def test_a_failed_step_leaves_no_trace_of_what_it_published(index):
    cache = tiny_cache(4, index=index)
    cache.plan("failing", "ABCDEFGH")
    assert cache.match("ABCDEFGHI").num_tokens == 8, "findable within the step"
    cache.fail()
    assert cache.match("ABCDEFGHI").num_tokens == 0
    assert cache.picture() == "free free free free"


def test_a_failed_step_takes_back_its_own_chunk_alone(index):
    """The first chunk was computed in an earlier step: it stays."""
    cache = tiny_cache(4, index=index)
    cache.admit("failing", "ABCDEFGHIJKL", upto=6)
    cache.advance("failing", 12)
    cache.fail()
    assert cache.match("ABCDEFGHIJKL").num_tokens == 4
    assert cache.picture() == "ABCD:evictable free free free"


def test_followers_that_matched_blocks_of_a_failed_step_fall_with_it(index):
    """A follower shares EFGH, another one copies out of it, a third publishes behind it."""
    cache = tiny_cache(12, index=index)
    cache.admit("leader", "ABCDEFGHIJ", upto=4)
    cache.advance("leader", 10)
    cache.plan("follower", "ABCDEFGHXYZ1")
    cache.plan("copier", "ABCDEFxx")
    cache.plan("second follower", "ABCDEFGHXYZ12")
    cache.fork("copier", "copier's twin")
    cache.fail()
    assert cache.picture() == "ABCD:evictable" + " free" * 11


def test_what_a_failed_step_alone_leads_to_is_evicted_with_it(index):
    """A stranger evicts the first copy of ABCD while the second one is being computed.

    In the hash index EFGH then continues the second copy alone, which the failure takes back.
    """
    cache = tiny_cache(5, index=index, eviction_policy="reuse_hazard")
    cache.serve("ABCDEFGH")
    cache.plan("twice", "ABCD", reads=False)
    cache.plan("stranger", "123456789", writes=False)
    assert ("EFGH:evictable" in cache.picture()) == (index == "hash")
    cache.fail()
    left = "ABCD:evictable" if index == "radix" else "free"
    assert cache.picture() == left + " free" * 4
    assert cache.prefix_cache.stats.evicted_blocks == (1 if index == "radix" else 2)
