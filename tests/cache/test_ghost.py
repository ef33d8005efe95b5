"""The ghost's estimates, beside caches that are really of that size or policy, and their price."""

import random
import tracemalloc
from array import array
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ostinato.assembly import PrefixCache, build_cache
from ostinato.cache.anchor import AtRatio, LruInItsPlace
from ostinato.cache.answers import TOO_WIDE
from ostinato.cache.ghost import ALLOWANCE_S
from ostinato.cache.learned_cache import LearnedCache
from ostinato.cache.likenesses import ALL, Known
from ostinato.cache.policies import shadow
from ostinato.cache.policies.reuse_hazard import ReuseHazard
from ostinato.cache.sample import Sampler, TrafficLog
from ostinato.cache.small_cache import LruStack, SampledTurn, SmallCache
from ostinato.cache.tally import NUM_PARTS, SoFar, Tally
from ostinato.core.config import CacheConfig, PolicyName
from ostinato.core.errors import ConfigError
from ostinato.core.identity import Identity, ImageSpan, PrefixKey, PublicHead
from ostinato.observe.counters import LookupCounts
from tests.support.tiny_cache import prefix_key

NUM_BLOCKS = 2_000


def conversations(num_turns: int) -> list[str]:
    """Prompts of conversations behind three system prompts; some come back late or never."""
    rng = random.Random(1)
    systems = ["".join(chr(rng.randrange(0x100, 0x4000)) for _ in range(160)) for _ in range(3)]
    open_ones: list[str] = []
    prompts = []
    for _ in range(num_turns):
        if len(open_ones) < 150 or rng.random() < 0.1:
            text = rng.choice(systems)
        else:
            text = open_ones.pop(int(len(open_ones) * rng.random() ** 3))
        text += "".join(chr(rng.randrange(0x100, 0x9000)) for _ in range(rng.randrange(20, 120)))
        prompts.append(text)
        if len(text) < 1_500:
            open_ones.append(text)
    return prompts


def served(prompts: list[str], **settings) -> PrefixCache:
    """Serve prompts, one a second."""
    now_s = 0.0
    cache = build_cache(CacheConfig(**{"block_size": 4, **settings}), clock=lambda: now_s)
    for number, prompt in enumerate(prompts):
        now_s = float(number)
        key = prefix_key(prompt)
        admitted = cache.admit(key, cache.match(key))
        assert admitted is not None
        cache.publish(admitted[0], len(key))
        cache.commit([admitted[0]])
        cache.release(admitted[0], len(key))
    if cache.ghost is not None:
        cache.ghost.catch_up()
    return cache


@pytest.fixture(scope="module")
def prompts() -> list[str]:
    """Traffic that every size finds different amounts of."""
    return conversations(3_000)


@pytest.fixture(scope="module")
def watched(prompts) -> PrefixCache:
    """A cache with a ghost that samples a twentieth of it and spares no time."""
    return served(prompts, num_blocks=NUM_BLOCKS, ghost_blocks=100, ghost_share=1.0)


