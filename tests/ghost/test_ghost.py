"""The ghost's estimates beside caches that really are of that size or policy, and what it costs."""

import random
from array import array
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ostinato.assembly import build_cache
from ostinato.core.errors import ConfigError
from ostinato.core.identity import Identity, ImageSpan, PrefixKey
from ostinato.eviction.reuse_hazard import ReuseHazard
from ostinato.ghost import ghost as ghost_module
from ostinato.ghost import sampling_window
from ostinato.ghost.estimator import NUM_PARTS, Coverage, PairedEstimator, SimulationError
from ostinato.ghost.sampler import BlockSampler, SampledRequest
from ostinato.ghost.sampling_window import SamplingWindow
from ostinato.ghost.simulated_cache import LearnedPolicySimulation, LruSimulation
from ostinato.observe.counters import GhostEstimate, LookupCounts
from ostinato.settings import PolicyName, PrefixCacheConfig
from tests.support.cache.cache_views import prefix_key
from tests.support.cache.tiny_cache import tiny_cache

SIZES = (0.5, 2.0, 4.0)


def conversations(num_requests: int, num_open: int = 60, longest: int = 400) -> list[str]:
    """Prompts of conversations behind three system prompts; some come back late or never."""
    rng = random.Random(1)
    systems = ["".join(chr(rng.randrange(0x100, 0x4000)) for _ in range(40)) for _ in range(3)]
    open_ones: list[str] = []
    prompts = []
    for _ in range(num_requests):
        if len(open_ones) < num_open or rng.random() < 0.1:
            text = rng.choice(systems)
        else:
            text = open_ones.pop(int(len(open_ones) * rng.random() ** 3))
        text += "".join(chr(rng.randrange(0x100, 0x9000)) for _ in range(rng.randrange(8, 40)))
        text = text[:longest]
        prompts.append(text)
        if len(text) < longest:
            open_ones.append(text)
    return prompts


class Served:
    """A cache that serves prompts, one a second, and has idle time between them or not."""

    def __init__(self, num_blocks: int, has_idle_time: bool = True, **settings) -> None:
        self.now_s, self._has_idle_time = 0.0, has_idle_time
        settings = {"block_size": 4, "seal_tails": False, "keep_explanations": 0, **settings}
        config = PrefixCacheConfig(num_blocks, **settings)
        self.cache = build_cache(config, clock=lambda: self.now_s)

    def serve(self, prompts: Iterable[str]) -> "Served":
        for prompt in prompts:
            self.now_s += 1.0
            cache = self.cache.manager
            key = prefix_key(prompt, epoch=cache.epoch)
            admitted = cache.admit(key, cache.match(key))
            assert admitted is not None
            cache.publish(admitted[0], len(key))
            cache.commit()
            cache.release(admitted[0], len(key))
            if self._has_idle_time and self.cache.ghost is not None:
                self.cache.ghost.catch_up()
        return self

    @property
    def hit_ratio(self) -> float:
        return self.cache.stats.first.hit_ratio

    def estimates(self) -> dict[tuple[float, PolicyName], GhostEstimate]:
        return {(ghost.memory, ghost.policy): ghost for ghost in self.cache.stats.ghosts}


def real_ratio(prompts: list[str], estimate: GhostEstimate) -> float:
    """What a cache that really is so finds of the same traffic."""
    settings = {"eviction_policy": estimate.policy, "ghost_blocks": 0}
    return Served(estimate.num_blocks, **settings).serve(prompts).hit_ratio


# --- estimates ---


