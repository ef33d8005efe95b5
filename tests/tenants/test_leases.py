"""What is promised to stay, for how long, and what a promise may cost others."""

from array import array
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ostinato.cache.block_table import BlockTable
from ostinato.core.errors import ConfigError
from ostinato.core.request import RequestContext
from ostinato.settings import TenantShare, WindowConfig
from ostinato.tenants.lease_book import LeaseBook
from ostinato.tenants.terms import (
    ANTHROPIC_1H,
    ANTHROPIC_5M,
    OPENAI_24H,
    PINNED,
    LeaseId,
    LeaseReceipt,
    LeaseStatus,
    LeaseTerms,
)
from tests.support.cache.cache_views import prefix_key
from tests.support.cache.tiny_cache import TinyCache, tiny_cache
from tests.support.servers.memory_search import reachable

FOR_FIVE = LeaseTerms(5.0)
FOR_FIVE_REFRESHED = LeaseTerms(5.0, refresh_on_hit=True)


def lease(cache: TinyCache, prompt: str, terms: LeaseTerms = PINNED, **identity) -> LeaseReceipt:
    """Lease a prompt; the cache's invariants hold after it."""
    receipt = cache.prefix_cache.admin.lease(prefix_key(prompt, **identity), terms)
    cache.manager.check()
    return receipt


def wait(cache: TinyCache, seconds: int) -> int:
    """Let time pass; returns the leases that live on."""
    cache.num_steps += seconds
    cache.prefix_cache.admin.expire()
    cache.manager.check()
    return cache.prefix_cache.admin.num_leases


def flood(cache: TinyCache, prompts: int = 20) -> None:
    """Serve new prompts, each as long as half of the pool."""
    length = cache.manager.config.num_slots // 2
    for number in range(prompts):
        cache.serve(chr(1000 + number) * length)


# --- what is answered ---------------------------------------------------------------------


def test_what_is_cached_is_held_in_whole_blocks(cache):
    """Ten tokens fill two blocks; the lease asks for no more than those."""
    cache.serve("ABCDEFGHIJ")
    receipt = lease(cache, "ABCDEFGHIJ")
    assert receipt == LeaseReceipt(LeaseStatus.ACCEPTED, 8, "", receipt.lease_id, None)
    assert cache.picture().startswith("ABCD:held EFGH:held IJ~:evictable free")


def test_a_lease_is_clipped_to_what_is_cached_and_says_so(cache):
    cache.serve("ABCDEFGH")
    receipt = lease(cache, "ABCDEFGHIJKL")
    assert (receipt.status, receipt.num_tokens) == (LeaseStatus.CLIPPED, 8)
    assert receipt.reason == "only 2 of 3 blocks are cached"


@pytest.mark.parametrize(
    ("prompt", "reason"),
    [
        ("VWXYZ", "no whole block of it is cached: send it as a prompt first"),
        ("ABC", "its 3 tokens do not fill a block of 4: lease a longer prefix"),
        ("", "its 0 tokens do not fill a block of 4: lease a longer prefix"),
    ],
)
def test_where_there_is_nothing_to_hold_a_lease_is_rejected(cache, prompt, reason):
    cache.serve("ABCDEFGH")
    assert lease(cache, prompt) == LeaseReceipt(LeaseStatus.REJECTED, reason=reason)
    assert cache.prefix_cache.admin.num_leases == 0


def test_all_leases_together_leave_what_the_longest_sequence_needs(index):
    """Six blocks, four of them reserved: two may be bound, by any tenant."""
    cache = tiny_cache(6, index=index, reserved_blocks=4)
    cache.serve("ABCDEFGHIJKL")
    cache.serve("1234")
    first, second = lease(cache, "ABCDEFGHIJKL"), lease(cache, "1234")
    assert (first.status, first.num_tokens) == (LeaseStatus.CLIPPED, 8)
    assert (second.status, second.num_tokens) == (LeaseStatus.REJECTED, 0)
    for receipt in (first, second):
        assert receipt.reason.startswith("leases and guarantees may bind 2 of 6 blocks")


