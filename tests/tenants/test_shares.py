"""Guarantees and quotas: whose blocks may be taken, by whom, and what stays."""

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ostinato.core.errors import ConfigError
from ostinato.core.identity import Identity
from ostinato.observe.introspection import cached_blocks
from ostinato.settings import PrefixCacheConfig, TenantShare, WindowConfig, window_blocks
from ostinato.tenants.terms import PINNED
from tests.support.cache.cache_views import letters, prefix_key, shares_of, windows_of
from tests.support.cache.tiny_cache import TinyCache, tiny_cache

# --- quotas -------------------------------------------------------------------------------


def test_a_tenant_at_its_quota_evicts_its_own_first(index):
    """At once: unused blocks are left, a neighbour's blocks are older, and neither is touched."""
    cache = tiny_cache(8, index=index, tenant_shares={b"a": TenantShare(quota=2)})
    cache.serve("12345678", tenant=b"b")
    cache.serve("ABCDEFGH", tenant=b"a")
    cache.admit("running", "IJKLMNOP", tenant=b"a")
    expected = ["1234:evictable", "5678:evictable", "IJKL:held", "MNOP:held", *["free"] * 4]
    assert sorted(cache.picture().split()) == expected


def test_a_running_tenant_may_exceed_its_quota_and_keeps_no_more_afterwards(index):
    """Five blocks are needed to run; two stay, and it is the beginning that stays (law 8)."""
    cache = tiny_cache(8, index=index, tenant_shares={b"a": TenantShare(quota=2)})
    cache.admit("running", "ABCDEFGHIJKLMNOPQRST", tenant=b"a")
    assert cache.picture().count("held") == 5
    cache.finish("running")
    assert cache.picture() == "ABCD:evictable EFGH:evictable " + " ".join(["free"] * 6)
    assert cache.match("ABCDEFGHIJKL", tenant=b"a").num_tokens == 8


def test_a_tenant_above_its_quota_is_evicted_before_older_blocks_of_others(index):
    """Three blocks have left a's window while it runs, and it may keep one: the deepest two go."""
    shares = {b"a": TenantShare(quota=2)}  # of sixteen; of the window's eight blocks it is one
    cache = tiny_cache(16, index=index, windows=(WindowConfig(5, 8),), tenant_shares=shares)
    cache.serve("1234", tenant=b"b")
    cache.admit("running", "ABCDEFGHIJKLMNOP", tenant=b"a")
    cache.admit("newcomer", "stuvwxyzSTUVWXYZ0987", tenant=b"c", writes=False)
    cached = [letters(copy.content.name) for copy in windows_of(cache.manager)[0].copies()]
    assert sorted(cached) == ["1234", "ABCD", "MNOP"]


# --- guarantees -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("guaranteed", "hits"), [(6, 10 * 23), (0, 0)], ids=["with a guarantee", "without one"]
)
def test_a_neighbour_s_scan_of_a_thousand_prompts_leaves_a_guarantee_and_its_hits_alone(
    index, guaranteed, hits
):
    """Sixteen blocks; 24 tokens come back after every hundred one-shot prompts of 20 tokens.

    With a guarantee, 23 of 24 hit each time (law 4); without one, nothing is ever left.
    """
    cache = tiny_cache(
        16, index=index, tenant_shares={b"tenant": TenantShare(guaranteed=guaranteed)}
    )
    prompt = "ABCDEFGHIJKLMNOPQRSTUVWX"
    cache.serve(prompt, tenant=b"tenant")
    for number in range(1000):
        scan(cache, chr(1000 + number) * 20)
        if number % 100 == 99:
            cache.serve(prompt, tenant=b"tenant")
    counts = cache.prefix_cache.stats.tenants[b"tenant"]
    assert (counts.num_requests, counts.query_tokens, counts.hit_tokens) == (11, 264, hits)
    assert counts.hit_ratio == hits / 264
    assert cache.prefix_cache.stats.tenants[b"neighbour"].hit_ratio == 0.0


def scan(cache: TinyCache, prompt: str) -> None:
    """Serve a neighbour's prompt, straight through the manager: a thousand of them are many."""
    manager, key = cache.manager, prefix_key(prompt, tenant=b"neighbour")
    admitted = manager.admit(key, manager.match(key))
    assert admitted is not None
    manager.publish(admitted[0], len(key))
    manager.commit()
    manager.release(admitted[0], len(key))


# --- what is refused ----------------------------------------------------------------------


def test_floors_that_bind_too_much_are_refused_with_all_numbers():
    guarantees = {b"a": TenantShare(guaranteed=5), b"b": TenantShare(guaranteed=4)}
    with pytest.raises(ConfigError) as refusal:
        PrefixCacheConfig(num_blocks=12, reserved_blocks=4, tenant_shares=guarantees)
    for words in ("sum to 9 blocks", "only 8", "num_blocks=12", "4 are reserved", "max_model_len"):
        assert words in str(refusal.value)
    PrefixCacheConfig(num_blocks=13, reserved_blocks=4, tenant_shares=guarantees)


@pytest.mark.parametrize(
    ("share", "message"),
    [
        ({"guaranteed": -1}, "guaranteed=-1: must be an integer, in blocks, at least 0"),
        ({"quota": 0}, "quota=0: must be an integer, in blocks, at least 1"),
        ({"guaranteed": 3, "quota": 2}, "guaranteed=3 is above quota=2"),
    ],
)
def test_a_share_that_cannot_be_is_refused(share, message):
    with pytest.raises(ConfigError, match=message):
        TenantShare(**share)


