"""A published prefix is shared by all who may begin with it; what follows is each tenant's own.

One suite for both indexes. "PUBLICLY" is two blocks that were published; tenants ``a`` and ``b``
go on behind it. Copies, erasure, accounts, events and windows are met at the namespace boundary.
"""

import pytest

from ostinato.core.identity import Identity, ImageSpan
from ostinato.errors import CacheInUse
from ostinato.indexes.block_hash import BlockHasher, sha256
from ostinato.observe.introspection import cached_blocks
from ostinato.settings import TenantShare, WindowConfig
from ostinato.tenants.terms import PINNED, LeaseStatus
from tests.support.cache.cache_views import letters, prefix_key
from tests.support.cache.tiny_cache import TinyCache, tiny_cache
from tests.support.servers.memory_search import Traces, search

SALT = b"\xffpublic"
TEXT = "PUBLICLY"
A = {"tenant": b"tenant a", "base": Identity(tenant=SALT), "start": len(TEXT)}
B = A | {"tenant": b"tenant b"}


def published(index, num_blocks=12, **settings):
    """A cache in which "PUBLICLY" is public."""
    cache = tiny_cache(num_blocks, index=index, **settings)
    cache.serve(TEXT, tenant=SALT)
    receipt = cache.prefix_cache.admin.publish(prefix_key(TEXT, tenant=SALT))
    assert receipt.status is LeaseStatus.ACCEPTED, receipt
    cache.manager.check()
    return cache


@pytest.fixture
def cache(index) -> TinyCache:
    return published(index)


def contents(cache) -> dict[str, int]:
    """What is cached, and how often."""
    texts = [letters(cached.tokens) for cached in cached_blocks(cache.manager.index)]
    return {text: texts.count(text) for text in sorted(texts)}


def test_the_head_is_computed_once_for_all_tenants(cache):
    """Law 1 across tenants, for what is public: two tails hang on one head."""
    assert cache.serve(TEXT + "aaaaX", **A).num_computed_here == 5
    assert cache.serve(TEXT + "bbbbX", **B).num_computed_here == 5
    assert contents(cache) == {"ICLY": 1, "PUBL": 1, "X": 2, "aaaa": 1, "bbbb": 1}


def test_a_tail_is_found_by_its_own_tenant_alone(cache):
    """Law 3: the same tokens behind the same head are another tenant's miss, whole and partial."""
    secret = TEXT + "my secretsX"
    cache.serve(secret, **A)
    assert cache.match(secret + "?", **A).num_tokens == len(secret)
    assert cache.match(secret + "?", **B).num_tokens == len(TEXT)
    assert cache.match(secret + "?", tenant=b"tenant a").num_tokens == 0
    assert cache.match(secret + "?", tenant=SALT).num_tokens == len(TEXT)


def test_no_token_is_copied_across_the_namespace_boundary(cache):
    """Neither out of the public prefix into a tail, nor between tails of two tenants."""
    cache.serve(TEXT + "abcdefgh", **A)
    for who in (A, B):
        assert cache.match(TEXT + "abcX", **who).num_copied_tokens == 0
    assert cache.match(TEXT + "abcdefX", **A).num_copied_tokens == 2
    assert cache.match(TEXT + "abcdefX", **B).num_tokens == len(TEXT)


def test_an_answer_that_ends_in_the_first_private_block_is_not_sealed(cache):
    """That block is shared as a whole or not at all."""
    cache.serve(TEXT + "ab", **A)
    assert contents(cache) == {"ICLY": 1, "PUBL": 1}


def test_erasing_a_tenant_removes_its_tails_and_leaves_the_head(cache):
    secret = TEXT + "verysecretlytoldx"
    cache.admit("a", secret, **A)
    digests = BlockHasher(4, sha256).digests(cache.sequences["a"].table.key, 6)[2:]
    cache.finish("a")
    cache.prefix_cache.admin.lease(prefix_key(secret, **A), PINNED)
    cache.serve(TEXT + "bbbb", **B)

    receipt = cache.prefix_cache.admin.erase(b"tenant a")

    assert (receipt.num_blocks, receipt.num_leases) == (5, 1)
    assert contents(cache) == {"ICLY": 1, "PUBL": 1, "bbbb": 1}
    tail = [ord(letter) for letter in "verysecretlytoldx"]
    assert search(cache.prefix_cache, b"tenant a", tail, digests) == Traces()
    cache.manager.check()


