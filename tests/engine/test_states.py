"""The number of states that an engine keeps, and the use of their memory."""

import pytest

from ostinato.core.errors import ConfigError
from ostinato.hybrid.pool_sizes import TOKENS_PER_CHECKPOINT
from tests.support.engines import MakeLLM

FEW = {"max_num_seqs": 4, "max_num_batched_tokens": 128}


def test_memory_is_divided_between_states_and_blocks(make_llm: MakeLLM):
    """4 KiB a state, 0.5 KiB a token: so many checkpoints, and the blocks of their tokens."""
    llm = make_llm("qwen3_5_text", kv_cache_memory=2**24, max_model_len=64, **FEW)

    runner, states = llm.engine.runner, llm.engine.cache.config.states
    num_bytes = runner.states.num_bytes, sum(store.num_bytes for store in runner.kv_stores)

    assert states is not None and states.num_slots == runner.states.num_slots > 2 * 4
    assert 0.99 * 2**24 < sum(num_bytes) <= 2**24
    assert runner.states.spec.bytes_per_slot == 4352
    num_tokens = llm.engine.cache.config.num_blocks * 4
    assert num_tokens // TOKENS_PER_CHECKPOINT == states.num_slots - 2 * 4


def test_without_attention_blocks_list_the_prefixes_of_all_states(make_llm: MakeLLM):
    llm = make_llm("mamba2", num_state_slots=20, **FEW)

    assert llm.engine.cache.config.num_blocks == 20 * TOKENS_PER_CHECKPOINT // 4
    assert llm.engine.runner.kv_stores[0].num_bytes == 0


def test_states_are_not_configured_for_a_model_without(make_llm: MakeLLM):
    with pytest.raises(ConfigError, match=r"num_state_slots=20: no layer of .* carries a state"):
        make_llm("llama", num_state_slots=20)


def test_memory_that_does_not_hold_two_states_is_refused(make_llm: MakeLLM):
    with pytest.raises(ConfigError, match="two states of 4,352 bytes"):
        make_llm("qwen3_5_text", kv_cache_memory=8192, **FEW)