@pytest.mark.parametrize(
    "settings",
    [
        {"num_blocks": NUM_BLOCKS // 2},
        {"num_blocks": NUM_BLOCKS * 2},
        {"num_blocks": NUM_BLOCKS * 4},
        {"num_blocks": NUM_BLOCKS, "policy": "s3fifo"},
        {"num_blocks": NUM_BLOCKS, "policy": "slru"},
    ],
)
def test_an_estimate_is_within_three_points_of_the_real_cache(settings, prompts, watched):
    """And the real ratios are much further apart than that, so it says something."""
    real = served(prompts, **settings, ghost_blocks=0).stats.first.hit_ratio
    wanted = (settings["num_blocks"], settings.get("policy", "lru"))
    [estimate] = [g for g in watched.stats.ghosts if (g.num_blocks, g.policy) == wanted]
    assert estimate.hit_ratio == pytest.approx(real, abs=0.03)
    assert estimate.low <= real <= estimate.high
    assert estimate.num_sampled > 500 and estimate.num_requests > 2_000


def test_sizes_differ_by_more_than_the_error(watched):
    ratios = [ghost.hit_ratio for ghost in watched.stats.ghosts if ghost.policy == "lru"]
    assert ratios[2] - ratios[0] > 0.06


def test_every_size_and_policy_is_estimated(watched):
    """Three sizes under the cache's own policy, and every other policy at the cache's size.

    One that learns is known worse, here than to ten points.
    """
    found = {(ghost.memory, ghost.policy) for ghost in watched.stats.ghosts}
    others = {(1.0, policy) for policy in get_args(PolicyName) if policy != "lru"}
    known = found | {(1.0, "reuse_hazard")}
    assert known == {(0.5, "lru"), (2.0, "lru"), (4.0, "lru")} | others


def test_a_cache_of_another_policy_is_set_beside_lru(prompts):
    """Its sizes are those of its own policy."""
    settings = {"ghost_blocks": 100, "ghost_share": 1.0, "policy": "slru"}
    cache = served(prompts[:600], num_blocks=NUM_BLOCKS, **settings)
    found = {(ghost.memory, ghost.policy) for ghost in cache.stats.ghosts}
    assert {(0.5, "slru"), (2.0, "slru"), (4.0, "slru"), (1.0, "lru")} <= found
    assert (1.0, "slru") not in found


# --- under a policy that learns ---


@pytest.fixture(scope="module")
def learner(prompts) -> PrefixCache:
    """What engines evict by unless told otherwise, with a ghost that spares no time."""
    settings = {"ghost_blocks": 100, "ghost_share": 1.0, "policy": "reuse_hazard"}
    return served(prompts, num_blocks=NUM_BLOCKS, **settings)


def test_under_a_policy_that_learns_lru_is_known_exactly(prompts, learner):
    """It has counted what LRU would have found: no sample is needed."""
    real = served(prompts, num_blocks=NUM_BLOCKS, ghost_blocks=0).stats.first.hit_ratio
    [lru] = [ghost for ghost in learner.stats.ghosts if ghost.policy == "lru"]
    assert lru.hit_ratio == pytest.approx(real, abs=lru.error)
    assert lru.error <= 0.002 and lru.num_requests == len(prompts)


@pytest.mark.parametrize("memory", [0.5, 2.0, 4.0])
def test_sizes_under_a_policy_that_learns_are_within_four_points(memory, prompts, learner):
    num_blocks = int(memory * NUM_BLOCKS)
    settings = {"num_blocks": num_blocks, "policy": "reuse_hazard", "ghost_blocks": 0}
    real = served(prompts, **settings).stats.first.hit_ratio
    wanted = (memory, "reuse_hazard")
    [estimate] = [g for g in learner.stats.ghosts if (g.memory, g.policy) == wanted]
    assert estimate.hit_ratio == pytest.approx(real, abs=0.04)
    assert estimate.low <= real <= estimate.high


def test_before_anything_is_played_sizes_are_between_lru_and_all_that_came_before():
    """What LRU finds is certain but for the share; and nobody finds what is asked for first."""
    config = CacheConfig(1_000, 1, policy="reuse_hazard", ghost_blocks=100)
    cache = build_cache(config)
    answers, counts = cache.ghost._answers, cache.stats.first
    for _ in range(1_000):
        counts.add(100, 40, 0)
    for memory, gains in ((2.0, 0.1), (4.0, 0.12), (ALL, 0.15)):
        tally = answers.tally((memory, "lru"))
        tally.begin(SoFar(), 100, 10.0)
        for number in range(10_000):
            found = int(number % 1_000 >= 600)
            tally.add(number % NUM_PARTS, 1, found, int(number % 1_000 >= 600 - 1_000 * gains), 1)
        tally.reach(SoFar.of(counts))
    for memory in (0.5, 1.0, 2.0, 4.0):
        answers.tally((memory, "reuse_hazard"))
    answers.tally((0.5, "lru"))
    found = {(g.memory, g.policy): g for g in answers.estimates()}
    assert (0.5, "reuse_hazard") not in found, "nothing is known of it"
    low, high = 0.5 - shadow.SHARE, 0.55
    double, quadruple = found[2.0, "reuse_hazard"], found[4.0, "reuse_hazard"]
    assert low - 0.04 < double.low < low and high < double.high < high + 0.04
    assert quadruple.low > double.low and quadruple.high == double.high
    assert found[1.0, "lru"].hit_ratio == 0.4


@given(
    turns=st.lists(
        st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=6, unique=True), max_size=40
    )
)
def test_known_names_are_those_that_came_before(turns):
    """From the first on, without a gap; a bit that two names share errs to yes."""
    known, before = Known(), set[int]()
    for names in turns:
        really = next((i for i, name in enumerate(names) if name not in before), len(names))
        assert known.serve(array("I", names), len(names)) >= really
        before.update(names)
    assert Known().serve(array("I", [7, 8]), 2) == 0
    twice = Known()
    twice.serve(array("I", [7, 8]), 2)
    assert twice.serve(array("I", [7, 8, 9]), 3) == 2
    assert twice.serve(array("I", [7, 8, 9]), 1) == 1