def test_unpublishing_removes_the_head_and_all_behind_it(cache):
    """Law 8: nothing stays that could not be reached; leases behind it end as well."""
    cache.serve(TEXT + "aaaa", **A)
    cache.serve(TEXT + "bbbb", **B)
    cache.serve("mine", tenant=b"tenant a")
    cache.prefix_cache.admin.lease(prefix_key(TEXT + "aaaa", **A), PINNED)

    receipt = cache.prefix_cache.admin.erase(SALT)

    assert (receipt.num_blocks, receipt.num_leases) == (4, 2)
    assert contents(cache) == {"mine": 1}
    assert not cache.prefix_cache.admin.is_public(SALT)
    cache.manager.check()


def test_unpublishing_is_refused_while_somebody_reads_it(cache):
    """Law 6: nothing has changed then."""
    cache.admit("a", TEXT + "aaaa", **A)
    with pytest.raises(CacheInUse, match="1 sequence"):
        cache.prefix_cache.admin.erase(SALT)
    assert cache.prefix_cache.admin.is_public(SALT)
    cache.finish("a")
    cache.prefix_cache.admin.erase(SALT)
    assert contents(cache) == {}


def test_a_public_head_is_never_evicted(index):
    """Whether it is cached would tell one tenant what another did."""
    cache = published(index, num_blocks=6)
    for number in range(5):
        cache.serve(chr(200 + number) * 16, tenant=b"somebody")
        cache.serve(TEXT + chr(300 + number) * 8, **A)
    assert cache.match(TEXT + "X", **B).num_tokens == len(TEXT)
    assert not cache.prefix_cache.admin.end_lease(0), "it is not let go of by accident"


def test_what_does_not_fit_is_not_published_at_all(index):
    """Law 6: too little may be bound, or not all of it is cached."""
    cache = tiny_cache(4, index=index, reserved_blocks=3)
    cache.serve(TEXT, tenant=SALT)
    receipt = cache.prefix_cache.admin.publish(prefix_key(TEXT, tenant=SALT))
    assert receipt.status is LeaseStatus.REJECTED and "num_blocks" in receipt.reason
    assert contents(cache) == {}
    assert not cache.prefix_cache.admin.is_public(SALT)


def test_a_rejected_publication_is_kept_in_no_window(index):
    cache = tiny_cache(8, index=index, windows=(WindowConfig(6, 12),))
    cache.serve(TEXT, tenant=SALT)
    receipt = cache.prefix_cache.admin.publish(prefix_key(TEXT + "lost", tenant=SALT))
    assert receipt.status is LeaseStatus.REJECTED
    assert [pool.num_evictable for pool in cache.manager.pools] == [0, 0]


@pytest.mark.parametrize(
    ("other", "reserved_blocks"), [("QRST", 0), (TEXT + "more", 0), (TEXT + "more", 7)]
)
def test_a_rejected_publication_leaves_what_else_its_salt_has(index, other, reserved_blocks):
    """The salt may be an ordinary tenant's; too little is cached, or nothing may be held."""
    cache = tiny_cache(8, index=index, reserved_blocks=reserved_blocks)
    cache.serve(TEXT, tenant=b"ann")
    cache.serve(other, tenant=b"ann")
    before = contents(cache)
    receipt = cache.prefix_cache.admin.publish(prefix_key(TEXT + "lost", tenant=b"ann"))
    assert receipt.status is LeaseStatus.REJECTED
    cache.manager.check()
    assert contents(cache) == before


