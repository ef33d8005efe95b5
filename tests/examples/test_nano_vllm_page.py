"""nano-vllm's page on prefix caching: blocks of 256 tokens, hits counted in whole blocks.

A system prompt shorter than a block saves nothing there. With copy-on-write it does.
"""

from ostinato.core.identity import Identity, PrefixKey
from tests.support.cache.tiny_cache import tiny_cache


def tokens(first: int, count: int) -> list[int]:
    """So many different tokens."""
    return list(range(first, first + count))


def serve(cache, prompt: list[int]) -> tuple[int, int]:
    """Run a request to its end; tokens that hit in whole blocks, and tokens copied."""
    manager, key = cache.manager, PrefixKey(Identity(), prompt)
    table, _ = manager.admit(key, manager.match(key))
    manager.publish(table, len(prompt))
    manager.commit()
    manager.release(table, len(prompt))
    manager.check()
    return table.num_shared_tokens, table.num_copied_tokens


def test_every_whole_block_that_hits_saves_256_tokens(index):
    cache = tiny_cache(16, 256, index=index)
    system = tokens(0, 512)
    assert serve(cache, system + tokens(1000, 30)) == (0, 0)
    assert serve(cache, system + tokens(2000, 30)) == (512, 0)


def test_a_system_prompt_of_one_and_a_bit_blocks_hits_one_and_copies_the_bit(index):
    """300 shared tokens: 256 by whole blocks, 44 more by copying."""
    cache = tiny_cache(16, 256, index=index)
    system = tokens(0, 300)
    serve(cache, system + tokens(1000, 30))
    assert serve(cache, system + tokens(2000, 30)) == (256, 44)


def test_four_questions_behind_a_short_system_prompt_share_it_by_copying(index):
    """The page's example: its system prompt has far fewer tokens than a block."""
    cache = tiny_cache(16, 256, index=index)
    system = tokens(0, 20)
    hits = [serve(cache, system + tokens(1000 * n, 10)) for n in range(1, 5)]
    assert hits == [(0, 0), (0, 20), (0, 20), (0, 20)]


def test_without_sealed_tails_a_short_prompt_saves_nothing(index):
    """What the page does, block by block."""
    cache = tiny_cache(16, 256, index=index, seal_tails=False)
    system = tokens(0, 20)
    hits = [serve(cache, system + tokens(1000 * n, 10)) for n in range(1, 5)]
    assert hits == [(0, 0)] * 4


def test_behind_the_first_miss_nothing_hits(index):
    """Blocks 0 and 2 agree, block 1 does not: the page's ``cache_miss`` stays true."""
    cache = tiny_cache(16, 256, index=index)
    first, third = tokens(0, 256), tokens(600, 256)
    serve(cache, first + tokens(256, 256) + third + [1])
    assert serve(cache, first + tokens(5000, 256) + third + [1]) == (256, 0)


def test_a_finished_sequence_leaves_its_blocks_findable_until_they_are_needed(index):
    """Deallocated blocks keep their content in the free list."""
    cache = tiny_cache(4, 256, index=index)
    serve(cache, tokens(0, 513))
    assert cache.manager.pool.num_free == 4
    assert serve(cache, tokens(0, 513)) == (512, 0)
    serve(cache, tokens(9000, 1024))
    assert serve(cache, tokens(0, 513)) == (0, 0)


def test_a_prompt_of_exactly_two_cached_blocks_is_not_skipped_altogether(index):
    """The page would count 512 of 512 tokens as cached; one has to be computed."""
    cache = tiny_cache(4, 256, index=index)
    serve(cache, tokens(0, 512))
    assert serve(cache, tokens(0, 512)) == (256, 255)