@pytest.mark.one_case_in(2)
@pytest.mark.parametrize("policy", ["reuse_hazard", "lru"])
@pytest.mark.parametrize("num_blocks", [100, 900])
def test_half_double_and_four_times_the_memory_are_within_their_intervals(num_blocks, policy):
    """In a small pool and one of which a sample is taken."""
    prompts = conversations(1_400, num_open=num_blocks // 15, longest=min(400, num_blocks))
    served = Served(num_blocks, eviction_policy=policy).serve(prompts)
    found = served.estimates()
    for memory in SIZES:
        estimate = found[memory, policy]
        assert estimate.low <= real_ratio(prompts, estimate) <= estimate.high
        assert estimate.error < 0.1 and estimate.num_requests > 300
    assert found[4.0, policy].hit_ratio > found[0.5, policy].hit_ratio + 0.05


def test_under_the_default_policy_lru_is_counted_and_needs_no_sample():
    prompts = conversations(400)
    found = Served(900, eviction_policy="reuse_hazard").serve(prompts).estimates()
    lru = found[1.0, "lru"]
    assert lru.hit_ratio == pytest.approx(real_ratio(prompts, lru), abs=lru.error)
    assert lru.error <= 0.002


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("policy", ["reuse_hazard", "lru"])
@pytest.mark.parametrize("num_blocks", [150, 1_000, 4_000])
def test_estimates_of_other_samples_are_within_their_intervals(num_blocks, policy, seed):
    """All that is estimated."""
    prompts = conversations(2_000, num_open=num_blocks // 15, longest=min(400, num_blocks))
    served = Served(num_blocks, eviction_policy=policy)
    served.cache.ghost.seed = seed
    found = served.serve(prompts).estimates()
    outside = [
        estimate
        for estimate in found.values()
        if not estimate.low <= real_ratio(prompts, estimate) <= estimate.high
    ]
    assert found and len(outside) <= 1, outside


def test_what_is_known_worse_than_to_ten_points_either_way_is_left_out():
    served = Served(900, eviction_policy="reuse_hazard")
    widths = []
    for prompt in conversations(200):
        widths += [ghost.error for ghost in served.serve([prompt]).cache.stats.ghosts]
    assert widths and max(widths) <= 0.1


def test_pools_of_64_blocks_and_more_have_a_ghost_unless_told_otherwise():
    assert build_cache(PrefixCacheConfig(64)).ghost is not None
    assert build_cache(PrefixCacheConfig(63)).ghost is None
    assert build_cache(PrefixCacheConfig(63, ghost_blocks=16)).ghost is not None
    assert build_cache(PrefixCacheConfig(64, ghost_blocks=0)).ghost is None
    assert build_cache(PrefixCacheConfig(64, enable_prefix_caching=False)).ghost is None
    assert build_cache(PrefixCacheConfig(64, ghost_blocks=0)).stats.ghosts == ()


@pytest.mark.parametrize("share", [0, -0.1, 1.1])
def test_a_share_outside_its_limits_is_refused(share):
    with pytest.raises(ConfigError, match=r"ghost_share=.*at most 1"):
        PrefixCacheConfig(64, ghost_share=share)


# --- what it costs ---


def patch_window(monkeypatch, num_blocks: int) -> None:
    """Let windows have so many sampled blocks."""
    for module in (ghost_module, sampling_window):
        monkeypatch.setattr(module, "WINDOW_BLOCKS", num_blocks)


def count_calls(monkeypatch, owner: type, name: str) -> list[int]:
    """Count the calls of a method; returns a list whose length is their number."""
    calls, real = [], getattr(owner, name)

    def counting(*args):
        calls.append(1)
        return real(*args)

    monkeypatch.setattr(owner, name, counting)
    return calls


def test_a_window_ends_after_so_many_blocks_and_the_next_one_begins_when_it_is_due(monkeypatch):
    """One of 60 sampled blocks in 130 / 0.1 requests; between them no block is hashed."""
    patch_window(monkeypatch, 60)
    monkeypatch.setattr(ghost_module, "WINDOW_COST", 130)
    hashed = count_calls(monkeypatch, BlockSampler, "choose")
    served = Served(900, has_idle_time=False, ghost_share=0.1)
    sampled = []
    for prompt in conversations(1_500):
        before = len(hashed)
        served.serve([prompt])
        sampled.append(len(hashed) > before)
    begins = [n for n in range(1, 1_500) if sampled[n] and not sampled[n - 1]]
    assert begins == [15, 16 + 1_300 - 1]
    assert sum(sampled) < 250


def test_a_request_has_one_sampled_block_on_average(monkeypatch):
    """However long prompts are, where the pool holds many of them."""
    sampled, add = [], SamplingWindow.add

    def adding(window, request, at):
        sampled.append(len(request.names))
        add(window, request, at)

    monkeypatch.setattr(SamplingWindow, "add", adding)
    for length in (40, 400):
        sampled.clear()
        rng = random.Random(length)
        prompts = ["".join(chr(rng.randrange(60_000)) for _ in range(length)) for _ in range(400)]
        Served(20_000).serve(prompts)
        assert 0.02 < sum(sampled) / len(prompts) < 1.6


def test_idle_time_replays_what_waits_and_lets_a_window_last_longer(monkeypatch):
    """A replay in idle time costs nothing, so four times as many blocks are sampled."""
    patch_window(monkeypatch, 60)
    lengths = []
    for is_idle in (False, True):
        served, length = Served(900, has_idle_time=is_idle), 0
        for prompt in conversations(600):
            length += served.serve([prompt]).cache.ghost.is_sampling
        assert not served.cache.ghost.is_sampling
        lengths.append(length)
    assert 3 * lengths[0] < lengths[1]


def test_without_idle_time_64_requests_wait_at_most():
    served = Served(900, has_idle_time=False, ghost_share=1.0).serve(conversations(300))
    waiting = 1
    while served.cache.ghost.rest():
        waiting += 1
    assert waiting == 64


def test_estimates_say_how_many_requests_came_since(monkeypatch):
    patch_window(monkeypatch, 100)
    served, prompts = Served(900), conversations(600)
    for prompt in prompts:
        served.serve([prompt])
        if served.cache.ghost.is_sampling:
            assert all(ghost.num_later_requests == 0 for ghost in served.cache.stats.ghosts)
    monkeypatch.setattr(ghost_module, "MAX_INTERVAL", 2.0)
    [half] = [ghost for ghost in served.cache.stats.ghosts if ghost.memory == 0.5]
    assert half.num_later_requests == len(prompts) - half.num_requests > 100


# --- what it forgets ---


@pytest.mark.parametrize("forget", ["erase", "new_epoch", "reset"])
def test_what_was_sampled_is_dropped_with_what_was_cached(forget):
    """Estimates stay: they tell how much was found, and name no tenant. Sampling begins anew."""
    served, prompts = Served(900), conversations(260)
    before = served.serve(prompts[:250]).cache.stats.ghosts
    assert before and served.cache.ghost.is_sampling
    getattr(served.cache.admin, forget)(*([b""] if forget == "erase" else []))
    assert not served.cache.ghost.is_sampling and not served.cache.ghost.rest()
    assert served.cache.stats.ghosts == before
    assert served.serve(prompts[250:]).cache.ghost.is_sampling


def test_a_failed_step_leaves_nothing_to_sample():
    cache = tiny_cache(64)
    for number in range(20):
        cache.serve(chr(0x5000 + number) * 8)
    ghost = cache.prefix_cache.ghost
    assert ghost.is_sampling
    key = prefix_key("ABCDEFGH")
    table, _ = cache.manager.admit(key, cache.manager.match(key))
    cache.manager.publish(table, 8)
    ghost.catch_up()
    cache.manager.fail()
    assert not ghost.rest()


# --- simulated caches ---


def request_of(names: list[int], at_s: float = 0.0) -> SampledRequest:
    """A request of which every block is sampled and looked up."""
    return SampledRequest(array("I", names), len(names), at_s)


REQUESTS = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=6), max_size=40)
"""Prompts over an alphabet of two."""


