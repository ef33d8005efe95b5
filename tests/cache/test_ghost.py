"""The ghost's estimates, beside caches that are really of that size or policy."""

import random

import pytest

from ostinato.cache.manager import CacheManager
from ostinato.core.config import CacheConfig
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
    return cache


@pytest.fixture(scope="module")
def prompts() -> list[str]:
    """Traffic that every size finds different amounts of."""
    return conversations(1_500)


@pytest.fixture(scope="module")
def watched(prompts) -> CacheManager:
    """A cache with a ghost that samples a tenth of it."""
    return served(prompts, num_blocks=NUM_BLOCKS, ghost_blocks=200)


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
    real = served(prompts, **settings).stats.first.hit_ratio
    wanted = (settings["num_blocks"], settings.get("policy", "lru"))
    [estimate] = [g for g in watched.stats.ghosts if (g.num_blocks, g.policy) == wanted]
    assert estimate.hit_ratio == pytest.approx(real, abs=0.03)
    assert estimate.num_sampled > 5_000


def test_sizes_differ_by_more_than_the_error(watched):
    ratios = [ghost.hit_ratio for ghost in watched.stats.ghosts if ghost.policy == "lru"]
    assert ratios[2] - ratios[0] > 0.1


def test_a_ghost_of_the_whole_cache_is_exact_where_blocks_are_all_there_is(prompts):
    """Nothing is sampled away: what is estimated is what is found, but for copied tokens."""
    watched = served(prompts[:300], num_blocks=700, ghost_blocks=700, seal_tails=False)
    real = served(prompts[:300], num_blocks=1_400, seal_tails=False).stats.first
    [double] = [ghost for ghost in watched.stats.ghosts if ghost.num_blocks == 1_400]
    assert double.hit_ratio == pytest.approx(real.hit_ratio, abs=0.01)


def test_a_cache_without_a_ghost_estimates_nothing(prompts):
    assert served(prompts[:5], num_blocks=NUM_BLOCKS).stats.ghosts == ()


def test_a_ghost_forgets_with_the_cache(prompts):
    """Erasing a tenant, new weights or a reset leave nothing sampled behind."""
    for forget in ("erase", "new_epoch", "reset"):
        cache = served(prompts[:20], num_blocks=NUM_BLOCKS, ghost_blocks=200)
        assert cache.stats.ghosts
        getattr(cache.custody, forget)(*([b""] if forget == "erase" else []))
        assert cache.stats.ghosts == ()