def test_blocks_that_two_leases_share_count_once(index):
    cache = tiny_cache(6, index=index, reserved_blocks=4)
    cache.serve("ABCDEFGH")
    assert lease(cache, "ABCDEFGH").status is LeaseStatus.ACCEPTED
    again = lease(cache, "ABCDEFGH")
    assert again.status is LeaseStatus.ACCEPTED
    assert cache.prefix_cache.admin.num_leased_blocks == 2
    assert cache.prefix_cache.admin.end_lease(again.lease_id)
    flood(cache)
    assert cache.match("ABCDEFGH!").num_tokens == 8, "the first lease still holds them"


def test_what_floors_bind_leases_cannot(index):
    """Eight blocks, two reserved, five in guarantees: one is left for leases."""
    guarantees = {b"a": TenantShare(guaranteed=3), b"b": TenantShare(guaranteed=2)}
    cache = tiny_cache(8, index=index, reserved_blocks=2, tenant_shares=guarantees)
    cache.serve("ABCDEFGH")
    receipt = lease(cache, "ABCDEFGH")
    assert (receipt.status, receipt.num_tokens) == (LeaseStatus.CLIPPED, 4)


def test_a_tenant_cannot_pin_more_than_its_quota(index):
    """While it runs it holds more than it may keep; leases hold no more than that."""
    cache = tiny_cache(8, index=index, tenant_shares={b"a": TenantShare(quota=2)})
    cache.admit("running", "ABCDEFGHIJKL", tenant=b"a")
    receipt = lease(cache, "ABCDEFGHIJKL", tenant=b"a")
    assert (receipt.status, receipt.num_tokens) == (LeaseStatus.CLIPPED, 8)
    assert "quota of 2 blocks" in receipt.reason
    cache.finish("running")
    assert cache.picture().split() == ["ABCD:held", "EFGH:held"] + ["free"] * 6


@pytest.mark.parametrize("ttl_s", [0.0, -1.0, float("nan")])
def test_a_time_to_live_is_positive(ttl_s):
    with pytest.raises(ConfigError, match=r"ttl_s=.*must be above 0, or None to pin"):
        LeaseTerms(ttl_s)


# --- what is kept -------------------------------------------------------------------------


def test_a_pinned_path_survives_a_flood(cache):
    """Twenty prompts of half the pool pass by; what is not pinned beside it goes."""
    cache.serve("ABCDEFGH")
    cache.serve("abcdefgh")
    lease(cache, "ABCDEFGH")
    flood(cache)
    assert cache.match("ABCDEFGH!").num_tokens == 8
    assert cache.match("abcdefgh!").num_tokens == 0


def test_whatever_is_pinned_the_longest_request_runs(index):
    """Everything that was ever served is leased; five blocks stay, and five are needed."""
    cache = tiny_cache(8, index=index, reserved_blocks=5)
    for number in range(20):
        prompt = chr(1000 + number) * 8
        cache.serve(prompt)
        lease(cache, prompt)
    assert cache.prefix_cache.admin.num_leased_blocks == 3
    assert cache.admit("longest", "ABCDEFGHIJKLMNOPQRST") is not None


def test_leases_leave_a_window_s_pool_enough_for_one_sequence(index):
    """Six blocks, three needed to go on: windows of two blocks can be leased once, not twice."""
    cache = tiny_cache(64, index=index, windows=(WindowConfig(9, 6),))
    statuses = []
    for prompt in ("ABCDEFGH", "IJKLMNOP", "QRSTUVWX"):
        cache.serve(prompt)
        statuses.append(lease(cache, prompt).status)
    assert statuses == [LeaseStatus.ACCEPTED, LeaseStatus.REJECTED, LeaseStatus.REJECTED]
    assert cache.serve("abcdefghijkl").num_computed_here == 12


# --- for how long -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("terms", "seconds", "refreshed"),
    [(ANTHROPIC_5M, 300, True), (ANTHROPIC_1H, 3600, True), (OPENAI_24H, 86400, False)],
)
def test_the_presets_last_as_long_as_those_of_hosted_apis(cache, terms, seconds, refreshed):
    """Used one second before its end, a refreshed one lasts as long once more."""
    cache.serve("ABCDEFGH")
    lease(cache, "ABCDEFGH", terms)
    assert wait(cache, seconds - 2) == 1
    cache.serve("ABCDEFGHI")  # a step: one second
    assert wait(cache, 1) == int(refreshed)
    if refreshed:
        assert wait(cache, seconds - 3) == 1
        assert wait(cache, 1) == 0


