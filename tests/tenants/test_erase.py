"""Erasing a tenant leaves nothing of it: all that can be reached from the manager is searched."""

from typing import Any, get_args

import pytest

from ostinato.cache.block_table import BlockTable
from ostinato.core.identity import Identity
from ostinato.errors import CacheInUse
from ostinato.observe.events import AllCleared, EventBatch
from ostinato.settings import PolicyName, StateConfig, TenantShare, WindowConfig
from ostinato.tenants.terms import ANTHROPIC_1H, PINNED, EraseReceipt
from tests.support.cache.cache_views import prefix_key, windows_of
from tests.support.cache.tiny_cache import TinyCache, tiny_cache
from tests.support.cache.whole_state import whole_state
from tests.support.servers.memory_search import Traces, search

SALT = b"salt-of-the-erased"
FIRST_TOKEN = 0x10F800
"""Letters that stand for conspicuous token ids; no count or block id is so large."""

TOKENS = range(FIRST_TOKEN, FIRST_TOKEN + 64)


def secret(length: int, first: int = 0) -> str:
    """Return a prompt of conspicuous tokens."""
    return "".join(chr(FIRST_TOKEN + first + i) for i in range(length))


def busy_cache(index: str, **settings: Any):
    """Return a cache that has the tenant everywhere, and all digests of its prefixes."""
    settings = {"reserved_blocks": 8, "keep_event_batches": 64, **settings}
    cache = tiny_cache(32, index=index, **settings)
    digests: set[bytes] = set()
    for prompt in (
        secret(10),
        secret(6) + secret(7, 40),
        secret(9, 20),
        secret(10) + secret(7, 50),
    ):
        table = serve_in_two_steps(cache, prompt, tenant=SALT)
        digests |= {bytes(d) for memo in table.key.digests.values() for d in memo}
        serve_in_two_steps(cache, "ABCDEFGHIJ", tenant=b"somebody else")
    for number in range(3):  # evicts some of it, which policies remember
        serve_in_two_steps(cache, chr(1000 + number) * 60, tenant=b"somebody else")
    serve_in_two_steps(cache, secret(10), tenant=SALT)
    for terms in (PINNED, ANTHROPIC_1H):
        key = prefix_key(secret(8), tenant=SALT)
        assert cache.prefix_cache.admin.lease(key, terms).num_tokens == 8
    return cache, digests


def serve_in_two_steps(cache: TinyCache, prompt: str, **identity: Any) -> BlockTable:
    """Compute the last tokens in a step of their own, so that a state is kept before them."""
    end = (len(prompt) - 1) // 4 * 4
    if cache.match(prompt, **identity).num_tokens >= end:
        return cache.serve(prompt, **identity).table
    table = cache.admit("served", prompt, upto=end, **identity).table
    cache.advance("served", len(prompt))
    cache.commit()
    cache.finish("served")
    return table


VARIANTS: dict[str, dict[str, Any]] = {
    **{policy: {"eviction_policy": policy} for policy in get_args(PolicyName)},
    "xxh3": {"digest": "xxh3_128"},
    "windows": {"windows": (WindowConfig(6, 24),)},
    "states": {"states": StateConfig(8, unit=4)},
    "every state": {
        "states": StateConfig(8, unit=4, placement="every_unit"),
        "eviction_policy": "lru",
    },
    "windows and states": {
        "windows": (WindowConfig(6, 24),),
        "states": StateConfig(8, unit=4),
        "eviction_policy": "reuse_hazard",
    },
    "shares": {
        "tenant_shares": {b"somebody else": TenantShare(guaranteed=2, quota=6)},
        "eviction_policy": "lru",
    },
    "classic": {"free_order": "classic"},
    "ghost": {"ghost_blocks": 64},
}


@pytest.mark.parametrize("settings", VARIANTS.values(), ids=VARIANTS)
def test_nothing_of_a_tenant_can_be_reached_after_it_was_erased(index, settings):
    """Salt, token ids, digests: found before, and nowhere afterwards."""
    cache, digests = busy_cache(index, **settings)
    before = search(cache.prefix_cache, SALT, TOKENS, digests)
    assert before.salts and before.tokens and before.digests
    cache.prefix_cache.admin.erase(SALT)
    cache.manager.check()
    assert search(cache.prefix_cache, SALT, TOKENS, digests) == Traces()


def test_nothing_is_left_while_others_run(index):
    """Another tenant is in the middle of its prompt, and its own stays as it was."""
    cache, digests = busy_cache(index)
    cache.plan("running", "ABCDEFGHIJKLMNOP", upto=14, tenant=b"somebody else")
    cache.commit()
    cache.prefix_cache.admin.erase(SALT)
    assert search(cache.prefix_cache, SALT, TOKENS, digests) == Traces()
    cache.advance("running", 16)
    cache.commit()
    cache.finish("running")
    assert cache.match("ABCDEFGHIJKLMNOP!", tenant=b"somebody else").num_tokens == 16


