"""A client narrows its tenant's salt: it finds less, and gets no more of anything."""

from ostinato.core.identity import derive_salt, tenant_of
from ostinato.observe.introspection import cached_blocks
from ostinato.settings import TenantShare
from tests.support.cache.tiny_cache import tiny_cache

TEAM = derive_salt("tenant", "team").encode()


def test_the_owner_of_a_narrowed_salt_is_the_tenant():
    """Whatever the client writes: even a salt that looks narrowed itself."""
    assert tenant_of(derive_salt("tenant", "x\x1fother").encode()) == b"tenant"
    assert derive_salt("tenant", "") == "tenant"
    assert derive_salt("", "x") == "x"
    assert tenant_of(b"") == b""


def test_a_narrowed_salt_finds_neither_the_tenant_s_nor_another_s(cache):
    cache.serve("ABCDEFGH", tenant=b"tenant")
    assert cache.match("ABCDEFGHI", tenant=TEAM).num_tokens == 0
    cache.serve("ABCDEFGH", tenant=TEAM)
    assert cache.match("ABCDEFGHI", tenant=TEAM).num_tokens == 8
    assert cache.match("ABCDEFGHI", tenant=b"tenant\x1fothers").num_tokens == 0


def test_quota_guarantee_and_counts_are_the_tenant_s_whatever_it_is_narrowed_by(index):
    """Else a client would get a new quota with every salt."""
    cache = tiny_cache(12, index=index, tenant_shares={b"tenant": TenantShare(quota=3)})
    for number in range(5):
        cache.serve("ABCDEFGH", tenant=derive_salt("tenant", str(number)).encode())
    cached = list(cached_blocks(cache.manager.index))
    assert len(cached) == 3
    assert set(cache.prefix_cache.stats.tenants) == {b"tenant"}


def test_erasing_a_tenant_erases_what_its_clients_narrowed(index):
    """And erasing what one client narrowed leaves the rest."""
    cache = tiny_cache(12, index=index)
    for salt in (b"tenant", TEAM, b"tenant two"):
        cache.serve("ABCDEFGH", tenant=salt)
    assert cache.prefix_cache.admin.erase(TEAM).num_blocks == 2
    cache.serve("ABCDEFGH", tenant=TEAM)
    assert cache.prefix_cache.admin.erase(b"tenant").num_blocks == 4
    assert cache.match("ABCDEFGHI", tenant=b"tenant two").num_tokens == 8
    cache.manager.check()
