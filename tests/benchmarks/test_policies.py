"""What each policy of the comparison is for, in caches small enough to draw."""

import random

import pytest

from benchmarks.policies import STUDIED, policy_factory
from ostinato.assembly import build_cache
from ostinato.settings import IndexName, PrefixCacheConfig, TenantShare
from ostinato.tenants.terms import PINNED
from tests.support.cache_views import prefix_key

pytestmark = pytest.mark.parametrize("policy", STUDIED)


class Served:
    """A cache of eight blocks of four tokens; every policy's books are checked as it serves."""

    def __init__(self, policy: str, index: IndexName, **settings) -> None:
        config = PrefixCacheConfig(settings.pop("num_blocks", 8), 4, index=index, **settings)
        self.prefix_cache = build_cache(config, policy=policy_factory(policy))
        self.manager = self.prefix_cache.manager

    def serve(self, prompt: str, tenant: bytes = b"") -> None:
        key = prefix_key(prompt, tenant=tenant)
        table, _ = self.manager.admit(key, self.manager.match(key)) or pytest.fail("it fits")
        self.manager.publish(table, len(key))
        self.manager.commit()
        self.manager.release(table, len(key))
        self.manager.check()

    def num_hits(self, prompt: str, tenant: bytes = b"") -> int:
        return len(self.manager.match(prefix_key(prompt, tenant=tenant)).blocks) * 4


def once(number: int) -> str:
    """A block that nothing else begins like."""
    return chr(0x5000 + number) * 4


def busy(policy: str, index: IndexName) -> Served:
    """A prompt that is asked for again and again, and then a scan of what is used once."""
    cache = Served(policy, index, seal_tails=False)
    for _ in range(4):
        cache.serve("ABCDEFGH")
    for number in range(24):
        cache.serve(once(number))
    return cache


def test_what_was_used_often_outlives_a_scan(policy, index):
    assert busy(policy, index).num_hits("ABCDEFGHI") == 8


def test_what_is_asked_for_no_more_makes_room_but_under_lfu(policy, index):
    if policy == "lfu":
        return
    cache = busy(policy, index)
    for _ in range(20):
        for name in "QRST":
            cache.serve(name * 8)
            cache.serve(name * 8)
    assert cache.num_hits("ABCDEFGHI") == 0


def test_what_is_leased_or_protected_by_a_guarantee_stays(policy, index):
    cache = Served(policy, index, num_blocks=10, tenant_shares={b"guarantee": TenantShare(2, None)})
    cache.serve("ABCDEFGH", tenant=b"guarantee")
    cache.serve("IJKLMNOP")
    assert cache.prefix_cache.admin.lease(prefix_key("IJKLMNOP"), PINNED).num_tokens == 8
    for number in range(40):
        cache.serve(once(number) * 2)
    assert cache.num_hits("ABCDEFGHI", tenant=b"guarantee") == 8
    assert cache.num_hits("IJKLMNOPQ") == 8


def test_the_books_add_up_on_any_traffic(policy, index):
    """Prompts over an alphabet of two, which share, split and leave runs of blocks."""
    rng, cache = random.Random(3), Served(policy, index, num_blocks=12)
    for _ in range(150):
        cache.serve("".join(rng.choices("AB", k=rng.randrange(1, 30))))


def test_what_returns_after_its_eviction_is_noticed(policy, index):
    """It is let in with those that were in use again, so the next scan spares it."""
    if policy not in ("s3fifo", "arc"):
        return
    cache = Served(policy, index, seal_tails=False)
    cache.serve("ABCD")
    for number in range(8):
        cache.serve(once(number))
    assert cache.num_hits("ABCDE") == 0
    cache.serve("ABCD")
    for number in range(10, 18):
        cache.serve(once(number))
    assert cache.num_hits("ABCDE") == 4
