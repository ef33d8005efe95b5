"""The ghost's estimates, beside caches that are really of that size or policy, and their price."""

import random
import tracemalloc
from array import array
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ostinato.cache.manager import CacheManager
from ostinato.cache.sample import Sampler
from ostinato.cache.small_cache import LruStack, SampledTurn, SmallCache
from ostinato.core.config import CacheConfig, PolicyName
from ostinato.core.errors import ConfigError
from ostinato.core.identity import Identity, ImageSpan, PrefixKey, PublicHead
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


def served(prompts: list[str], **settings) -> CacheManager:
    """Serve prompts, one a second."""
    now_s = 0.0
    cache = CacheManager(CacheConfig(**{"block_size": 4, **settings}), clock=lambda: now_s)
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
def watched(prompts) -> CacheManager:
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
    assert estimate.num_sampled > 2_000


def test_sizes_differ_by_more_than_the_error(watched):
    ratios = [ghost.hit_ratio for ghost in watched.stats.ghosts if ghost.policy == "lru"]
    assert ratios[2] - ratios[0] > 0.06


def test_every_size_and_policy_is_estimated(watched):
    """Three sizes under the cache's own policy, and every other policy at the cache's size."""
    found = {(ghost.memory, ghost.policy) for ghost in watched.stats.ghosts}
    others = {(1.0, policy) for policy in get_args(PolicyName) if policy != "lru"}
    assert found == {(0.5, "lru"), (2.0, "lru"), (4.0, "lru")} | others


def test_a_cache_of_another_policy_is_set_beside_lru(prompts):
    """Its sizes are those of its own policy."""
    settings = {"ghost_blocks": 100, "ghost_share": 1.0, "policy": "slru"}
    cache = served(prompts[:600], num_blocks=NUM_BLOCKS, **settings)
    found = {(ghost.memory, ghost.policy) for ghost in cache.stats.ghosts}
    assert {(0.5, "slru"), (2.0, "slru"), (4.0, "slru"), (1.0, "lru")} <= found
    assert (1.0, "slru") not in found


# --- small caches ---


