"""The worked examples of vLLM's document *Automatic Prefix Caching*, with numbers that add up.

The document reuses whole blocks alone and appends freed blocks to one queue (``classic``). Our
cache also copies single tokens out of a block that a prompt leaves in its middle; the examples
state both numbers. Corrected against the document:

* Time 4: 14 tokens share 11, so 8 hit in whole blocks, not "2 blocks (11 tokens)";
* Time 7: 33 tokens need 9 blocks, not 8; both readings of its numbers are here;
* images: 8 + 41 + 1 tokens fill three blocks of 16, and the fourth is never cached.
"""

import pytest

from ostinato.core.identity import Identity, ImageSpan, PrefixKey
from ostinato.observe.introspection import cached_blocks
from tests.support.cache.tiny_cache import TinyCache, tiny_cache

FIRST_16 = "ABCDEFGHIJKLMNOP"


@pytest.fixture(params=["sealed", "unsealed"])
def seal_tails(request: pytest.FixtureRequest) -> bool:
    """The queue is the same whether partial last blocks are findable or not."""
    return request.param == "sealed"


def document_cache(index: str, seal_tails: bool) -> TinyCache:
    """Ten blocks of four tokens."""
    return tiny_cache(10, 4, index=index, free_order="classic", seal_tails=seal_tails)


def at_time_3(index: str, seal_tails: bool) -> TinyCache:
    """Request 0 came with 14 tokens and has generated three."""
    cache = document_cache(index, seal_tails)
    cache.admit("request 0", FIRST_16[:14])
    cache.append("request 0", "OPQ")
    return cache


def at_time_6(index: str, seal_tails: bool) -> TinyCache:
    """Both requests have finished."""
    cache = at_time_3(index, seal_tails)
    cache.admit("request 1", "ABCDEFGHIJKxyz")
    cache.finish("request 0")
    cache.finish("request 1")
    return cache


def test_time_1_allocates_four_blocks_and_caches_the_three_full_ones(index, seal_tails):
    cache = document_cache(index, seal_tails)
    request = cache.admit("request 0", FIRST_16[:14])

    assert request.blocks == [0, 1, 2, 3]
    assert cache.picture().split()[:4] == ["ABCD:held", "EFGH:held", "IJKL:held", "MN:private"]
    assert cache.free_queue() == "4 5 6 7 8 9"


def test_time_3_caches_block_3_and_allocates_block_4(index, seal_tails):
    cache = at_time_3(index, seal_tails)

    assert cache.blocks("request 0") == [0, 1, 2, 3, 4]
    assert cache.picture().split()[3:5] == ["MNOP:held", "Q:private"]
    assert cache.free_queue() == "5 6 7 8 9"


def test_time_4_eleven_shared_tokens_are_two_whole_blocks(index, seal_tails):
    """8 tokens hit; the third block differs in its last token, so IJK is copied out of it."""
    cache = at_time_3(index, seal_tails)
    request = cache.plan("request 1", "ABCDEFGHIJKxyz")

    assert request.num_shared == 8
    assert request.blocks == [0, 1, 5, 6]
    assert [(run.source, run.target, run.num_tokens) for run in request.copies] == [(8, 20, 3)]
    cache.commit()
    assert cache.picture() == (
        "ABCD:held EFGH:held IJKL:held MNOP:held Q:private IJKx:held yz:private free free free"
    )


def test_time_5_a_finished_request_gives_back_its_own_blocks_deepest_first(index, seal_tails):
    cache = at_time_3(index, seal_tails)
    cache.admit("request 1", "ABCDEFGHIJKxyz")
    cache.finish("request 0")

    assert cache.free_queue() == "7 8 9 4 3 2"
    pictures = cache.picture().split()
    assert pictures[:2] == ["ABCD:held", "EFGH:held"], "request 1 still uses them"
    assert pictures[2:4] == ["IJKL:evictable", "MNOP:evictable"], "free, and cached"


