"""What each eviction policy is for, in caches small enough to draw."""

from typing import get_args

import pytest

from ostinato.assembly import build_cache
from ostinato.core.errors import ConfigError
from ostinato.eviction.reuse_hazard import ReuseHazard
from ostinato.settings import IndexName, PolicyName, PrefixCacheConfig, TenantShare
from ostinato.tenants.terms import PINNED
from tests.support.cache.cache_views import prefix_key
from tests.support.cache.tiny_cache import TinyCache, tiny_cache


def once(number: int) -> str:
    """A block that nothing else begins like: not even a token of it is copied."""
    return chr(0x5000 + number) * 4


def busy(policy: str, index: IndexName, num_blocks: int = 8) -> TinyCache:
    """A prompt that is asked for again and again, and then a scan of what is used once."""
    cache = tiny_cache(num_blocks, index=index, eviction_policy=policy, seal_tails=False)
    for _ in range(4):
        cache.serve("ABCDEFGH")
    for number in range(3 * num_blocks):
        cache.serve(once(number))
    return cache


def test_a_scan_empties_lru(index):
    assert busy("lru", index).match("ABCDEFGHI").num_tokens == 0


def test_nothing_is_kept_for_ever(index):
    """What is asked for no more makes room for what is asked for now."""
    cache = busy("reuse_hazard", index)
    for _ in range(20):
        for name in "QRST":
            cache.serve(name * 8)
            cache.serve(name * 8)
    assert cache.match("ABCDEFGHI").num_tokens == 0


def chats_and_questions(policy: str, index: IndexName) -> int:
    """Conversations that come back after ten seconds, among questions that never do.

    Returns:
        Tokens that hit.
    """
    now_s = 0.0
    config = PrefixCacheConfig(60, 4, index=index, eviction_policy=policy, seal_tails=False)
    built = build_cache(config, clock=lambda: now_s)
    cache = built.manager

    def serve(text: str, num_output_tokens: int) -> None:
        key = prefix_key(text)
        admitted = cache.admit(key, cache.match(key))
        assert admitted is not None
        cache.publish(admitted[0], len(key))
        cache.commit()
        cache.release(admitted[0], len(key), num_output_tokens)

    texts = [once(chat) for chat in range(10)]
    for second in range(600):
        now_s, chat = float(second), second % 10
        grown = texts[chat] + once(1000 + second)
        texts[chat] = grown if len(grown) < 60 else once(second)
        serve(texts[chat], num_output_tokens=300)
        serve("".join(once(10_000 + 4 * second + place) for place in range(4)), 5)
    cache.check()
    return built.stats.first.hit_tokens


def test_reuse_hazard_learns_which_kind_of_request_never_comes_back(index):
    """Half of what LRU keeps are questions; who has learned so keeps the conversations."""
    assert chats_and_questions("reuse_hazard", index) > 1.3 * chats_and_questions("lru", index)


def test_reuse_hazard_remembers_nothing_of_an_erased_tenant(index):
    cache = tiny_cache(4, index=index, eviction_policy="reuse_hazard")
    for number in range(9):
        cache.serve(once(number), tenant=b"leaves")
    policy = cache.manager.pool.shares.policy_of(b"")
    assert isinstance(policy, ReuseHazard)
    assert policy.num_remembered_blocks == 5
    cache.prefix_cache.admin.erase(b"leaves")
    assert policy.num_remembered_blocks == 0
    cache.manager.check()


@pytest.mark.parametrize("policy", get_args(PolicyName))
def test_no_policy_touches_what_is_held_leased_or_protected_by_a_guarantee(policy, index):
    guarantees = {b"guarantee": TenantShare(2, None)}
    cache = tiny_cache(10, index=index, eviction_policy=policy, tenant_shares=guarantees)
    cache.serve("ABCDEFGH", tenant=b"guarantee")
    cache.serve("IJKLMNOP")
    receipt = cache.prefix_cache.admin.lease(prefix_key("IJKLMNOP"), PINNED)
    assert receipt.num_tokens == 8
    cache.admit("running", "QRSTUVWX")
    for number in range(40):
        cache.serve(once(number) * 2)
    assert cache.match("ABCDEFGHI", tenant=b"guarantee").num_tokens == 8
    assert cache.match("IJKLMNOPQ").num_tokens == 8
    assert cache.match("QRSTUVWXY").num_tokens == 8


def test_everything_can_be_forgotten_in_whatever_order_it_was_released(index, monkeypatch):
    """Leaves first, although a policy may have left an ancestor that was released before them.

    Of two copies of a block LRU evicts the older one; others may leave just that, and then it is
    idle for longer than what builds on it.
    """
    cache = tiny_cache(16, index=index)
    cache.serve("ABCDEFGHIJKL")
    cache.serve("ABCDEFGHMNOP")
    pool = cache.manager.pool
    roots_first = list(pool.entries())[::-1]
    monkeypatch.setattr(pool, "entries", lambda: iter(roots_first))
    cache.prefix_cache.admin.reset()
    monkeypatch.undo()
    cache.manager.check()
    assert cache.picture() == " ".join(["free"] * 16)


@pytest.mark.parametrize("policy", ["arc", "s3fifo", "cost_aware"])
def test_a_policy_that_was_removed_is_refused_with_the_place_where_it_is_compared(policy):
    with pytest.raises(ConfigError, match=rf"eviction_policy='{policy}'.*docs/eviction.md"):
        PrefixCacheConfig(8, eviction_policy=policy)