def test_floors_leave_a_window_s_pool_enough_for_one_sequence(index):
    """All that can be bound is: scaled to a pool of five blocks, two are, and three serve b."""
    windows = (WindowConfig(9, 5),)
    assert window_blocks(9, 4) == 3
    cache = tiny_cache(
        40,
        index=index,
        windows=windows,
        reserved_blocks=8,
        tenant_shares={b"a": TenantShare(guaranteed=32)},
    )
    cache.serve("ABCDEFGHIJKLMNOP", tenant=b"a")
    served = cache.admit("b", "1234567890", tenant=b"b")
    assert served is not None
    assert [a.share.guaranteed for a in shares_of(windows_of(cache.manager)[0].pool)] == [0, 1]


# --- against a slow model -----------------------------------------------------------------

SHARES = {
    b"a": TenantShare(guaranteed=2),
    b"b": TenantShare(quota=2),
    b"c": TenantShare(guaranteed=1, quota=3),
}
TENANTS = (*SHARES, b"d")


@dataclass(frozen=True)
class Holdings:
    """What one tenant has, counted block by block.

    Attributes:
        charged: All its blocks.
        idle: Those of them without a holder.
    """

    charged: int
    idle: int

    def takeable(self, guarantee: int) -> int:
        """Blocks that others may take."""
        return max(0, min(self.idle, self.charged - guarantee))


def holdings(cache: TinyCache) -> dict[bytes, Holdings]:
    """Recount every tenant's blocks from contents and tables; ``d`` has no account of its own."""
    found = {}
    contents = list(cached_blocks(cache.manager.index))
    live = [*(s.table for s in cache.sequences.values()), *cache.manager.tables.pinned.values()]
    for tenant in TENANTS:
        mine = [c for c in contents if c.parent.startswith(Identity(tenant=tenant).encoded)]
        private = sum(len(table.private_blocks) for table in live if table.tenant == tenant)
        idle = sum(not cached.ref_count for cached in mine)
        found[tenant] = Holdings(len(mine) + private, idle)
    return found


def room_for(cache: TinyCache, tenant: bytes) -> int:
    """Blocks that a tenant could have: unused, all its own idle ones, others' above guarantees."""
    counted = holdings(cache)
    unused = cache.manager.config.num_blocks - sum(h.charged for h in counted.values())
    others = sum(
        held.takeable(SHARES[name].guaranteed if name in SHARES else 0)
        for name, held in counted.items()
        if name != tenant
    )
    return unused + counted[tenant].idle + others


def fits(cache: TinyCache, prompt: str, tenant: bytes) -> bool:
    """Whether a prompt can be admitted: hits without a holder are free no more."""
    match = cache.match(prompt, tenant=tenant)
    refs: dict[int, int] = {c.block: c.ref_count for c in cached_blocks(cache.manager.index)}
    idle = sum(not refs[block] for block in match.blocks)
    return -(-len(prompt) // 2) - len(match.blocks) <= room_for(cache, tenant) - idle


PROMPTS = st.text("AB", min_size=1, max_size=9)
STEPS = st.lists(
    st.tuples(st.sampled_from(["serve", "admit", "append", "finish", "lease", "end"]),
              st.sampled_from(TENANTS), PROMPTS),
    max_size=30,
)  # fmt: skip


@pytest.mark.parametrize("index", ["radix", "hash"])
@given(steps=STEPS, num_blocks=st.integers(7, 10))
def test_floors_and_quotas_hold_whatever_happens(index, steps, num_blocks):
    """Blocks of two tokens, four tenants; every count is recounted after every step.

    No other tenant's step takes one below its guarantee; who holds nothing keeps no more than its
    quota; and whatever fits is admitted, whatever does not is refused.
    """
    cache = tiny_cache(num_blocks, 2, index=index, tenant_shares=SHARES, reserved_blocks=4)
    leases: list[int] = []
    for number, (what, tenant, prompt) in enumerate(steps):
        before = holdings(cache)
        own = [name for name, s in cache.sequences.items() if s.table.tenant == tenant]
        if what in ("serve", "admit"):
            expected = fits(cache, prompt, tenant)
            name = f"{number}"
            assert (cache.admit(name, prompt, tenant=tenant) is not None) == expected
            if expected and what == "serve":
                cache.finish(name)
        elif what == "append" and own:
            cache.append(own[0], prompt[0])
        elif what == "finish" and own:
            cache.finish(own[-1])
        elif what == "lease":
            receipt = cache.prefix_cache.admin.lease(prefix_key(prompt, tenant=tenant), PINNED)
            leases += [] if receipt.lease_id is None else [receipt.lease_id]
        elif what == "end" and leases:
            cache.prefix_cache.admin.end_lease(leases.pop(0))
        cache.manager.check()
        check_shares(cache, before, tenant if what != "end" else None)


def check_shares(cache: TinyCache, before: dict[bytes, Holdings], actor: bytes | None) -> None:
    """Assert guarantees and quotas after one tenant's step."""
    after = holdings(cache)
    busy = {s.table.tenant for s in cache.sequences.values()}
    for account, tenant in zip(list(cache.manager.pool.shares)[1:], SHARES, strict=True):
        assert account.num_charged == after[tenant].charged
        assert account.policy.num_blocks == after[tenant].idle
    for tenant, share in SHARES.items():
        if tenant != actor and actor is not None:
            kept = min(before[tenant].charged, share.guaranteed)
            assert after[tenant].charged >= kept, f"{actor!r} took from {tenant!r}'s guarantee"
        if tenant not in busy and share.quota is not None:
            assert after[tenant].charged <= share.quota, f"{tenant!r} keeps too much"
