"""Settings of an engine: which are refused, and what follows from the others."""

from pathlib import Path
from typing import Any

import pytest
import torch

from ostinato import LLM, AsyncLLM, SamplingParams
from ostinato.core.errors import ConfigError, PromptTooLong
from ostinato.engine.settings.config import EngineConfig
from ostinato.runner.attention.native_backend import NativeAttention
from ostinato.runner.attention.torch_backend import TorchAttention
from tests.support.engines import MakeLLM, assert_idle
from tests.support.instruction_sets import needs_library
from tests.support.models.checkpoints import Checkpoints

GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"block_siz": 4}, "there is no keyword 'block_siz': did you mean 'block_size'"),
        ({"zzz": 4}, "there is no keyword 'zzz': known are model, revision"),
        ({"block_size": 0}, "block_size=0: must be an integer, at least 1"),
        ({"block_size": 16.0}, r"block_size=16\.0: must be an integer"),
        ({"block_size": True}, "block_size=True: must be an integer"),
        ({"num_blocks": 0}, "num_blocks=0: must be an integer, at least 1"),
        ({"kv_cache_memory": -5}, "kv_cache_memory=-5: must be an integer"),
        ({"kv_cache_memory": "4G"}, "kv_cache_memory='4G': must be an integer"),
        ({"num_blocks": 2, "kv_cache_memory": 5}, "num_blocks=2 and kv_cache_memory=5 both"),
        ({"max_model_len": 0}, "max_model_len=0: must be an integer, at least 1"),
        ({"max_num_seqs": 0}, "max_num_seqs=0: must be an integer, at least 1"),
        ({"max_num_batched_tokens": 0}, "max_num_batched_tokens=0: must be an integer"),
        (
            {"max_num_seqs": 10, "max_num_batched_tokens": 5},
            "max_num_batched_tokens=5 is below max_num_seqs=10",
        ),
        ({"max_chunk_tokens": 0}, "max_chunk_tokens=0: must be an integer, at least 1"),
        ({"max_overtakes": -1}, "max_overtakes=-1: must be an integer, at least 0"),
        ({"seed": -1}, "seed=-1: must be an integer, at least 0"),
        ({"dtype": "int8"}, "dtype='int8': must be one of auto, float32"),
        ({"dtype": torch.float32}, "dtype=torch.float32: must be one of auto, float32"),
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype='fp8': must be one of auto.*, int8"),
        ({"attention": "fast"}, "attention='fast': must be one of auto, native, triton, torch"),
        ({"index": "tree"}, "index='tree': must be one of radix, hash"),
        ({"index": ["radix"]}, r"index=\['radix'\]: must be a name, or a class of your own"),
        ({"order": "lifo"}, "order='lifo': must be one of fcfs, shortest_first"),
        ({"free_order": "random"}, "free_order='random': must be one of unused_first"),
        ({"eviction_policy": "mru"}, "^eviction_policy='mru': must be one of lru"),
        ({"digest": "md5"}, "digest='md5': must be one of sha256"),
        ({"enable_prefix_caching": "no"}, "enable_prefix_caching='no': must be True or False"),
        ({"seal_tails": 0}, "seal_tails=0: must be True or False"),
    ],
)
@pytest.mark.parametrize("face", [LLM, AsyncLLM])
def test_a_setting_that_cannot_be_is_refused_before_a_model_is_loaded(face, settings, message):
    """The directory does not even exist."""
    with pytest.raises(ConfigError, match=message):
        face("/no/such/model", **settings)


@pytest.mark.parametrize("model", [None, 5, b"tiny-shakespeare", ["tiny-shakespeare"]])
def test_a_model_is_a_name_or_a_path(model: Any):
    with pytest.raises(ConfigError, match="must be a name or a directory"):
        LLM(model)


@pytest.mark.parametrize(
    "device",
    [
        "quantum",
        "meta",
        5,
        None,
        pytest.param(
            "cuda", marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
        ),
    ],
)
def test_a_device_that_is_not_there_is_refused(device: Any, checkpoints: Checkpoints):
    with pytest.raises(ConfigError, match=f"device={device!r}: .*'cpu' is always there"):
        LLM(checkpoints.path("llama"), device=device)


def test_the_embedded_model_is_the_default():
    assert EngineConfig().model == "tiny-shakespeare"


def test_a_directory_may_be_given_as_a_path(checkpoints: Checkpoints):
    path = checkpoints.path("llama")
    assert isinstance(path, Path)

    llm = LLM(path, num_blocks=4)

    assert llm.engine.config.model == str(path)


def test_settings_reach_the_rooms_below():
    """Whatever is set away from its default arrives in cache or scheduler."""
    config = EngineConfig(
        block_size=4,
        index="hash",
        free_order="classic",
        digest="xxh3_128",
        enable_prefix_caching=False,
        seal_tails=False,
        max_num_batched_tokens=99,
        max_chunk_tokens=7,
        max_num_seqs=5,
        order="longest_prefix",
        max_overtakes=3,
    )

    cache, scheduler = config.cache(num_blocks=12), config.scheduler(max_model_len=34)

    assert (cache.num_blocks, cache.block_size, cache.index) == (12, 4, "hash")
    assert (cache.free_order, cache.digest, cache.eviction_policy) == (
        "classic",
        "xxh3_128",
        "reuse_hazard",
    )
    assert (cache.enable_prefix_caching, cache.seal_tails) == (False, False)
    assert (scheduler.max_num_batched_tokens, scheduler.max_chunk_tokens) == (99, 7)
    assert (scheduler.max_num_seqs, scheduler.max_model_len) == (5, 34)
    assert (scheduler.order, scheduler.max_overtakes) == ("longest_prefix", 3)