def test_a_learned_cache_of_all_blocks_finds_what_the_real_policy_finds(prompts):
    """Nothing is sampled away, and its experience is the real policy's."""
    now_s, asked, hits = 0.0, 0, 0
    config = CacheConfig(700, 4, policy="reuse_hazard", seal_tails=False, ghost_blocks=0)
    cache = build_cache(config, clock=lambda: now_s)
    policy = cache.pool.accounts.common.policy
    learned, sampler = LearnedCache(700, policy), Sampler(4, 1.0, 1)
    for number, prompt in enumerate(prompts):
        now_s, key = float(number), prefix_key(prompt)
        table, _ = cache.admit(key, cache.match(key)) or pytest.fail("it fits")
        cache.publish(table, len(key))
        cache.commit([table])
        cache.release(table, len(key))
        names = sampler.names(key, sampler.choose(key, len(key)))
        turn = turn_of(list(names), now_s)
        num_asked = (len(key) - 1) // 4
        turn = turn._replace(num_asked=num_asked, kinds=policy.kinds_of(table.turn))
        hits, asked = hits + learned.serve(turn), asked + num_asked
    learned.check()
    real = cache.stats.first
    whole_blocks = (real.hit_tokens - real.copied_tokens) / 4
    assert hits == pytest.approx(whole_blocks, abs=0.02 * asked)
    lead = policy.shadow.lead
    assert lead > 0.02 * asked, "it has something to learn"


@given(
    turns=st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=6), max_size=40),
    size=st.integers(1, 8),
)
def test_a_learned_cache_evicts_leaves_only_and_keeps_to_its_size(turns, size):
    cache = LearnedCache(size, ReuseHazard(8, lambda: 0.0))
    for number, names in enumerate(paths(turns)):
        assert 0 <= cache.serve(turn_of(names, float(number))) <= len(names)
        cache.check()


def test_what_lru_would_have_found_is_what_the_account_says(learner):
    counts, pool = learner.stats.first, learner.pool
    lru = LruInItsPlace(counts, pool.accounts, 4)
    shadow = pool.accounts.common.policy.shadow
    assert lru.hit_tokens == counts.hit_tokens - 4 * shadow.lead
    assert 0 < lru.hit_ratio < counts.hit_ratio
    assert AtRatio(lru, 0.5).hit_tokens == 0.5 * counts.query_tokens


# --- small caches ---