def turn_of(names: list[int], at_s: float = 0.0) -> SampledTurn:
    """A turn in which every block is sampled and looked up."""
    places = array("I", range(len(names)))
    return SampledTurn(PrefixKey(Identity(), names), places, len(names), at_s, 0)


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
        found = stack.serve(turn)
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
        names = sampler.names(key, sampler.choose(key, len(key) // 4))
        turn = turn_of(list(names), float(number))
        turn.num_asked = (len(key) - 1) // 4
        hits += cache.serve(turn)
    off_by = 0 if policy == "lru" else 0.02 * real.query_tokens
    copied = real.copied_tokens  # tokens of a block that a prompt leaves in its middle
    assert 4 * hits == pytest.approx(real.hit_tokens - copied, abs=off_by)


# --- the sample ---


def test_prompts_that_begin_alike_are_sampled_alike():
    """Whatever comes behind, and however the chosen ones are named."""
    sampler, dice = Sampler(4, 8.0, 2, salt=3), random.Random(2)
    common = [dice.randrange(1000) for _ in range(4_000)]
    one, other = (PrefixKey(Identity(), common + [last] * 400) for last in (1, 2))
    chosen = [sampler.choose(key, 1_000) for key in (one, other)]
    assert chosen[0] == chosen[1]
    assert 80 < len(chosen[0]) < 170
    assert sampler.names(one, chosen[0]) == sampler.names(other, chosen[1])


def test_names_tell_tenants_images_and_what_came_before_apart():
    """Two names are the same only for content that may share KV, but for a digest's chance."""
    sampler, tokens = Sampler(4, 1.0, 1), list(range(16))
    image, other = (ImageSpan(digest, 4, 4) for digest in (b"one", b"other"))
    head = PublicHead(b"head", 8)
    keys = {
        "plain": PrefixKey(Identity(), tokens),
        "tenant": PrefixKey(Identity(tenant=b"t"), tokens),
        "image": PrefixKey(Identity(), tokens, [image]),
        "other image": PrefixKey(Identity(), tokens, [other]),
        "changed": PrefixKey(Identity(), [99, *tokens[1:]]),
        "behind": PrefixKey(Identity(tenant=b"t", head=head), tokens),
        "behind too": PrefixKey(Identity(tenant=b"u", head=head), tokens),
    }
    names = {which: sampler.names(key, [0, 1, 2, 3]) for which, key in keys.items()}
    assert len({named[3] for named in names.values()}) == len(names)
    assert names["plain"][0] == names["image"][0] != names["tenant"][0]
    assert names["behind"][:2] == names["behind too"][:2], "a public head is shared"
    assert names["behind"][2] != names["behind too"][2]


# --- its price ---


def test_nothing_is_done_that_is_not_paid_for(prompts):
    """By its own books it takes its share, but for a recording that was reckoned badly."""
    cache = CacheManager(CacheConfig(NUM_BLOCKS, 4, ghost_blocks=64, ghost_share=0.05))
    ghost = cache.ghost
    assert ghost is not None
    least = 0.0
    for prompt in prompts:
        key = prefix_key(prompt)
        table, _ = cache.admit(key, cache.match(key))
        cache.publish(table, len(key))
        cache.commit([table])
        cache.release(table, len(key))
        least = min(least, ghost.credit_s)
    assert ghost.spent_s > 0
    assert least > -0.02, "an episode takes some milliseconds"


def test_spare_moments_are_lent_and_paid_back(prompts):
    """What is recorded is replayed at once while there is time, and nothing more meanwhile."""
    cache = CacheManager(CacheConfig(NUM_BLOCKS, 4, ghost_blocks=64, ghost_share=0.2))
    ghost = cache.ghost
    assert ghost is not None and not ghost.rest()
    for prompt in prompts:
        key = prefix_key(prompt)
        table, _ = cache.admit(key, cache.match(key))
        cache.publish(table, len(key))
        cache.commit([table])
        cache.release(table, len(key))
        while ghost.rest():
            assert not ghost.is_recording
        assert not ghost.is_recording or ghost.credit_s > -0.02
    assert {ghost.memory for ghost in cache.stats.ghosts} >= {0.5, 2.0, 4.0}


def test_time_that_the_cache_takes_is_what_it_lives_from(prompts):
    """With a timer that stands still nothing is earned, and nothing is recorded."""
    cache = CacheManager(CacheConfig(NUM_BLOCKS, 4, ghost_blocks=64))
    assert cache.ghost is not None
    cache.ghost.timer = lambda: 0.0
    for prompt in prompts[:200]:
        key = prefix_key(prompt)
        table, _ = cache.admit(key, cache.match(key))
        assert not table.num_watched
        cache.release(table, 0)
    assert cache.stats.ghosts == ()


def test_it_takes_less_than_a_megabyte(prompts):
    """The largest episode, with the sizes and one policy after the other."""
    cache = served(prompts[:5], num_blocks=100_000, ghost_share=1.0)
    tracemalloc.start()
    ghost = cache.ghost
    assert ghost is not None
    for prompt in prompts:
        key = prefix_key(prompt)
        table, _ = cache.admit(key, cache.match(key))
        cache.release(table, len(key))
    taken = [
        stat.size
        for stat in tracemalloc.take_snapshot().statistics("filename")
        if stat.traceback[0].filename.endswith(("sample.py", "small_cache.py", "episode.py"))
    ]
    tracemalloc.stop()
    assert sum(taken) < 1_000_000


def test_large_caches_have_one_unless_told_otherwise():
    assert CacheManager(CacheConfig(2_048)).ghost is not None
    assert CacheManager(CacheConfig(2_047)).ghost is None
    assert CacheManager(CacheConfig(2_048, ghost_blocks=0)).ghost is None
    assert CacheManager(CacheConfig(2_048, enable_prefix_caching=False)).ghost is None


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
    assert before
    cache.ghost.wake(0.0)
    assert cache.ghost.is_recording
    getattr(cache.custody, forget)(*([b""] if forget == "erase" else []))
    assert not cache.ghost.is_recording
    cache.ghost.catch_up()
    assert cache.stats.ghosts == before
