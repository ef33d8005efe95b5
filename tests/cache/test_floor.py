"""Reuse hazard is never far behind LRU, whoever asks for what, and in whichever order."""

import random
from collections.abc import Iterator
from itertools import islice

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato.cache.manager import CacheManager
from ostinato.cache.policies import shadow
from ostinato.cache.policies.reuse_hazard import ReuseHazard
from ostinato.core.config import CacheConfig, PolicyName
from ostinato.core.identity import Identity, PrefixKey
from tests.support.hard_traffic import HARD_TRAFFIC, Asked, Traffic

LAST = 2**32 - 1


class Cache:
    """A cache of blocks of one token, served one request at a time."""

    def __init__(self, num_blocks: int, policy: PolicyName) -> None:
        self.now_s = 0.0
        config = CacheConfig(
            num_blocks + 1, 1, policy=policy, seal_tails=False, keep_explanations=0
        )
        self.manager = CacheManager(config, clock=lambda: self.now_s)
        self.num_blocks, self.hits, self.num_asked = num_blocks, 0, 0

    @property
    def blocks(self) -> set[int]:
        """Ids of what is cached."""
        contents = self.manager.index.contents()
        return {int.from_bytes(cached.tokens, "little") for cached in contents}

    @property
    def shadow(self) -> shadow.Shadow:
        """The account against LRU."""
        policy = self.manager.pool.accounts.common.policy
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


@settings(deadline=None, max_examples=60)
@given(requests=requests, num_blocks=st.integers(6, 16), share=st.sampled_from((0.02, 0.1, 0.3)))
def test_on_any_traffic_no_more_is_lost_than_the_share(requests, num_blocks, share):
    """With a share that lets tiny caches part from LRU, and nothing but the share at stake."""
    pair = Pair(num_blocks)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shadow, "SHARE", share)
        patch.setattr(shadow, "UTMOST_SHARE", share)
        for number, (document, length, output) in enumerate(requests):
            path = list(range(1 + 100 * document, 1 + 100 * document + length))
            pair.serve(Asked(number * 3.0, path, output))
            pair.check()
            assert pair.lead >= -share * pair.ours.num_asked
            assert pair.ours.shadow.stake() >= 0, "more is at stake than may be lost"


@settings(deadline=None, max_examples=60)
@given(requests=requests, num_blocks=st.integers(6, 16))
def test_whatever_was_proven_no_more_is_lost_than_the_utmost_share(requests, num_blocks):
    pair = Pair(num_blocks)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shadow, "SHARE", 0.05)
        patch.setattr(shadow, "UTMOST_SHARE", 0.3)
        patch.setattr(shadow, "_DOUBT_BLOCKS", 0.5)
        for number, (document, length, output) in enumerate(requests):
            path = list(range(1 + 100 * document, 1 + 100 * document + length))
            pair.serve(Asked(number * 3.0, path, output))
            assert pair.lead >= -0.3 * pair.ours.num_asked
        pair.check()


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