def turn_of(names: list[int], at_s: float = 0.0) -> SampledTurn:
    """A turn in which every block is sampled and looked up."""
    return SampledTurn(array("I", names), array("I", range(len(names))), len(names), at_s, 0)


TURNS = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=6), max_size=40)
"""Prompts over an alphabet of two; a name tells all before it, as names of samples do."""


def paths(turns: list[list[int]]) -> list[list[int]]:
    """Name each block by the whole of its prefix."""
    return [[int("1" + "".join(map(str, t[: i + 1])), 2) for i in range(len(t))] for t in turns]


@given(turns=TURNS, size=st.integers(1, 8))
def test_the_stack_finds_at_every_size_what_a_small_cache_of_lru_finds(turns, size):
    stack, cache = LruStack(8), SmallCache(size, "lru")
    for number, names in enumerate(paths(turns)):
        if len(names) > size:
            continue  # no cache serves what does not fit it
        turn = turn_of(names, float(number))
        found = stack.serve(turn.names, turn.num_asked)
        assert found == sorted(found)
        assert sum(least <= size for least in found) == cache.serve(turn)
        cache.check()


@given(turns=TURNS, size=st.integers(1, 8), policy=st.sampled_from(get_args(PolicyName)))
def test_a_small_cache_keeps_its_policy_true(turns, size, policy):
    """Whatever comes, policy and cache have the same blocks, and leaves go first."""
    cache = SmallCache(size, policy)
    for number, names in enumerate(paths(turns)):
        assert 0 <= cache.serve(turn_of(names, float(number))) <= len(names)
        cache.check()