def test_a_tenant_whose_requests_were_evicted_failed_or_wrote_nothing_leaves_nothing(index):
    """What was never published, taken back or given away is not kept anywhere either."""
    cache, digests = busy_cache(index)
    cache.serve(secret(12, 50), tenant=SALT, writes=False)
    cache.plan("failing", secret(12, 50), tenant=SALT)
    cache.fail()
    cache.admit("preempted", secret(12, 50), tenant=SALT)
    cache.finish("preempted")
    for number in range(10):
        cache.serve(chr(1000 + number) * 60, tenant=b"somebody else")
    cache.prefix_cache.admin.erase(SALT)
    assert search(cache.prefix_cache, SALT, TOKENS, digests) == Traces()


def test_the_receipt_counts_what_was_erased(index):
    """Ten tokens fill two blocks and begin a third; two leases; every event of it that is kept."""
    cache = tiny_cache(16, index=index, keep_event_batches=16)
    heard: list[EventBatch] = []
    cache.prefix_cache.events.subscribe(heard.append)
    cache.serve("ABCDEFGHIJ", tenant=SALT)
    cache.serve("ABCDEFGH", tenant=b"somebody else")
    for _ in range(2):
        cache.prefix_cache.admin.lease(prefix_key("ABCDEFGH", tenant=SALT), PINNED)
    receipt = cache.prefix_cache.admin.erase(SALT)
    events = [event for batch in heard for event in batch.events]
    assert not any(isinstance(event, AllCleared) for event in events)
    num_events = sum(event.identity.tenant == SALT for event in events)
    assert num_events >= 2, "it was stored and removed"
    assert receipt == EraseReceipt(num_blocks=3, num_leases=2, num_events=num_events)


def test_the_receipt_counts_blocks_of_all_groups(index):
    """Window 6 and ten tokens: two full blocks and a sealed tail, in each group."""
    cache = tiny_cache(16, index=index, windows=(WindowConfig(6, 16),))
    cache.serve("ABCDEFGHIJ", tenant=SALT)
    kept = len(list(windows_of(cache.manager)[0].copies()))
    assert cache.prefix_cache.admin.erase(SALT).num_blocks == 3 + kept


def test_who_is_unknown_is_erased_with_an_empty_receipt(cache):
    cache.serve("ABCDEFGH", tenant=b"somebody else")
    assert cache.prefix_cache.admin.erase(SALT) == EraseReceipt()
    assert cache.match("ABCDEFGHI", tenant=b"somebody else").num_tokens == 8


def test_a_tenant_that_runs_is_not_erased_and_nothing_changes(cache):
    cache.serve("ABCDEFGH", tenant=SALT)
    cache.admit("running", "ABCDEFGHI", tenant=SALT)
    before = whole_state(cache.manager)
    with pytest.raises(CacheInUse, match="1 sequences of the tenant are running"):
        cache.prefix_cache.admin.erase(SALT)
    assert whole_state(cache.manager) == before


def test_who_neither_reads_nor_writes_leaves_no_trace_but_its_count(index):
    """No-store without erasure: salts are counted per tenant, tokens and digests are nowhere."""
    cache = tiny_cache(8, index=index, keep_event_batches=8)
    served = cache.serve(secret(10), tenant=SALT, reads=False, writes=False)
    digests = {bytes(d) for memo in served.table.key.digests.values() for d in memo}
    traces = search(cache.prefix_cache, SALT, TOKENS, digests)
    assert (traces.tokens, traces.digests) == (0, 0)
    assert cache.prefix_cache.stats.tenants[SALT].query_tokens == 10
    assert cache.picture() == " ".join(["free"] * 8)


def test_live_slots_are_those_with_content_and_no_others(index):
    """A full block, half of a sealed one, and what a running request has computed so far."""
    cache: TinyCache = tiny_cache(8, index=index)
    cache.serve("ABCDEF")
    cache.plan("running", "123456789", upto=7)
    cache.commit()
    [live] = cache.prefix_cache.admin.live_slots()
    own = cache.blocks("running")
    served = {block: n for block, n in live.items() if block not in own}
    assert sorted(served.values()) == [2, 4]
    assert [live[block] for block in own] == [4, 3, 0]


def test_live_slots_of_a_window_end_where_it_begins(index):
    cache = tiny_cache(8, index=index, windows=(WindowConfig(5, 8),))
    cache.admit("running", "ABCDEFGHIJ", writes=False)
    full, window = cache.prefix_cache.admin.live_slots()
    assert sorted(full.values()) == [2, 4, 4]
    assert sorted(window.values()) == [2, 4], "six tokens left the window, a block with them"


def test_a_tenant_is_erased_with_what_others_continue_of_a_prefix_under_its_narrowed_salt(cache):
    """The salt is the tenant's, narrowed by its client; what follows is another tenant's."""
    public = Identity(tenant=b"ann\x1fpublic")
    cache.serve("ABCD", tenant=public.tenant)
    cache.prefix_cache.admin.publish(prefix_key("ABCD", tenant=public.tenant))
    cache.serve("ABCDEFGH", tenant=b"bob", base=public, start=4)
    assert cache.prefix_cache.admin.erase(b"ann").num_blocks == 2
    cache.prefix_cache.check()