def test_time_6_the_free_queue_ends_as_drawn(index, seal_tails):
    assert at_time_6(index, seal_tails).free_queue() == "7 8 9 4 3 2 6 5 1 0"


def test_time_7_with_16_shared_tokens_hits_four_blocks(index, seal_tails):
    """33 tokens need 9 blocks: the fifth is neither free of content nor the document's 3."""
    cache = at_time_6(index, seal_tails)
    request = cache.admit("request 2", FIRST_16 + "abcdefghijklmnopq")

    assert request.num_shared == 16 and request.num_copied == 0
    assert request.blocks == [0, 1, 2, 3, 7, 8, 9, 4, 6]
    assert cache.free_queue() == "5"


def test_time_7_with_12_shared_tokens_hits_three_blocks_and_evicts_the_fourth(index, seal_tails):
    """The document's table 0 1 2 7 8 9 4 3 belongs to 12 shared tokens, and lacks a block."""
    cache = at_time_6(index, seal_tails)
    request = cache.admit("request 2", FIRST_16[:12] + "abcdefghijklmnopqrstu")

    assert request.num_shared == 12 and request.num_copied == 0
    assert request.blocks == [0, 1, 2, 7, 8, 9, 4, 3, 6]
    assert cache.free_queue() == "5"
    assert cache.match(FIRST_16).num_shared_tokens == 12, "MNOP was evicted"


@pytest.mark.parametrize(("index", "table"), [("hash", [0, 3]), ("radix", [0, 1])])
def test_duplicated_blocks_stay_in_an_append_only_table_or_are_exchanged(index, table):
    """Request 2 generates EFGH while request 1 holds it, and so cannot have hit it.

    The hash index keeps vLLM v1's append-only table [0, 3]; the radix index does as v0 did
    and points the table to block 1.
    """
    cache = tiny_cache(10, 4, index=index, free_order="classic")
    cache.admit("request 1", "ABCDEF")
    cache.append("request 1", "GHI")
    assert cache.blocks("request 1") == [0, 1, 2]

    cache.admit("request 2", "ABCDEF")
    assert cache.blocks("request 2") == [0, 3]
    cache.append("request 2", "G")
    assert cache.picture().split()[:4] == ["ABCD:held", "EFGH:held", "I:private", "EFG:private"]
    cache.append("request 2", "H")

    assert cache.blocks("request 2") == table
    third = cache.picture().split()[3]
    assert third == ("EFGH:held" if index == "hash" else "free")


PLACEHOLDER = 10
IMAGE_PROMPT = [1, 3, 7493, 1681, 1294, 1593, 3937, 9551, *[PLACEHOLDER] * 41, 4]


def image_key(image: bytes) -> PrefixKey:
    """Eight text tokens, 41 placeholders, one closing token."""
    return PrefixKey(Identity(), IMAGE_PROMPT, [ImageSpan(image, start=8, length=41)])


def test_an_image_prompt_of_50_tokens_fills_three_blocks(index):
    """The fourth block holds a placeholder and the closing token: it is never cached."""
    cache = tiny_cache(8, 16, index=index)
    manager = cache.manager
    key = image_key(b"cat")
    table, _ = manager.admit(key, manager.match(key))
    manager.publish(table, 50)
    manager.commit()
    manager.release(table, 50)
    manager.check()

    assert len(key) == 50 and len(table.blocks) == 4
    assert len(list(cached_blocks(manager.index))) == 3
    assert manager.match(image_key(b"cat")).num_tokens == 48


def test_another_image_behind_the_same_placeholders_shares_the_text_alone(index):
    """The tokens are equal; the KV of a placeholder is that of its image."""
    cache = tiny_cache(8, 16, index=index)
    manager = cache.manager
    key = image_key(b"cat")
    table, _ = manager.admit(key, manager.match(key))
    manager.publish(table, 50)
    manager.commit()

    found = manager.match(image_key(b"dog"))
    assert (found.num_shared_tokens, found.num_copied_tokens) == (0, 8)