@pytest.mark.parametrize("policy", ["lru", "reuse_hazard", "arc"])
def test_a_small_cache_of_all_blocks_finds_what_the_real_one_finds(prompts, policy):
    """Nothing is sampled away; what the large cache treats as one run goes block by block."""
    real = served(
        prompts[:400], num_blocks=700, policy=policy, seal_tails=False, ghost_blocks=0
    ).stats.first
    cache, sampler, hits = SmallCache(700, policy), Sampler(4, 1.0, 1), 0
    for number, prompt in enumerate(prompts[:400]):
        key = prefix_key(prompt)
        names = sampler.names(key, sampler.choose(key, len(key)))
        turn = turn_of(list(names), float(number))
        hits += cache.serve(turn._replace(num_asked=(len(key) - 1) // 4))
    off_by = 0 if policy == "lru" else 0.02 * real.query_tokens
    copied = real.copied_tokens  # tokens of a block that a prompt leaves in its middle
    assert 4 * hits == pytest.approx(real.hit_tokens - copied, abs=off_by)


# --- the sample ---


def test_prompts_that_begin_alike_are_sampled_alike():
    """Whatever comes behind, and however the chosen ones are named."""
    sampler, dice = Sampler(4, 8.0, 2, salt=3), random.Random(2)
    common = [dice.randrange(1000) for _ in range(4_000)]
    one, other = (PrefixKey(Identity(), common + [last] * 400) for last in (1, 2))
    chosen = [sampler.choose(key, 4_000) for key in (one, other)]
    assert chosen[0] == chosen[1]
    assert 80 < len(chosen[0]) < 170
    assert sampler.names(one, chosen[0]) == sampler.names(other, chosen[1])


def test_names_tell_tenants_images_and_what_came_before_apart():
    """Two names are the same only for content that may share KV, but for a digest's chance."""
    sampler, tokens = Sampler(4, 1.0, 1), list(range(16))
    image, other = (ImageSpan(digest, 4, 4) for digest in (b"one", b"other"))
    head, all_of_it = PublicHead(b"head", 8), [(start, 0) for start in (0, 4, 8, 12)]
    keys = {
        "plain": PrefixKey(Identity(), tokens),
        "tenant": PrefixKey(Identity(tenant=b"t"), tokens),
        "image": PrefixKey(Identity(), tokens, [image]),
        "other image": PrefixKey(Identity(), tokens, [other]),
        "changed": PrefixKey(Identity(), [99, *tokens[1:]]),
        "behind": PrefixKey(Identity(tenant=b"t", head=head), tokens),
        "behind too": PrefixKey(Identity(tenant=b"u", head=head), tokens),
    }
    names = {which: sampler.names(key, all_of_it) for which, key in keys.items()}
    assert len({named[3] for named in names.values()}) == len(names)
    assert names["plain"][0] == names["image"][0] != names["tenant"][0]
    assert names["behind"][:2] == names["behind too"][:2], "a public head is shared"
    assert names["behind"][2] != names["behind too"][2]


def test_names_below_a_lower_limit_are_a_sample_of_the_sample():
    """Whatever else is in a prompt: a share of the chosen ones, and in every prompt the same."""
    sampler, dice = Sampler(4, 4.0, 1), random.Random(3)
    key = PrefixKey(Identity(), [dice.randrange(1000) for _ in range(16_000)])
    names = sampler.names(key, sampler.choose(key, 16_000))
    fewer = [name for name in names if name < sampler.limit_of(0.25)]
    assert 850 < len(names) < 1_150
    assert 180 < len(fewer) < 320


def test_the_log_gives_turns_back_as_they_were():
    log, turns = TrafficLog(), [turn_of([1, 2], 3.0), turn_of([7], 4.5)]
    for number, turn in enumerate(turns):
        log.add(turn, SoFar(10.0 * number, 4.0, 2.0))
    assert [log.turn(number) for number in range(2)] == turns
    assert (log.so_far(1), len(log), log.num_blocks) == (SoFar(10.0, 4.0, 2.0), 2, 3)


# --- intervals ---


def counted(requests: int, tokens: int, hits: int) -> LookupCounts:
    """What a cache has counted."""
    counts = LookupCounts()
    for _ in range(requests):
        counts.add(tokens // requests, hits // requests, 0)
    return counts


def test_an_interval_narrows_as_more_is_sampled_and_holds_the_truth():
    """Of a hundred samples of which each block gains with one chance in five, most are within."""
    counts, dice, within, errors = counted(100, 1_600_000, 400_000), random.Random(4), 0, []
    for size in (400, 4_000):
        errors.append(0.0)
        for _ in range(50):
            tally = Tally()
            tally.begin(SoFar(), 10_000, 50.0)
            for _ in range(size):
                tally.add(dice.randrange(NUM_PARTS), 1, 0, int(dice.random() < 0.2), 50.0)
            tally.reach(SoFar.of(counts))
            ratio, error = tally.estimate(counts, 1, 100)
            truth = 0.25 + 0.2 * 0.75
            within += abs(ratio - truth) <= error
            errors[-1] += error / 50
    assert within >= 90
    assert errors[1] < errors[0] / 2


def test_an_estimate_of_other_traffic_than_all_says_so():
    """What was sampled hit 50 %, all of it 25 %: the estimate may be wrong by the difference."""
    tally = Tally()
    tally.begin(SoFar(), 10_000, 2.0)
    for number in range(1_000):
        tally.add(number % NUM_PARTS, 1, 0, number // NUM_PARTS % 2, 2.0)
    tally.reach(SoFar(16_000, 8_000, 100))
    assert tally.estimate(counted(200, 32_000, 8_000), 1, 100)[1] > 0.25
    assert tally.estimate(counted(100, 16_000, 8_000), 1, 100)[1] < 0.05


def test_what_was_sampled_before_the_pool_was_full_tells_little_of_later():
    """At the same hit ratio: a pool of 1,000 blocks was filled once, and then three times more."""
    tally = Tally()
    tally.begin(SoFar(), 10_000, 2.0)
    for number in range(1_000):
        tally.add(number % NUM_PARTS, 1, 0, 0, 2.0)
    tally.reach(SoFar(2_200, 1_100, 10))
    early, late = (tally.estimate(counted(n, 220 * n, 110 * n), 1, 1_000)[1] for n in (10, 40))
    assert early < 0.05 < 0.1 < late


def test_where_no_difference_was_seen_there_may_be_a_small_one():
    tally, counts = Tally(), counted(10, 1_000, 500)
    tally.begin(SoFar(), 10_000, 8.0)
    tally.add(0, 100, 50, 50, 8.0)
    tally.reach(SoFar.of(counts))
    ratio, error = tally.estimate(counts, 1, 100)
    assert ratio == 0.5
    assert error == pytest.approx(3 * 8 / 1_000, rel=0.01)


def test_of_one_block_that_was_seen_there_may_be_several_times_as_much():
    """A sample that saw little of what is rare says so: no interval ends at twice what it saw."""
    errors = []
    for num_seen in (1, 10, 100):
        tally = Tally(likeness=0.0)
        tally.begin(SoFar(), 10_000, 8.0)
        for number in range(1_000):
            tally.add(number % NUM_PARTS, 1, 1, int(number >= num_seen), 8.0)
        tally.reach(SoFar(8_000, 8_000, 1_000))
        ratio, error = tally.estimate(AtRatio(counted(1, 8_000, 4_000), 1.0), 1, 100)
        errors.append(error / (1 - ratio))
    assert errors[0] > 4 > errors[1] > errors[2]
    assert errors[2] < 0.5


def test_an_estimate_says_how_much_came_since_it_was_made(prompts):
    """What was watched last, and what has come and was not."""
    cache = build_cache(CacheConfig(NUM_BLOCKS, 4, ghost_blocks=100, ghost_share=1.0))
    assert cache.ghost is not None
    for prompt in prompts[:1_500]:
        serve(cache, prompt)
    cache.ghost.catch_up()
    assert all(ghost.num_later_requests < 40 for ghost in cache.stats.ghosts)
    cache.ghost._begin = lambda: None  # it is not paid for
    cache.ghost.clear()
    for prompt in prompts[1_500:1_800]:
        serve(cache, prompt)
    late = [ghost.num_later_requests for ghost in cache.stats.ghosts]
    assert late and min(late) >= 300


def test_nothing_is_estimated_that_is_known_worse_than_to_ten_points(watched):
    assert watched.stats.ghosts
    for ghost in watched.stats.ghosts:
        assert 2 * ghost.error <= TOO_WIDE
        assert ghost.low <= ghost.hit_ratio <= ghost.high


# --- its price ---


def serve(cache: PrefixCache, prompt: str) -> None:
    """Serve one prompt."""
    key = prefix_key(prompt)
    admitted = cache.admit(key, cache.match(key))
    assert admitted is not None
    cache.publish(admitted[0], len(key))
    cache.commit([admitted[0]])
    cache.release(admitted[0], len(key))


@pytest.mark.parametrize(
    ("policy", "num_prompts", "memories"), [("lru", 1_000, {2, 4}), ("reuse_hazard", 1_000, {0.5})]
)
def test_first_estimates_come_within_the_first_thousand_requests(
    prompts, policy, num_prompts, memories
):
    """With what a cache of default settings gives it, and of sizes at least."""
    cache = build_cache(CacheConfig(2_048, 4, policy=policy))
    for prompt in prompts[:num_prompts]:
        serve(cache, prompt)
    found = {ghost.memory: ghost for ghost in cache.stats.ghosts if ghost.policy == policy}
    assert memories <= set(found)
    assert all(0 < ghost.num_requests <= 1_000 for ghost in found.values())


def test_nothing_is_done_that_is_not_paid_for(prompts):
    """By its own books it takes its share and the allowance, which is given out bit by bit."""
    cache = build_cache(CacheConfig(NUM_BLOCKS, 4, ghost_blocks=64, ghost_share=0.01))
    ghost = cache.ghost
    assert ghost is not None
    for prompt in prompts:
        serve(cache, prompt)
        assert ghost.credit_s - ghost.allowed_s > -ALLOWANCE_S - 0.01, "one slice too many"
    assert ghost.spent_s > 0
    assert ghost.allowed_s < ALLOWANCE_S


def test_watching_ends_when_it_is_not_paid_for_any_more(prompts):
    """And is taken up again when there is credit for another episode."""
    cache = build_cache(CacheConfig(NUM_BLOCKS, 4, ghost_blocks=64, ghost_share=0.01))
    ghost = cache.ghost
    assert ghost is not None
    for prompt in prompts[:200]:
        serve(cache, prompt)
    assert ghost.is_recording
    ghost.spent_s += 1.0  # as if it had taken that
    for prompt in prompts[200:400]:
        serve(cache, prompt)
    assert not ghost.is_recording and ghost.credit_s < 0
    ghost.spent_s -= 2.0
    for prompt in prompts[400:600]:
        serve(cache, prompt)
    assert ghost.is_recording


def test_spare_moments_are_lent_and_paid_back(prompts):
    """What was watched is played at once while there is time; no other episode begins in debt."""
    cache = build_cache(CacheConfig(NUM_BLOCKS, 4, ghost_blocks=64, ghost_share=0.01))
    ghost = cache.ghost
    assert ghost is not None and not ghost.rest()
    for prompt in prompts[:1_500]:
        serve(cache, prompt)
        while ghost.rest():
            pass
    assert ghost.credit_s < 0
    assert {ghost.policy for ghost in cache.stats.ghosts} == set(get_args(PolicyName))
    ghost.clear()
    for prompt in prompts[1_500:1_800]:
        serve(cache, prompt)
        assert not ghost.is_recording


def test_it_takes_less_than_a_megabyte(prompts):
    """The largest episode, with the sizes and one policy after the other."""
    cache = build_cache(CacheConfig(20_000, 4, ghost_share=1.0))
    assert cache.ghost is not None
    tracemalloc.start()
    for prompt in prompts[:700]:
        serve(cache, prompt)
    cache.ghost.catch_up()
    taken = [
        stat.size
        for stat in tracemalloc.take_snapshot().statistics("filename")
        if stat.traceback[0].filename.endswith(
            ("sample.py", "small_cache.py", "episode.py", "ghost.py", "tally.py")
        )
    ]
    tracemalloc.stop()
    assert sum(taken) < 1_000_000


def test_large_caches_have_one_unless_told_otherwise():
    assert build_cache(CacheConfig(2_048)).ghost is not None
    assert build_cache(CacheConfig(2_047)).ghost is None
    assert build_cache(CacheConfig(2_048, ghost_blocks=0)).ghost is None
    assert build_cache(CacheConfig(2_048, enable_prefix_caching=False)).ghost is None


@pytest.mark.parametrize("share", [0, -0.1, 1.1])
def test_a_share_outside_its_limits_is_refused(share):
    with pytest.raises(ConfigError, match=r"ghost_share=.*at most 1"):
        CacheConfig(64, ghost_share=share)


# --- what it forgets ---


def test_a_cache_without_a_ghost_estimates_nothing(prompts):
    assert served(prompts[:5], num_blocks=NUM_BLOCKS, ghost_blocks=0).stats.ghosts == ()


@pytest.mark.parametrize("forget", ["erase", "new_epoch", "reset"])
def test_what_was_sampled_is_dropped_with_what_was_cached(prompts, forget):
    """Estimates stay: they tell how much was found, and of nobody."""
    cache = served(prompts[:300], num_blocks=NUM_BLOCKS, ghost_blocks=100, ghost_share=1.0)
    before = cache.stats.ghosts
    assert before and cache.ghost.is_recording
    getattr(cache.admin, forget)(*([b""] if forget == "erase" else []))
    assert not cache.ghost.is_recording
    cache.ghost.catch_up()
    assert cache.stats.ghosts == before
