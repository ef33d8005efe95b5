"""Reuse hazard is never far behind LRU, whoever asks for what, and in whichever order."""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice

import pytest
from hypothesis import Phase, find, given, settings
from hypothesis import strategies as st

from ostinato.assembly import build_cache
from ostinato.cache.policies import shadow
from ostinato.cache.policies.reuse_hazard import ReuseHazard
from ostinato.core.config import CacheConfig, PolicyName
from ostinato.core.identity import Identity, PrefixKey
from tests.support.adversary import PLANS, Adversary, Plan
from tests.support.hard_traffic import HARD_TRAFFIC, Asked, Traffic

LAST = 2**32 - 1


class Cache:
    """A cache of blocks of one token, served one request at a time."""

    def __init__(self, num_blocks: int, policy: PolicyName) -> None:
        self.now_s = 0.0
        config = CacheConfig(
            num_blocks + 1, 1, policy=policy, seal_tails=False, keep_explanations=0
        )
        self.manager = build_cache(config, clock=lambda: self.now_s).manager
        self.num_blocks, self.hits, self.num_asked = num_blocks, 0, 0

    @property
    def blocks(self) -> set[int]:
        """Ids of what is cached."""
        contents = self.manager.index.contents()
        return {int.from_bytes(cached.tokens, "little") for cached in contents}

    @property
    def shadow(self) -> shadow.Shadow:
        """The account against LRU."""
        policy = self.manager.pool.shares.policy_of(b"")
        assert isinstance(policy, ReuseHazard)
        return policy.shadow

    def serve(self, asked: Asked) -> None:
        """Serve a request; a last token of nobody's lets all of its blocks hit."""
        self.now_s, path = asked.at_s, asked.path[: self.num_blocks]
        key = PrefixKey(Identity(), [*path, LAST])
        match = self.manager.match(key)
        self.hits += len(match.blocks)
        self.num_asked += len(path)
        table, _ = self.manager.admit(key, match) or pytest.fail("it fits")
        self.manager.publish(table, len(path))
        self.manager.commit([table])
        self.manager.release(table, len(path), asked.num_output_tokens)


class Pair:
    """The policy and a real LRU cache, side by side."""

    def __init__(self, num_blocks: int) -> None:
        self.ours, self.lru = Cache(num_blocks, "reuse_hazard"), Cache(num_blocks, "lru")

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
        assert self.ours.shadow.lead == self.lead, "the account is wrong"
        assert self.ours.shadow.num_looked_up == self.ours.num_asked

    def check(self) -> None:
        """Compare what LRU holds as well."""
        self.ours.manager.check()
        assert self.ours.shadow.num_lacking == len(self.lacking)
        assert self.ours.shadow.num_held_by_lru == len(self.lru.blocks)


requests = st.lists(
    st.builds(
        lambda document, length, output: (document, length, output),
        st.integers(0, 9),
        st.integers(1, 6),
        st.sampled_from((1, 100, 600)),
    ),
    min_size=30,
    max_size=150,
)


@settings(deadline=None, max_examples=40)
@given(requests=requests, num_blocks=st.integers(6, 16), share=st.sampled_from((0.02, 0.1, 0.3)))
def test_the_account_is_right_on_any_traffic(requests, num_blocks, share):
    """With a share that lets tiny caches part from LRU, it says what a real LRU cache says."""
    pair = Pair(num_blocks)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shadow, "SHARE", share)
        patch.setattr(shadow, "UTMOST_SHARE", share)
        for number, (document, length, output) in enumerate(requests):
            path = list(range(1 + 100 * document, 1 + 100 * document + length))
            pair.serve(Asked(number * 3.0, path, output))
            pair.check()


# --- somebody who looks into the cache, and does what Hypothesis can think of ---


@dataclass(frozen=True)
class Stakes:
    """What tiny caches, which learn every five requests, may lose.

    Attributes:
        share: While nothing is proven.
        utmost: Whatever was proven.
        doubt: Lost blocks that are assumed before any were seen.
    """

    share: float
    utmost: float
    doubt: float = 30.0


SURE_STAKES = [Stakes(share, share) for share in (0.02, 0.05, 0.1)]
"""Nothing but the share is staked."""

TRUSTING_STAKES = [Stakes(0.04, 0.06, 0.1), Stakes(0.02, 0.03, 0.1)]
"""So little doubt that a few blocks prove much."""


