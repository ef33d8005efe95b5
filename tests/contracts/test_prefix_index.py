"""What every prefix index finds: whole blocks, single tokens of the next one, nothing else.

One suite for all indexes, mostly through the manager that drives them. Images and identities
are in ``test_never_wrong``, references, refusals and failures in ``test_cache_manager``.
"""

from array import array

import pytest

from ostinato.cache.block_table import BlockTable
from ostinato.observe.introspection import cached_blocks
from tests.support.cache.cache_views import found, letters, prefix_key
from tests.support.cache.tiny_cache import tiny_cache

# --- whole blocks ---------------------------------------------------------------------------


def test_a_prefix_hit_in_whole_blocks_ends_at_the_first_block_that_differs(index):
    cache = tiny_cache(4, index=index)
    cache.serve("ABCDEFGH")

    assert cache.match("ABCDEFXY").num_shared_tokens == 4
    assert cache.picture() == "ABCD:evictable EFGH:evictable free free"


def test_equal_blocks_behind_different_prefixes_are_different_content(cache):
    """Law 3: EFGH behind ABCD is not EFGH behind XBCD."""
    cache.serve("ABCDEFGH")
    assert found(cache, "XBCDEFGHI") == (0, 0)
    cache.serve("XBCDEFGH")
    assert cache.picture().count("EFGH:evictable") == 2


def test_only_the_computed_part_of_a_chunked_prompt_is_found(cache):
    cache.admit("chunked", "ABCDEFGHIJKL", upto=6)
    assert found(cache, "ABCDEFGHIJKLM") == (4, 0)
    cache.advance("chunked", 9)
    cache.commit()
    assert found(cache, "ABCDEFGHIJKLM") == (8, 0)


# --- law 4: at least one token is computed --------------------------------------------------


@pytest.mark.parametrize("block_size", [1, 2, 3, 4, 8, 9])
def test_a_prompt_that_is_cached_verbatim_hits_all_but_its_last_token(index, block_size):
    cache = tiny_cache(16, block_size, index=index)
    cache.serve("ABCDEFGH")
    assert cache.match("ABCDEFGH").num_tokens == 7
    cache.serve("ABCDEFGH")
    assert cache.match("ABCDEFGH").num_tokens == 7


def test_a_prompt_of_one_token_never_hits(index):
    cache = tiny_cache(4, 1, index=index)
    cache.serve("AA")
    assert found(cache, "A") == (0, 0)


# --- tails, token by token ------------------------------------------------------------------


def test_a_prompt_that_leaves_a_block_in_its_middle_copies_what_it_shares(index):
    cache = tiny_cache(4, index=index)
    cache.serve("ABCDEFGH")
    match = cache.match("ABCDEFXY")

    assert match.num_tokens == 6
    assert match.tail.block == 1 and match.tail.num_tokens == 2


def test_the_sibling_that_agrees_longest_is_copied(index):
    """Neighbours in sorted order on either side, and far ones that must not win."""
    cache = tiny_cache(16, index=index)
    for block in ("AAAA", "ABAA", "ABCA", "ABCZ", "ABZZ", "AZZZ"):
        cache.serve("...." + block)

    def source(prompt: str) -> tuple[str, int]:
        tail = cache.match("...." + prompt + "?").tail
        return cache.picture().split()[tail.block].split(":")[0], tail.num_tokens

    assert source("ABCM") in {("ABCA", 3), ("ABCZ", 3)}
    assert source("ABCB")[1] == 3
    assert source("ABAZ") == ("ABAA", 3)
    assert source("ABZA") == ("ABZZ", 3)
    assert source("AZAA") == ("AZZZ", 2)
    assert source("AAAZ") == ("AAAA", 3)
    assert found(cache, "....ZZZZ") == (4, 0)


def test_tokens_are_compared_as_wholes_and_not_byte_by_byte(index):
    """0x0141 and 0x0241 share their low byte, and nothing else."""
    cache = tiny_cache(4, 2, index=index)
    cache.serve(chr(0x0141) * 2)
    assert found(cache, chr(0x0241) * 3) == (0, 0)
    assert found(cache, chr(0x0141) + chr(0x0241) * 2) == (0, 1)


def test_the_partial_last_block_of_an_ended_sequence_is_found_token_by_token(index):
    cache = tiny_cache(4, index=index)
    cache.serve("ABCDUV")
    assert cache.picture() == "ABCD:evictable UV~:evictable free free"
    assert found(cache, "ABCDUVWX") == (4, 2)
    assert found(cache, "ABCDUXYZ") == (4, 1)
    assert found(cache, "ABCDUV") == (4, 1)


def test_a_tail_that_a_sibling_begins_with_already_is_not_sealed_again(cache):
    cache.serve("ABCDUVWX")
    cache.serve("ABCDUV")
    assert "~" not in cache.picture()
    cache.serve("ABCDPQ")
    cache.serve("ABCDPQ")
    cache.serve("ABCDP")
    assert cache.picture().count("~") == 1


def test_without_sealing_a_partial_block_is_forgotten(index):
    cache = tiny_cache(4, index=index, seal_tails=False)
    cache.serve("ABCDUV")
    assert cache.picture() == "ABCD:evictable free free free"
    assert found(cache, "ABCDUVWX") == (4, 0)


# --- the index on its own -------------------------------------------------------------------


def test_publishing_extends_the_path_and_retracting_shortens_it(index, monkeypatch):
    """Without a manager: acquire nothing, publish three blocks, take two back, release."""
    cache = tiny_cache(4, index=index)
    pool, prefixes = cache.manager.pool, cache.manager.index
    key = prefix_key("ABCDEFGHIJKL")
    blocks = pool.allocate(BlockTable(key, array("i")), 3, prefixes)
    path, tail = prefixes.acquire(key, prefixes.match(key, 12))
    assert tail is None
    path, publication = prefixes.publish(path, key, blocks, 12)
    assert publication.duplicates == ()
    prefixes.check([path])

    monkeypatch.setattr(pool, "evict", pytest.fail)
    path, forgotten = prefixes.retract(path, 1)
    prefixes.check([path])
    assert list(forgotten.blocks) == list(blocks[:0:-1])
    assert [letters(cached.tokens) for cached in cached_blocks(prefixes)] == ["ABCD"]

    prefixes.release(path)
    prefixes.check([])
    pool.free(forgotten.blocks, b"")
    assert pool.num_free == 4


def test_contents_name_each_block_with_its_whole_prefix(cache):
    """The name is the same for both indexes and differs with anything before the block."""
    cache.serve("ABCDEFGH")
    cache.serve("XXXXEFGH")
    cache.serve("ABCDEFGH", tenant=b"somebody")
    names = {(cached.parent, cached.tokens) for cached in cached_blocks(cache.manager.index)}
    assert len(names) == 6
    plain = prefix_key("").identity.encoded
    assert (plain + array("I", map(ord, "ABCD")).tobytes(), _packed("EFGH")) in names


def _packed(text: str) -> bytes:
    return array("I", map(ord, text)).tobytes()