def paths(prompts: list[list[int]]) -> list[list[int]]:
    """Name each block by the whole of its prefix."""
    return [[int("1" + "".join(map(str, p[: i + 1])), 2) for i in range(len(p))] for p in prompts]


@given(prompts=REQUESTS, size=st.integers(1, 8))
def test_simulated_lru_finds_what_a_cache_under_lru_finds(prompts, size):
    """A name is a token there, in blocks of one, and a last token follows that never hits."""
    config = PrefixCacheConfig(size + 1, 1, eviction_policy="lru", seal_tails=False, ghost_blocks=0)
    lru, cache = LruSimulation(size), build_cache(config).manager
    for number, names in enumerate(paths(prompts)):
        if len(names) > size:  # no cache serves what does not fit it
            continue
        key = PrefixKey(Identity(), [*names, 2**32 - 1])
        match = cache.match(key)
        table, _ = cache.admit(key, match)
        cache.publish(table, len(names))
        cache.commit()
        cache.release(table, len(names))
        assert lru.serve(request_of(names, float(number))) == len(match.blocks)


@given(prompts=REQUESTS, size=st.integers(1, 8))
def test_a_learned_simulation_evicts_leaves_and_stays_within_its_size(prompts, size):
    cache = LearnedPolicySimulation(size, ReuseHazard(size, lambda: 0.0))
    for number, names in enumerate(paths(prompts)):
        request = request_of(names, float(number))._replace(uses=array("I", [1] * len(names)))
        assert 0 <= cache.serve(request) <= len(names)
        cache.check()


# --- the sample ---


def test_prompts_that_begin_alike_are_sampled_alike():
    """Whatever comes behind, and the chosen ones have the same names."""
    sampler, dice = BlockSampler(4, 8.0, 2, salt=3), random.Random(2)
    common = [dice.randrange(1000) for _ in range(4_000)]
    one, other = (PrefixKey(Identity(), common + [last] * 400) for last in (1, 2))
    chosen = [sampler.choose(key, 4_000) for key in (one, other)]
    assert chosen[0] == chosen[1]
    assert 80 < len(chosen[0]) < 170
    assert sampler.names(one, chosen[0]) == sampler.names(other, chosen[1])