def test_a_salt_is_published_once(cache):
    """Of two leases the first could be ended, and the prefix be evicted while it is public."""
    cache.serve("OTHER123", tenant=SALT)
    for text in (TEXT, "OTHER123", "NOTCACHED"):
        receipt = cache.prefix_cache.admin.publish(prefix_key(text, tenant=SALT))
        assert receipt.status is LeaseStatus.REJECTED and "public already" in receipt.reason
    assert cache.prefix_cache.admin.num_leases == 1
    assert cache.serve(TEXT + "aaaaX", **A).num_computed_here == 5
    assert cache.match("OTHER1234", tenant=SALT).num_tokens == 8


def test_the_shared_salt_is_no_publications(index):
    """To end its publication would erase all that is shared."""
    cache = tiny_cache(8, index=index)
    cache.serve(TEXT)
    receipt = cache.prefix_cache.admin.publish(prefix_key(TEXT))
    assert receipt.status is LeaseStatus.REJECTED and "is shared" in receipt.reason
    assert contents(cache) == {"ICLY": 1, "PUBL": 1}


def test_without_the_whole_head_nothing_is_left_behind(index):
    """A request that was on its way when the head was unpublished: it runs, and writes nothing."""
    cache = tiny_cache(8, index=index)
    sequence = cache.serve(TEXT + "aaaa", **A)
    assert sequence.num_computed_here == 12
    assert contents(cache) == {}


def test_a_reset_and_new_weights_end_a_publication(index):
    for end in ("reset", "new_epoch"):
        cache = published(index)
        cache.serve(TEXT + "aaaa", **A)
        getattr(cache.prefix_cache.admin, end)()
        cache.manager.check()
        assert contents(cache) == {}
        assert not cache.prefix_cache.admin.is_public(SALT)


def test_a_tail_is_charged_to_its_tenant_and_the_head_is_not(index):
    """A quota of two blocks holds a tail of two, whatever the head's length."""
    tenant_shares = {b"tenant a": TenantShare(quota=2)}
    cache = published(index, tenant_shares=tenant_shares)
    cache.serve(TEXT + "aaaaAAAA", **A)
    assert cache.match(TEXT + "aaaaAAAAX", **A).num_tokens == 16
    cache.serve(TEXT + "ccccCCCC", **A)
    assert contents(cache) == {"CCCC": 1, "ICLY": 1, "PUBL": 1, "cccc": 1}
    receipt = cache.prefix_cache.admin.lease(prefix_key(TEXT + "ccccCCCC", **A), PINNED)
    assert (receipt.status, receipt.num_tokens) == (LeaseStatus.ACCEPTED, 16)


def test_images_behind_the_head_count_as_ever(cache):
    """An image in the first private block, and one that begins in the head's last."""
    image = ImageSpan(b"cat", 8, 2)
    cache.serve(TEXT + "IIab", images=[image], **A)
    assert cache.match(TEXT + "IIabX", [image], **A).num_tokens == 12
    assert cache.match(TEXT + "IIabX", [ImageSpan(b"dog", 8, 2)], **A).num_tokens == 8
    assert cache.match(TEXT + "IIabX", **A).num_tokens == 8
    assert cache.match(TEXT + "IIabX", [image], **B).num_tokens == 8


def test_windows_part_at_the_seam_as_well(index):
    """A window group finds blocks by digest; the salt is in it from the boundary on."""
    cache = published(index, windows=(WindowConfig(6, 12),))
    cache.serve(TEXT + "aaaaAAAAX", **A)
    assert cache.match(TEXT + "aaaaAAAAY", **A).num_tokens == 16
    assert cache.match(TEXT + "aaaaAAAAY", **B).num_tokens == 8
    cache.prefix_cache.admin.erase(b"tenant a")
    cache.manager.check()
    assert cache.match(TEXT + "aaaaAAAAY", **B).num_tokens == 8


def test_outsiders_see_one_chain_and_no_salt(index):
    """A tail's first block names the head's last as its parent; its extra is a digest."""
    cache = published(index, keep_event_batches=20)
    cache.serve(TEXT + "aaaaAAAA", **A)
    head, tail = [e for batch in cache.prefix_cache.events.replay(0) for e in batch.events]
    assert tail.parent == head.digests[-1]
    assert tail.extras[0] is not None and tail.extras[1] is None
    assert b"tenant a" not in tail.extras[0]
    assert tail.identity.tenant == b"tenant a"
