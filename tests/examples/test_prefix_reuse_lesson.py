"""The lesson *Prefix reuse: hash caches and radix trees*: its operations and its suffix problem.

Corrected against the lesson: the ref count rises at admission, not in the look-up; and a block
that is shared in part need not be recomputed in whole, since its shared slots can be copied.
"""

from ostinato.core.identity import Identity, PrefixKey
from tests.support.cache.tiny_cache import tiny_cache


def test_match_returns_the_blocks_on_the_way_and_takes_no_reference(cache):
    cache.serve("ABCDEFGHIJKL")
    found = cache.match("ABCDEFGHxyz")

    assert list(found.blocks) == [0, 1]
    assert "held" not in cache.picture()


def test_insert_splits_the_run_where_the_new_path_diverges(cache):
    """Both branches hit afterwards, and the shared blocks are kept once."""
    cache.serve("ABCDEFGHIJKL")
    cache.serve("ABCDEFGHWXYZ")

    assert cache.match("ABCDEFGHIJKL?").num_shared_tokens == 12
    assert cache.match("ABCDEFGHWXYZ?").num_shared_tokens == 12
    assert cache.picture().count("evictable") == 4


def test_evict_takes_the_least_recently_used_leaf_without_references(index):
    """IJKL was used before WXYZ; ABCD and EFGH are no leaves while either is there."""
    cache = tiny_cache(4, 4, index=index)
    cache.serve("ABCDEFGHIJKL")
    cache.serve("ABCDEFGHWXYZ")
    cache.admit("one", "1")
    assert cache.picture() == "ABCD:evictable EFGH:evictable 1:private WXYZ:evictable"
    cache.admit("two", "2")
    cache.admit("three", "3")
    assert cache.picture() == "ABCD:evictable 3:private 1:private 2:private"


def test_a_locked_path_is_not_evicted(index):
    """A running request's blocks stay, whatever else wants in."""
    cache = tiny_cache(3, 4, index=index)
    cache.serve("ABCDEFGH")
    cache.admit("reader", "ABCDEFGHI")

    assert cache.admit("stranger", "1") is None
    assert cache.picture() == "ABCD:held EFGH:held I:private"


def test_4096_shared_tokens_are_256_blocks_of_16(index):
    cache = tiny_cache(600, 16, index=index)
    assert _hits_behind_shared_tokens(cache, 4096) == (4096, 0)


def test_of_4097_shared_tokens_256_blocks_are_shared_and_one_token_is_copied(index):
    """Whole blocks round down to 4,096; copy-on-write saves the token more."""
    cache = tiny_cache(600, 16, index=index)
    assert _hits_behind_shared_tokens(cache, 4097) == (4096, 1)


def _hits_behind_shared_tokens(cache, num_shared: int) -> tuple[int, int]:
    """Send two prompts of so many shared and 32 own tokens; what hits for the second?"""
    manager, tables = cache.manager, []
    for own in (100_000, 200_000):
        key = PrefixKey(Identity(), [*range(num_shared), *range(own, own + 32)])
        table, _ = manager.admit(key, manager.match(key))
        manager.publish(table, len(key))
        manager.commit()
        tables.append(table)
    manager.check()
    return tables[1].num_shared_tokens, tables[1].num_copied_tokens


def test_two_tenants_share_a_system_prompt_and_no_block(cache):
    """The lesson's last failure mode: a tenant id in the chain parts the cache."""
    cache.serve("ABCDEFGH", tenant=b"one")

    assert cache.match("ABCDEFGHI", tenant=b"two").num_tokens == 0
    assert cache.match("ABCDEFGHI", tenant=b"one").num_tokens == 8
