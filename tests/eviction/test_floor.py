"""Reuse hazard is never far behind LRU, whatever is asked for, and in whichever order."""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice

import pytest
from hypothesis import Phase, find, given, settings
from hypothesis import strategies as st

from ostinato.assembly import build_cache
from ostinato.cache.eviction import LeastRecentlyUsed, PolicyFactory
from ostinato.core.identity import Identity, PrefixKey
from ostinato.eviction import lifetimes
from ostinato.eviction.lifetimes import LruShadow
from ostinato.eviction.reuse_hazard import ReuseHazard
from ostinato.observe.introspection import cached_blocks
from ostinato.settings import PrefixCacheConfig
from tests.support.cache.adversary import PLANS, Adversary, Plan
from tests.support.cache.hard_traffic import HARD_TRAFFIC, Asked, Traffic, loop

LAST = 2**32 - 1


class Cache:
    """A cache of blocks of one token, served one request at a time."""

    def __init__(self, num_blocks: int, policy: PolicyFactory) -> None:
        self.now_s = 0.0
        config = PrefixCacheConfig(
            num_blocks + 1, 1, seal_tails=False, keep_explanations=0, ghost_blocks=0
        )
        self.manager = build_cache(config, lambda: self.now_s, policy=policy).manager
        self.num_blocks, self.hits, self.num_asked = num_blocks, 0, 0

    @property
    def blocks(self) -> set[int]:
        """Ids of what is cached."""
        contents = cached_blocks(self.manager.index)
        return {int.from_bytes(cached.tokens, "little") for cached in contents}

    @property
    def shadow(self) -> LruShadow:
        """The account against LRU."""
        policy = self.manager.pool.shares.policy_of(b"")
        assert isinstance(policy, ReuseHazard)
        return policy.shadow

    def serve(self, asked: Asked) -> None:
        """Serve a request; a last token that nothing begins with lets all of its blocks hit."""
        self.now_s, path = asked.at_s, asked.path[: self.num_blocks]
        key = PrefixKey(Identity(), [*path, LAST])
        match = self.manager.match(key)
        self.hits += len(match.blocks)
        self.num_asked += len(path)
        table, _ = self.manager.admit(key, match) or pytest.fail("it fits")
        self.manager.publish(table, len(path))
        self.manager.commit()
        self.manager.release(table, len(path), asked.num_output_tokens)


class Pair:
    """The policy and a real LRU cache, side by side."""

    def __init__(self, num_blocks: int, requests_per_fit: int = 50) -> None:
        self.ours = Cache(num_blocks, partial(ReuseHazard, requests_per_fit=requests_per_fit))
        self.lru = Cache(num_blocks, lambda *_: LeastRecentlyUsed())

    @property
    def lead(self) -> int:
        """Blocks that we hit and LRU did not, less the opposite."""
        return self.ours.hits - self.lru.hits

    @property
    def lacking(self) -> set[int]:
        """Blocks that LRU has and we have not."""
        return self.lru.blocks - self.ours.blocks

    def serve(self, asked: Asked) -> None:
        """Serve both; the account is to say what is true."""
        self.ours.serve(asked)
        self.lru.serve(asked)
        assert self.ours.shadow.credit == self.lead, "the account is wrong"
        assert self.ours.shadow.num_looked_up == self.ours.num_asked

    def check(self) -> None:
        """Compare what LRU holds as well."""
        self.ours.manager.check()
        assert self.ours.shadow.divergence == len(self.lacking)
        assert self.ours.shadow.num_held_by_lru == len(self.lru.blocks)


requests = st.lists(
    st.tuples(st.integers(0, 9), st.integers(1, 6), st.sampled_from((1, 100, 600))),
    min_size=30,
    max_size=100,
)
"""A document, how many blocks of it, and output tokens."""


