"""The article *Why one character breaks the cache*: the chain, the salt, and n - 1."""

import pytest

from ostinato.indexes.block_hash import BlockHasher, sha256
from tests.support.cache.cache_views import prefix_key
from tests.support.cache.tiny_cache import TinyCache, tiny_cache

PROMPT = "You are a helpful assistant. Be brief. What is a prefix cache good for, really?!"


@pytest.fixture
def cache(index) -> TinyCache:
    return tiny_cache(16, 16, index=index)


def test_the_prompt_of_these_tests_is_five_blocks_of_16():
    assert len(PROMPT) == 80


def test_one_character_at_the_start_rewrites_every_digest_behind_it():
    """As an edited commit rewrites every later commit of a git history."""
    hasher = BlockHasher(16, sha256)
    before = hasher.digests(prefix_key(PROMPT), 5)
    after = hasher.digests(prefix_key("y" + PROMPT[1:]), 5)
    assert not set(before) & set(after)


def test_one_character_in_the_fourth_block_leaves_three_digests_as_they_were():
    hasher = BlockHasher(16, sha256)
    edited = PROMPT[:50] + "#" + PROMPT[51:]
    before, after = hasher.digests(prefix_key(PROMPT), 5), hasher.digests(prefix_key(edited), 5)
    assert before[:3] == after[:3]
    assert not set(before[3:]) & set(after[3:])


def test_one_character_at_the_start_loses_the_whole_hit(cache):
    cache.serve(PROMPT)
    assert cache.match(PROMPT + "!").num_tokens == 80
    assert cache.match("y" + PROMPT[1:] + "!").num_tokens == 0


def test_one_character_at_the_tail_loses_only_what_follows_it(cache):
    """Stable things first, changing things last."""
    cache.serve(PROMPT)
    found = cache.match(PROMPT[:70] + "#" + PROMPT[71:])
    assert (found.num_shared_tokens, found.num_copied_tokens) == (64, 6)


def test_somebody_else_finds_what_you_computed(cache):
    """Prefixes are cached by content, not by conversation."""
    cache.admit("you", PROMPT)
    somebody_else = cache.admit("somebody else", PROMPT + " And for me?")
    assert somebody_else.num_shared == 80
    assert somebody_else.blocks[:5] == cache.blocks("you")


def test_a_salt_parts_the_cache_from_the_first_block_on(cache):
    """Latency can no longer tell one tenant what another one asked."""
    cache.serve(PROMPT, tenant=b"salt")
    assert cache.match(PROMPT, tenant=b"pepper").num_tokens == 0
    assert cache.match(PROMPT).num_tokens == 0


def test_a_salt_rewrites_every_digest():
    hasher = BlockHasher(16, sha256)
    plain = hasher.digests(prefix_key(PROMPT), 5)
    salted = hasher.digests(prefix_key(PROMPT, tenant=b"salt"), 5)
    assert not set(plain) & set(salted)


def test_of_a_prompt_that_is_cached_verbatim_all_but_the_last_token_hits(cache):
    """``max_cache_hit_length = num_tokens - 1``: the model needs a query."""
    cache.serve(PROMPT)
    found = cache.match(PROMPT)
    assert found.num_shared_tokens == 64, "the fifth block would hit in whole with one token more"
    assert found.num_tokens == 79