def test_a_sequence_cannot_be_longer_than_the_model_can(checkpoints: Checkpoints):
    with pytest.raises(ConfigError, match="max_model_len=257 is above the 256 tokens"):
        LLM(checkpoints.path("llama"), max_model_len=257)


def test_max_model_len_ends_texts(make_llm: MakeLLM):
    llm = make_llm("llama", max_model_len=10)
    until_the_end = SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True)

    output = llm.generate([5] * 7, until_the_end, use_tqdm=False)[0].outputs[0]

    assert (len(output.token_ids), output.finish_reason) == (3, "length")


def test_one_block_serves_what_fits_into_it(make_llm: MakeLLM):
    """Four slots: the last token of a text needs none, so five tokens are the longest."""
    llm = make_llm("llama", num_blocks=1)

    first = llm.generate([5, 6, 7], GREEDY, use_tqdm=False)[0]
    assert (len(first.outputs[0].token_ids), first.outputs[0].finish_reason) == (2, "length")
    again = llm.generate([[5, 6, 7, 8], [5, 6, 9]], GREEDY, use_tqdm=False)
    assert [len(output.outputs[0].token_ids) for output in again] == [1, 2]
    with pytest.raises(PromptTooLong, match="has 5 tokens and needs 2 blocks of 4, but the pool"):
        llm.generate([5] * 5, GREEDY, use_tqdm=False)
    assert_idle(llm.engine)


def test_bytes_for_keys_and_values_become_blocks(make_llm: MakeLLM):
    """A token has 2 layers, keys and values, 2 heads of 16 numbers of 8 bytes: 1,024 bytes."""
    llm = make_llm("llama", kv_cache_memory=10 * 4 * 1024 + 1)

    assert llm.engine.cache.config.num_blocks == 10


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kv_cache_memory": 100}, "kv_cache_memory=100 holds no block: one block needs"),
        ({"num_blocks": 10**13}, "GiB of keys and values, .* free .*: fewer blocks .num_blocks"),
        ({"num_blocks": 1, "block_size": 10**10}, "GiB of keys and values, .*: fewer blocks"),
    ],
)
def test_a_pool_that_does_not_fit_the_memory_is_refused(
    settings: dict[str, int], message: str, checkpoints: Checkpoints
):
    with pytest.raises(ConfigError, match=message):
        LLM(checkpoints.path("llama"), **settings)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64", "int8"])
def test_keys_and_values_may_have_a_format_of_their_own(dtype: str, make_llm: MakeLLM):
    llm = make_llm("llama", dtype="float32", kv_cache_dtype=dtype, num_blocks=16)

    first, second = (llm.generate([5] * 9, GREEDY, use_tqdm=False)[0] for _ in range(2))

    assert llm.engine.runner.kv_stores[0].dtype == getattr(torch, dtype)
    assert llm.engine.identities.of_tenant("").kv_dtype == f"torch.{dtype}", "no other format hits"
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 8)
    assert first.outputs[0].token_ids == second.outputs[0].token_ids


def test_the_native_library_is_refused_where_it_cannot_compute(checkpoints: Checkpoints):
    with pytest.raises(ConfigError, match="block_size=24 must be a multiple of 16: set block_size"):
        LLM(checkpoints.path("llama"), attention="native", block_size=24, num_blocks=16)
    with pytest.raises(
        ConfigError, match="dtype is float64, and the library supports float32, bfloat16"
    ):
        LLM(checkpoints.path("llama"), attention="native", dtype="float64", num_blocks=16)


@needs_library
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "bfloat16", "float16", "int8"])
def test_attention_is_the_librarys_unless_it_is_told_otherwise(kv_cache_dtype, make_llm: MakeLLM):
    """With blocks of sixteen; and torch, asked for by name, says the same."""
    settings = {"dtype": "float32", "block_size": 16, "kv_cache_dtype": kv_cache_dtype}
    native, torch_ = (
        make_llm("llama", num_blocks=16, attention=name, **settings) for name in ("auto", "torch")
    )

    said = [
        llm.generate([5] * 40, GREEDY, use_tqdm=False)[0].outputs[0] for llm in (native, torch_)
    ]

    assert isinstance(native.engine.runner.attention, NativeAttention)
    assert isinstance(torch_.engine.runner.attention, TorchAttention)
    assert said[0].token_ids == said[1].token_ids


@pytest.mark.parametrize("dtype", ["auto", "float32", "bfloat16", "float16", "float64"])
def test_every_dtype_serves(dtype: str, make_llm: MakeLLM):
    llm = make_llm("llama", dtype=dtype, num_blocks=16)

    output = llm.generate([5] * 9, GREEDY, use_tqdm=False)[0].outputs[0]

    assert len(output.token_ids) == 4
    assert llm.engine.loaded.dtype == getattr(torch, dtype if dtype != "auto" else "float32")


def test_a_closed_engine_says_so(checkpoints: Checkpoints):
    """Closing twice does nothing; a ``with`` statement closes."""
    from ostinato.errors import EngineStopped

    with LLM(checkpoints.path("llama"), num_blocks=4) as llm:
        llm.generate([5], GREEDY, use_tqdm=False)
    llm.close()

    with pytest.raises(EngineStopped, match="this LLM was closed"):
        llm.generate([5], GREEDY)


@pytest.mark.parametrize(("given", "limit_ms"), [({}, 10_000), ({"max_step_ms": 40}, 40)])
def test_steps_of_a_batch_are_long_unless_a_limit_is_set(given: dict[str, int], limit_ms: int):
    with LLM("tiny-shakespeare", num_blocks=16, **given) as llm:
        assert llm.engine.config.max_step_ms == limit_ms
    assert EngineConfig.of("tiny-shakespeare", {}).max_step_ms == 250, "of a server"