@contextmanager
def patched(stakes: Stakes, stake: Callable[[shadow.Shadow], int] | None = None) -> Iterator[None]:
    """Let so much be staked, and nothing else if an account of one's own is given."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ReuseHazard, "turns_per_fit", 5)
        patch.setattr(shadow, "SHARE", stakes.share)
        patch.setattr(shadow, "UTMOST_SHARE", stakes.utmost)
        patch.setattr(shadow, "_DOUBT_BLOCKS", stakes.doubt)
        if stake is not None:
            patch.setattr(shadow.Shadow, "stake", stake)
        yield


def least_spare(plan: Plan, stakes: Stakes) -> float:
    """Let an adversary do its worst; return the share that was never lost, at its least."""
    pair, least = Pair(plan.num_blocks), 1.0
    for asked in Adversary(lambda: pair.lacking, plan.length).requests(plan.acts):
        pair.serve(asked)
        least = min(least, stakes.utmost + pair.lead / pair.ours.num_asked)
    pair.check()
    return least


@settings(deadline=None, max_examples=60)
@given(plan=PLANS, stakes=st.sampled_from(SURE_STAKES))
def test_an_adversary_takes_no_more_than_the_share_where_nothing_else_is_staked(plan, stakes):
    with patched(stakes):
        assert least_spare(plan, stakes) >= 0


@settings(deadline=None, max_examples=60)
@given(plan=PLANS, stakes=st.sampled_from(TRUSTING_STAKES))
def test_an_adversary_takes_no_more_than_the_utmost_share_whatever_was_proven(plan, stakes):
    with patched(stakes):
        assert least_spare(plan, stakes) >= 0


real_stake = shadow.Shadow.stake


def endless(account: shadow.Shadow) -> int:
    """As if nothing could be lost."""
    return 10**9


def one_too_many(account: shadow.Shadow) -> int:
    """A block more than the account allows."""
    return real_stake(account) + 1


def forgetful(account: shadow.Shadow) -> int:
    """As if what is lacking already could not be lost as well."""
    return real_stake(account) + account.num_lacking


def unlimited(account: shadow.Shadow) -> int:
    """As if what was proven held for any traffic."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shadow, "UTMOST_SHARE", 1.0)
        return real_stake(account)


@pytest.mark.parametrize(
    ("stake", "stakes"),
    [
        *((stake, SURE_STAKES[1]) for stake in (endless, one_too_many, forgetful)),
        *((stake, TRUSTING_STAKES[0]) for stake in (endless, one_too_many, forgetful, unlimited)),
    ],
)
def test_the_same_adversary_ruins_an_account_that_is_wrong(stake, stakes):
    """Within as many examples: else those two tests would say nothing."""

    def takes_too_much(plan: Plan) -> bool:
        with patched(stakes, stake):
            return least_spare(plan, stakes) < 0

    few = settings(deadline=None, max_examples=60, database=None, phases=[Phase.generate])
    plan = find(PLANS, takes_too_much, settings=few)
    with patched(stakes):
        assert least_spare(plan, stakes) >= 0, "the true account withstands the same plan"


def least_lead(pair: Pair, traffic: Iterator[Asked], num_requests: int) -> float:
    """Serve; return the lead at its worst, as a share of what was asked for until then."""
    worst = 0.0
    for asked in islice(traffic, num_requests):
        pair.serve(asked)
        worst = min(worst, pair.lead / pair.ours.num_asked)
    pair.check()
    return worst


@pytest.mark.parametrize("traffic", HARD_TRAFFIC, ids=lambda traffic: traffic.__name__)
@pytest.mark.parametrize("num_blocks", [60, 400])
def test_hard_traffic_costs_at_most_a_fifth_of_a_point(traffic: Traffic, num_blocks: int):
    """At no time of it, and not only at its end."""
    worst = least_lead(Pair(num_blocks), traffic(random.Random(7), num_blocks), 1_000)
    assert worst >= -shadow.SHARE


@pytest.mark.nightly
@pytest.mark.parametrize("traffic", HARD_TRAFFIC, ids=lambda traffic: traffic.__name__)
@pytest.mark.parametrize("num_blocks", [60, 300, 1_500])
@pytest.mark.parametrize("seed", range(5))
def test_hard_traffic_of_other_seeds_costs_hardly_more(
    traffic: Traffic, num_blocks: int, seed: int
):
    """What was proven may be staked, so 0.2 points are no proof here: crowds once took 0.215."""
    worst = least_lead(Pair(num_blocks), traffic(random.Random(100 + seed), num_blocks), 6_000)
    assert worst >= -1.25 * shadow.SHARE


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


@pytest.mark.parametrize("traffic", HARD_TRAFFIC, ids=lambda traffic: traffic.__name__)
def test_a_traitor_takes_no_more_than_the_share_where_nothing_else_is_staked(traffic, monkeypatch):
    """It looks into the cache and asks for what is missing: nobody can do worse."""
    monkeypatch.setattr(shadow, "UTMOST_SHARE", shadow.SHARE)
    pair, rng = Pair(100), random.Random(5)
    assert least_lead(pair, traitor(pair, traffic(rng, 100), rng), 1_000) >= -shadow.SHARE


@pytest.mark.parametrize("traffic", HARD_TRAFFIC, ids=lambda traffic: traffic.__name__)
def test_a_traitor_takes_no_more_than_the_utmost_share(traffic):
    pair, rng = Pair(100), random.Random(5)
    assert least_lead(pair, traitor(pair, traffic(rng, 100), rng), 1_000) >= -shadow.UTMOST_SHARE


def test_it_is_worth_it():
    """Where LRU finds nothing, as in a loop that is a little too long, most is found."""
    pair = Pair(200)
    least_lead(pair, HARD_TRAFFIC[1](random.Random(1), 200), 1_500)
    assert pair.lru.hits == 0
    assert pair.ours.hits > 0.4 * pair.ours.num_asked