@settings(max_examples=15)
@given(requests=requests, num_blocks=st.integers(6, 16), share=st.sampled_from((0.02, 0.1, 0.3)))
def test_the_account_is_right_on_any_traffic(requests, num_blocks, share):
    """With a share that lets tiny caches diverge from LRU, it says what a real LRU cache says."""
    pair = Pair(num_blocks)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lifetimes, "SHARE", share)
        patch.setattr(lifetimes, "UTMOST_SHARE", share)
        for number, (document, length, output) in enumerate(requests):
            path = list(range(1 + 100 * document, 1 + 100 * document + length))
            pair.serve(Asked(number * 3.0, path, output))
            pair.check()


# --- an adversary that looks into the cache, and does what Hypothesis can think of ---


@dataclass(frozen=True)
class Limits:
    """What tiny caches, which learn every five requests, may lose.

    Attributes:
        share: While nothing is proven.
        utmost: Whatever was proven.
        doubt: Lost blocks that are assumed before any were seen.
    """

    share: float
    utmost: float
    doubt: float = 30.0


SURE_LIMITS = [Limits(share, share) for share in (0.02, 0.05, 0.1)]
"""The budget is the share and nothing else."""

TRUSTING_LIMITS = [Limits(0.04, 0.06, 0.1), Limits(0.02, 0.03, 0.1)]
"""So little doubt that a few blocks prove much."""


@contextmanager
def patched(limits: Limits, budget: Callable[[LruShadow], int] | None = None) -> Iterator[None]:
    """Set these limits, and a budget of one's own if one is given."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lifetimes, "SHARE", limits.share)
        patch.setattr(lifetimes, "UTMOST_SHARE", limits.utmost)
        patch.setattr(lifetimes, "DOUBT_BLOCKS", limits.doubt)
        if budget is not None:
            patch.setattr(LruShadow, "budget", budget)
        yield


def least_spare(plan: Plan, limits: Limits) -> float:
    """Let an adversary do its worst; return the share that was never lost, at its least."""
    pair, least = Pair(plan.num_blocks, requests_per_fit=5), 1.0
    for asked in Adversary(lambda: pair.lacking, plan.length).requests(plan.acts):
        pair.serve(asked)
        least = min(least, limits.utmost + pair.lead / pair.ours.num_asked)
    pair.check()
    return least


@settings(max_examples=15)
@given(plan=PLANS, limits=st.sampled_from([*SURE_LIMITS, *TRUSTING_LIMITS]))
def test_an_adversary_takes_no_more_than_the_utmost_share(plan, limits):
    """Which is the share itself where nothing else is in the budget."""
    with patched(limits):
        assert least_spare(plan, limits) >= 0


@pytest.mark.nightly
@given(plan=PLANS, limits=st.sampled_from([*SURE_LIMITS, *TRUSTING_LIMITS]))
def test_many_adversaries_take_no_more_than_the_utmost_share(plan, limits):
    with patched(limits):
        assert least_spare(plan, limits) >= 0


real_budget = LruShadow.budget


def endless(account: LruShadow) -> int:
    """As if nothing could be lost."""
    return 10**9


def one_too_many(account: LruShadow) -> int:
    """A block more than the account allows."""
    return real_budget(account) + 1


def forgetful(account: LruShadow) -> int:
    """As if what diverges already could not be lost as well."""
    return real_budget(account) + account.divergence


def unlimited(account: LruShadow) -> int:
    """As if what was proven held for any traffic."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lifetimes, "UTMOST_SHARE", 1.0)
        return real_budget(account)


@pytest.mark.parametrize(
    ("budget", "limits"),
    [
        *((budget, SURE_LIMITS[1]) for budget in (endless, one_too_many, forgetful)),
        *((b, TRUSTING_LIMITS[0]) for b in (endless, one_too_many, forgetful, unlimited)),
    ],
)
def test_the_same_adversary_ruins_an_account_that_is_wrong(budget, limits):
    """Within sixty examples: else the test above would say nothing."""

    def takes_too_much(plan: Plan) -> bool:
        with patched(limits, budget):
            return least_spare(plan, limits) < 0

    few = settings(deadline=None, max_examples=60, database=None, phases=[Phase.generate])
    plan = find(PLANS, takes_too_much, settings=few)
    with patched(limits):
        assert least_spare(plan, limits) >= 0, "the true account withstands the same plan"


