"""The four tests of *Adding Prefix Caching to NanoGPT*, block size 4, with corrected numbers.

Corrected against the article:

* its log says "16/1 tokens cached, -15 to prefill"; 16 of 18 hit and 2 are computed;
* its least recently used block is the root; here tails go first, else the rest is unreachable;
* blocks that fill up while decoding are cached as well;
* a fully cached prompt still computes one token.

Whole blocks are the article's unit. We copy single tokens besides; both numbers stand here.
"""

import pytest

from ostinato.assembly import build_cache
from ostinato.core.identity import Identity, PrefixKey
from ostinato.observe.introspection import cached_blocks
from ostinato.settings import PrefixCacheConfig
from tests.support.cache.tiny_cache import TinyCache, tiny_cache

TO_BE = "To be or not to be"
TO_BE_GOES_ON = "\ntile; nobly said he"  # 20 generated tokens; the last one is never computed


@pytest.fixture
def cache(index) -> TinyCache:
    return tiny_cache(32, 4, index=index)


def test_1_an_identical_prompt_hits_16_of_18_tokens_in_whole_blocks(cache):
    """4 blocks hit and 2 tokens are left; one of them is copied, for it is cached as well."""
    first = cache.admit("request 0", TO_BE)
    assert (first.num_shared, first.num_copied) == (0, 0)
    assert cache.prefix_cache.stats.published_blocks == 4
    cache.append("request 0", TO_BE_GOES_ON[:-1])
    cache.finish("request 0")

    second = cache.plan("request 1", TO_BE)
    assert len(TO_BE) == 18
    assert second.num_shared == 16
    assert second.num_copied == 1
    assert second.num_computed_here == 1


def test_1_in_whole_blocks_alone_two_tokens_are_left_to_prefill(cache):
    """While request 0's last block is its own, nothing can be copied out of it."""
    cache.admit("request 0", TO_BE)
    second = cache.plan("request 1", TO_BE)

    assert (second.num_shared, second.num_computed_here) == (16, 2)
    assert cache.prefix_cache.stats.published_blocks == 4, "no duplicates"


def test_1_blocks_filled_while_decoding_are_cached_too(cache):
    """18 + 19 computed tokens are 9 full blocks: the next turn of the chat finds them."""
    cache.admit("request 0", TO_BE)
    cache.append("request 0", TO_BE_GOES_ON[:-1])

    assert cache.prefix_cache.stats.published_blocks == 9
    assert cache.match(TO_BE + TO_BE_GOES_ON + " then").num_shared_tokens == 36


def test_2_a_shared_prefix_is_cached_once(cache):
    """Three blocks of "Hello world " for both; only "dog" is computed for request 1."""
    cache.admit("request 0", "Hello world " + "cat")
    second = cache.admit("request 1", "Hello world " + "dog")

    assert second.num_shared == 12
    assert second.num_computed_here == 3
    assert len(list(cached_blocks(cache.manager.index))) == 3


def test_2_with_the_answers_nine_full_blocks_are_cached(cache):
    """24 computed tokens each, of which 12 are shared: 6 + 3 blocks."""
    cache.admit("request 0", "Hello world " + "cat")
    cache.append("request 0", "ive as fa")
    cache.admit("request 1", "Hello world " + "dog")
    cache.append("request 1", ", your ju")

    assert len(list(cached_blocks(cache.manager.index))) == 9


def test_3_prompts_that_share_nothing_fill_five_blocks_each(cache):
    """22 and 20 tokens, 10 full blocks, no hit."""
    first = cache.admit("request 0", "The cat sat on the mat")
    second = cache.admit("request 1", "Once upon a midnight")

    assert first.num_computed_here == 22 and second.num_computed_here == 20
    assert len(list(cached_blocks(cache.manager.index))) == 10


def test_4_under_pressure_the_deepest_block_goes_and_the_rest_stays_useful(index):
    """Four blocks in the order of their use. The article drops the first; then nothing hits.

    Three remain here as well, and a thirteenth token finds all of them.
    """
    cache = tiny_cache(4, 4, index=index)
    cache.serve("The cat sat on t")
    assert cache.picture() == "The :evictable cat :evictable sat :evictable on t:evictable"

    cache.admit("stranger", "?")
    assert cache.picture().endswith("?:private")
    assert cache.match("The cat sat on the mat and then").num_tokens == 12


def test_4_a_prompt_of_four_blocks_does_not_fit_into_three(index):
    """Nothing is evicted for a request that cannot run."""
    cache = tiny_cache(3, 4, index=index)
    cache.serve("Once upon")

    assert cache.admit("request 0", "The cat sat on t") is None
    assert cache.match("Once upon a time").num_tokens == 9


def test_a_fully_cached_prompt_still_computes_one_token(index):
    """Prefill is never "essentially free": the next token needs a query (law 4)."""
    cache = tiny_cache(8, 4, index=index)
    cache.serve("The cat sat ")
    again = cache.plan("again", "The cat sat ")

    assert again.num_shared == 8 and again.num_copied == 3
    assert again.num_computed_here == 1


def test_each_new_block_continues_the_one_before_it(index):
    """The article rebuilds two levels of parents and gives all new blocks the same one.

    Behind two equal pairs of blocks, the fifth block of the one is not that of the other.
    """
    cache = tiny_cache(16, 4, index=index)
    cache.serve("AAAABBBBCCCCDDDDEEEEFFFF")

    assert cache.match("XXXXBBBBCCCCDDDDEEEEF").num_tokens == 0
    assert cache.match("AAAABBBBEEEEFFFFF").num_tokens == 8
    assert cache.match("AAAABBBBCCCCDDDDEEEEF").num_tokens == 20


def test_a_thousand_calls_at_once_compute_the_512_shared_tokens_once(index):
    """511,488 tokens saved, although none has finished when the last of them arrives."""
    manager = build_cache(PrefixCacheConfig(num_blocks=1100, block_size=16, index=index)).manager
    shared = list(range(512))
    computed = 0
    for call in range(1000):
        key = PrefixKey(Identity(), [*shared, *[1000 + call] * 16])
        table, copies = manager.admit(key, manager.match(key))
        manager.publish(table, len(key))
        computed += len(key) - table.num_cached_tokens
        assert not copies
    manager.commit()
    manager.check()

    assert 1000 * 512 - (computed - 1000 * 16) == 511_488