def test_names_tell_tenants_images_and_what_came_before_apart():
    """Two names are the same only for content that may share KV, but for a digest's chance."""
    sampler, tokens = BlockSampler(4, 1.0, 1), list(range(16))
    image, other = (ImageSpan(digest, 4, 4) for digest in (b"one", b"other"))
    head, all_of_it = Identity(tenant=b"head"), [(start, 0) for start in (0, 4, 8, 12)]
    keys = {
        "plain": PrefixKey(Identity(), tokens),
        "tenant": PrefixKey(Identity(tenant=b"t"), tokens),
        "image": PrefixKey(Identity(), tokens, [image]),
        "other image": PrefixKey(Identity(), tokens, [other]),
        "changed": PrefixKey(Identity(), [99, *tokens[1:]]),
        "behind": PrefixKey(Identity(tenant=b"t", base=head, start=8), tokens),
        "behind too": PrefixKey(Identity(tenant=b"u", base=head, start=8), tokens),
    }
    names = {which: sampler.names(key, all_of_it) for which, key in keys.items()}
    assert len({named[3] for named in names.values()}) == len(names)
    assert names["plain"][0] == names["image"][0] != names["tenant"][0]
    assert names["behind"][:2] == names["behind too"][:2], "a public prefix is shared"
    assert names["behind"][2] != names["behind too"][2]


# --- intervals ---


def counted(requests: int, tokens: int, hits: int) -> LookupCounts:
    """What a cache has counted."""
    return LookupCounts(requests, tokens, hits)


def one(name: int) -> "array[int]":
    """A sampled block."""
    return array("I", [name])


def test_an_interval_narrows_as_more_is_sampled_and_holds_the_truth():
    """Of forty samples of which each block gains with one chance in five, most are within."""
    dice, within, errors = random.Random(4), 0, []
    for size in (300, 3_000):
        counts = counted(1, 200 * size // 3, 50 * size // 3)  # 50 tokens missed per sampled one
        errors.append(0.0)
        for _ in range(20):
            estimator = PairedEstimator(50.0, 10_000)
            for _ in range(size):
                estimator.add(one(dice.randrange(NUM_PARTS)), 0, int(dice.random() < 0.2))
            estimator.reached = Coverage.of(counts)
            ratio, error = estimator.estimate(counts, 1, 100)
            within += abs(ratio - (0.25 + 0.2 * 0.75)) <= error
            errors[-1] += error / 20
    assert within >= 36
    assert errors[1] < errors[0] / 2


def test_an_estimate_of_other_traffic_than_all_says_so():
    """What was sampled hit 50 %, all of it 25 %: the estimate may be wrong by the difference."""
    estimator = PairedEstimator(8.0, 10_000)
    for number in range(1_000):
        estimator.add(one(number), 0, number // NUM_PARTS % 2)
    estimator.reached = Coverage(16_000, 8_000, 100)
    assert estimator.estimate(counted(200, 32_000, 8_000), 1, 100)[1] > 0.25
    assert estimator.estimate(counted(100, 16_000, 8_000), 1, 100)[1] < 0.05


def test_an_estimate_from_more_blocks_than_the_rate_says_is_wider():
    """One in 8 of the cache's 800 misses are 100; with 200, simulations were too small."""
    errors, counts = {}, counted(1, 1_600, 800)
    for num_sampled in (100, 200):
        estimator = PairedEstimator(8.0, 10_000)
        for number in range(num_sampled):
            estimator.add(one(number), 0, int(number % 5 == 0))
        estimator.reached = Coverage.of(counts)
        ratio, errors[num_sampled] = estimator.estimate(counts, 1, 1)
        assert ratio == pytest.approx(0.5 + 0.2 * 0.5, abs=0.001)
    assert errors[200] > errors[100] + 0.04


def test_where_no_difference_was_seen_there_may_be_a_small_one():
    estimator, counts = PairedEstimator(8.0, 10_000), counted(10, 1_000, 500)
    estimator.add(array("I", range(100)), 50, 50)
    estimator.reached = Coverage.of(counts)
    ratio, error = estimator.estimate(counts, 1, 100)
    assert ratio == 0.5
    assert error == pytest.approx(3 * 8 / 1_000, rel=0.01)


def test_of_one_block_that_was_seen_there_may_be_several_times_as_much():
    """A sample that saw little of what is rare says so."""
    errors = []
    for num_seen in (1, 10, 100):
        estimator = PairedEstimator(8.0, 10_000, SimulationError(0.0))
        for number in range(1_000):
            estimator.add(one(number), 1, int(number >= num_seen))
        estimator.reached = Coverage(8_000, 8_000, 1_000)
        ratio, error = estimator.estimate(counted(1, 8_000, 8_000), 1, 100)
        errors.append(error / (1 - ratio))
    assert errors[0] > 4 > errors[1] > errors[2]
    assert errors[2] < 0.5