# --- hard traffic ---


def least_lead(pair: Pair, traffic: Iterator[Asked], num_requests: int) -> float:
    """Serve; return the lead at its worst, as a share of what was asked for until then."""
    worst = 0.0
    for asked in islice(traffic, num_requests):
        pair.serve(asked)
        worst = min(worst, pair.lead / pair.ours.num_asked)
    pair.check()
    return worst


hard_traffic = pytest.mark.parametrize("traffic", HARD_TRAFFIC, ids=lambda kind: kind.__name__)


@hard_traffic
def test_hard_traffic_costs_at_most_a_fifth_of_a_point(traffic: Traffic):
    """At no time of it, and not only at its end."""
    worst = least_lead(Pair(60), traffic(random.Random(7), 60), 500)
    assert worst >= -lifetimes.SHARE


on_both_shares = pytest.mark.parametrize(
    "utmost", [lifetimes.SHARE, lifetimes.UTMOST_SHARE], ids=["share", "utmost share"]
)
"""What is promised, and what is promised if nothing that was proven counts."""


@pytest.mark.nightly
@hard_traffic
@on_both_shares
@pytest.mark.parametrize("num_blocks", [60, 300, 1_500])
@pytest.mark.parametrize("seed", range(3))
def test_hard_traffic_costs_at_most_the_utmost_share(
    traffic, utmost, num_blocks, seed, monkeypatch
):
    """Mostly a fifth of a point; two points are the promise where more was proven."""
    monkeypatch.setattr(lifetimes, "UTMOST_SHARE", utmost)
    worst = least_lead(Pair(num_blocks), traffic(random.Random(100 + seed), num_blocks), 6_000)
    assert worst >= -utmost


def traitor(pair: Pair, traffic: Iterator[Asked], rng: random.Random) -> Iterator[Asked]:
    """Ordinary traffic, and now and then all that LRU has and the policy has not."""
    at_s = 0.0
    while True:
        for asked in islice(traffic, rng.randrange(50, 400)):
            at_s = max(at_s, asked.at_s)
            yield Asked(at_s, asked.path, asked.num_output_tokens)
        while pair.lacking:
            block = max(pair.lacking)
            first = 1 + (block - 1) // 1_000 * 1_000
            at_s += 0.01
            yield Asked(at_s, list(range(first, block + 1)))


def takes(traffic: Traffic, num_requests: int) -> float:
    """Let a traitor do its worst; return the lead at its worst."""
    pair, rng = Pair(100), random.Random(5)
    return least_lead(pair, traitor(pair, traffic(rng, 100), rng), num_requests)


@on_both_shares
def test_a_traitor_takes_no_more_than_the_utmost_share(utmost, monkeypatch):
    """It looks into the cache and asks for what is missing: nothing is worse."""
    monkeypatch.setattr(lifetimes, "UTMOST_SHARE", utmost)
    assert takes(loop, 500) >= -utmost


@pytest.mark.nightly
@hard_traffic
@on_both_shares
def test_a_traitor_takes_no_more_than_the_utmost_share_of_any_traffic(traffic, utmost, monkeypatch):
    monkeypatch.setattr(lifetimes, "UTMOST_SHARE", utmost)
    assert takes(traffic, 2_000) >= -utmost


def test_it_is_worth_it():
    """Where LRU finds nothing, as in a loop that is a little too long, most is found."""
    pair = Pair(200)
    least_lead(pair, loop(random.Random(1), 200), 1_000)
    assert pair.lru.hits == 0
    assert pair.ours.hits > 0.3 * pair.ours.num_asked