@pytest.mark.parametrize(
    ("prompt", "tenant", "refreshes"),
    [
        ("ABCDEFGHIJ", b"", True),
        ("ABCDEFGH", b"", True),  # itself: all that may hit does (law 4)
        ("ABCDEFGX", b"", False),
        ("ABCD", b"", False),
        ("ABCDEFGHIJ", b"other", False),
    ],
)
def test_a_lease_is_refreshed_by_who_uses_all_of_it(cache, prompt, tenant, refreshes):
    cache.serve("ABCDEFGH")
    lease(cache, "ABCDEFGH", FOR_FIVE_REFRESHED)
    wait(cache, 3)
    cache.serve(prompt, tenant=tenant)
    assert wait(cache, 1) == int(refreshes)


LEASED = [[0], [0, 1], [0, 1, 2], [0, 1, 3], [0, 4, 5], [6, 7]]
"""Blocks of prefixes: nested, and branching off at each place."""


def block_table(blocks: list[int]) -> BlockTable:
    """Return a table of blocks of four tokens."""
    return BlockTable(prefix_key("ABCD" * len(blocks)), array("i", blocks))


@given(st.lists(st.tuples(st.sampled_from("olhhrc"), st.integers(1, 6)), max_size=60))
def test_leases_live_exactly_as_long_as_a_list_of_times_says(steps):
    """Open with and without refresh, hit, close and wait, in any order."""
    now, model = [0], dict[LeaseId, Any]()
    book = LeaseBook(lambda: float(now[0]))
    for what, number in steps:
        blocks = LEASED[number - 1]
        if what in "ol":
            terms = LeaseTerms(float(number % 4 + 1), refresh_on_hit=what == "l")
            opened = book.open(block_table(blocks), terms)
            renewal = terms.ttl_s if what == "l" else None
            model[opened.lease_id] = [now[0] + terms.ttl_s, renewal, blocks]
        elif what == "h":
            book.on_admit(block_table([*blocks, 8, 9]), RequestContext())
            for entry in model.values():
                if entry[1] is not None and blocks[: len(entry[2])] == entry[2]:
                    entry[0] = now[0] + entry[1]
        elif what == "c" and model:
            lease_id = sorted(model)[number % len(model)]
            assert book.close(lease_id) is not None
            del model[lease_id]
        else:
            now[0] += number
        gone = {lease.lease_id for lease in book.expired()}
        assert gone == {name for name, entry in model.items() if entry[0] <= now[0]}
        model = {name: entry for name, entry in model.items() if name not in gone}
        assert {lease.lease_id for lease in book} == set(model)


class Seconds(float):
    """A time that counts how often times are compared."""

    compared = 0

    def __add__(self, other: float) -> "Seconds":
        """Stay a counting time."""
        return Seconds(float(self) + other)

    def __lt__(self, other: float) -> bool:
        """Compare and count."""
        Seconds.compared += 1
        return float(self) < float(other)

    def __le__(self, other: float) -> bool:
        """Compare and count."""
        Seconds.compared += 1
        return float(self) <= float(other)


def test_expiry_costs_a_logarithm_and_not_a_walk():
    """Of 4,096 leases one ends: a heap of that size needs some 24 comparisons, a walk 4,096."""
    now = [Seconds(0)]
    book = LeaseBook(lambda: now[0])
    table = BlockTable(prefix_key("ABCD"), array("i", [0]))
    for number in range(4096):
        book.open(table, LeaseTerms(float(number * 37 % 4096 + 1)))
    now[0], Seconds.compared = Seconds(1), 0
    assert len(book.expired()) == 1
    assert Seconds.compared <= 4 * 12
    Seconds.compared = 0
    assert book.expired() == []
    assert Seconds.compared == 1, "nothing is due: one look at the first"


def test_hits_and_closed_leases_leave_nothing_behind():
    """A prefix that is hit ten thousand times, and as many leases that were released early."""
    book = LeaseBook(lambda: 0.0)
    table = BlockTable(prefix_key("ABCD"), array("i", [0]))
    book.open(table, ANTHROPIC_1H)
    for _ in range(10_000):
        book.on_admit(table, RequestContext())
        book.close(book.open(table, OPENAI_24H).lease_id)
    assert sum(1 for _ in reachable(book)) < 1_000
    assert len(book) == 1
