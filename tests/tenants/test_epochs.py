"""The weights have changed: what was computed before must not hit, nor stay for long."""

import pytest

from ostinato.settings import WindowConfig
from ostinato.tenants.terms import PINNED
from tests.support.cache.cache_views import prefix_key, windows_of
from tests.support.cache.tiny_cache import TinyCache, tiny_cache

pytestmark = pytest.mark.parametrize("windows", [(), (WindowConfig(6, 12),)])

FREE = ["free"] * 12


@pytest.fixture
def cache(index, windows: tuple[WindowConfig, ...]) -> TinyCache:
    """Return an empty cache of twelve blocks."""
    return tiny_cache(12, index=index, windows=windows)


def new_epoch(cache: TinyCache) -> None:
    """Change the weights between two steps."""
    before = cache.manager.epoch
    assert cache.prefix_cache.admin.new_epoch() == before + 1 == cache.manager.epoch
    cache.manager.check()


def window_contents(cache: TinyCache) -> int:
    """Count what window groups keep."""
    return sum(len(list(window.copies())) for window in windows_of(cache.manager))


def test_nothing_that_was_computed_before_hits(cache):
    """Neither under the new weights nor under the old: it is gone at once."""
    cache.serve("ABCDEFGHIJ")
    new_epoch(cache)
    for epoch in (0, 1):
        assert cache.match("ABCDEFGHIJ", epoch=epoch).num_tokens == 0
    assert cache.picture().split() == FREE
    assert window_contents(cache) == 0


def test_what_is_computed_afterwards_hits(cache):
    cache.serve("ABCDEFGH")
    new_epoch(cache)
    assert cache.serve("ABCDEFGHIJ", epoch=1).num_computed_here == 10
    assert cache.match("ABCDEFGHIJ", epoch=1).num_tokens == 9


def test_a_running_request_goes_on_and_publishes_nothing_more(cache):
    """Three blocks are published under the old weights; the fourth and the tail never are."""
    cache.admit("running", "ABCDEFGHIJKL")
    new_epoch(cache)
    assert cache.append("running", "MNOPQR")
    text = cache.picture()
    assert "IJKL:held" in text and "MNOP:private" in text and "QR:private" in text
    assert cache.match("ABCDEFGHIJKLM", epoch=1).num_tokens == 0
    cache.finish("running")
    assert cache.picture().split() == FREE
    assert window_contents(cache) == 0


def test_old_content_is_gone_when_its_last_reader_ends(cache):
    cache.admit("one", "ABCDEFGHIJ")
    cache.admit("two", "ABCDEFGHXY")
    new_epoch(cache)
    cache.finish("one")
    assert "ABCD:held" in cache.picture()
    cache.finish("two")
    assert cache.picture().split() == FREE
    assert window_contents(cache) == 0


def test_content_of_the_new_weights_stays_when_a_reader_of_the_old_ends(cache):
    cache.admit("old", "ABCDEFGH")
    new_epoch(cache)
    cache.serve("ABCDEFGH", epoch=1)
    cache.finish("old")
    assert cache.match("ABCDEFGHI", epoch=1).num_tokens == 8
    assert cache.picture().count("evictable") == 2


def test_leases_end_with_the_weights(cache):
    """Also one on what a running request still reads."""
    cache.admit("running", "ABCDEFGH")
    cache.serve("abcdefgh")
    for prompt in ("ABCDEFGH", "abcdefgh"):
        assert cache.prefix_cache.admin.lease(prefix_key(prompt), PINNED).lease_id is not None
    new_epoch(cache)
    assert cache.prefix_cache.admin.num_leases == 0
    assert "abcd" not in cache.picture() and "ABCD:held" in cache.picture()
    cache.finish("running")
    assert cache.picture().split() == FREE


def test_who_waits_is_looked_up_under_the_weights_of_now(cache):
    """Fingerprint and epoch; without a fingerprint, its own stays."""
    waiting = prefix_key("ABCD", weights=b"old", tenant=b"t")
    cache.prefix_cache.admin.new_epoch()
    assert cache.manager.rekey(waiting).identity.weights == b"old"
    cache.prefix_cache.admin.new_epoch(b"new")
    renewed = cache.manager.rekey(waiting).identity
    assert (renewed.weights, renewed.epoch, renewed.tenant) == (b"new", 2, b"t")
