"""Memory is shared out among groups of layers as the engine shares it out."""

from typing import get_args

import pytest

from ostinato.core.errors import ConfigError
from ostinato.lab.replay.serial_replay import Pools, replay_serially
from ostinato.lab.size.kv_bytes import kv_bytes
from ostinato.lab.work.kv_groups import KVGroups, kv_groups
from ostinato.settings import CheckpointPlacement, StateConfig, window_blocks
from tests.lab.size import known_configs as known
from tests.lab.traces.small_traces import drawn_trace, trace_of

GIB = 2**30


def test_a_model_without_windows_keeps_every_token():
    groups = kv_groups(kv_bytes(known.LLAMA_3_1_8B))
    assert groups == KVGroups(131_072)
    assert groups.pools(GIB, 16) == Pools(512)
    assert groups.memory_for(512, 16) == GIB


@pytest.mark.parametrize(
    ("name", "token_bytes", "full_bytes"),
    [("GEMMA_3_27B", 507_904, 81_920), ("GPT_OSS_120B", 73_728, 36_864)],
)
def test_a_long_prefix_takes_what_its_full_layers_take(name, token_bytes, full_bytes):
    groups = kv_groups(kv_bytes(getattr(known, name)), num_running=8)
    assert (groups.token_bytes, groups.full_bytes) == (token_bytes, full_bytes)
    memory = 256 * GIB
    full, [window] = groups.blocks(memory, 512)
    by_even_share = memory // (token_bytes * 512)
    assert full > by_even_share  # more prefixes than if every layer kept every token
    windows_bytes = token_bytes - full_bytes
    assert full * full_bytes + window.num_blocks * windows_bytes <= memory / 512 * 1.001
    assert full == pytest.approx(by_even_share * (1 + windows_bytes / full_bytes / 2), rel=0.01)


def test_memory_for_blocks_is_the_least_that_holds_them():
    groups = kv_groups(kv_bytes(known.GEMMA_3_27B), num_running=8)
    memory = groups.memory_for(5_000, 512)
    assert groups.pools(memory, 512).full >= 5_000
    assert groups.pools(int(memory * 0.999), 512).full < 5_000


def test_a_window_is_counted_in_blocks_of_the_trace():
    groups = kv_groups(kv_bytes(known.GEMMA_3_27B), num_running=8)
    [window] = groups.pools(64 * GIB, 512).windows
    assert window.window == window_blocks(1024, 512) == 3
    [window] = groups.pools(64 * GIB, 16).windows
    assert window.window == 65


def test_memory_that_holds_no_block_is_refused():
    with pytest.raises(ConfigError, match="hold no block of 512 tokens of 131,072 bytes"):
        kv_groups(kv_bytes(known.LLAMA_3_1_8B)).pools(1024, 512)


def test_a_hit_needs_the_window_before_its_end():
    """The window keeps the ends of the last prefixes, and earlier ends are lost with it."""
    trace = trace_of("ABCDEF", "GHIJKL", "ABCDEF")
    roomy = KVGroups(1, ((5, 1),), 1)
    pools = Pools(100, roomy.pools(400, 4).windows)
    assert replay_serially(trace, pools).hit_tokens.tolist() == [0, 0, 24]
    [window] = pools.windows
    tight = Pools(100, (type(window)(window.window, window.window + 1),))
    assert replay_serially(trace, tight).hit_tokens.tolist() == [0, 0, 0]


@pytest.mark.parametrize("policy", ["lru", "reuse_hazard"])
def test_windows_with_room_change_nothing(policy):
    trace = drawn_trace(5)
    window = KVGroups(1, ((20, 1),), 1).pools(10**6, 8).windows
    for size in (40, 120):
        plain = replay_serially(trace, size, policy)
        windowed = replay_serially(trace, Pools(size, window), policy)
        assert windowed.hit_tokens.tolist() == plain.hit_tokens.tolist()


def test_memory_of_a_model_with_states_is_shared_between_blocks_and_checkpoints():
    """A checkpoint weighs as much as 3,168 tokens: one is kept per 4,096 new tokens."""
    groups = kv_groups(kv_bytes(known.HYBRID_35B_A3B))
    pools = groups.pools(64 * GIB, 512)
    assert pools.states is not None
    taken = pools.full * 512 * groups.token_bytes + pools.states.num_slots * groups.state_bytes
    assert 0.99 < taken / (64 * GIB) <= 1
    assert pools.full * 512 / (pools.states.num_slots - 2) == pytest.approx(4096, rel=0.02)
    with pytest.raises(ConfigError, match="two states"):
        groups.pools(100 * 2**20, 512)


def test_a_serial_replay_keeps_states_where_prompts_part():
    """The first two share three blocks; the third one finds the state that the second left."""
    trace, hits = trace_of("ABCDEF", "ABCGHI", "ABCJKL"), {}
    for placement in get_args(CheckpointPlacement):
        states = StateConfig(20, 1, 0, placement)
        found = replay_serially(trace, Pools(100, states=states), "lru")
        hits[placement] = (found.hit_tokens // trace.block_tokens).tolist()
    assert hits == {
        "where_prompts_part": [0, 0, 3],
        "prompt_end": [0, 0, 0],
        "every_unit": [0, 3, 3],
    }
