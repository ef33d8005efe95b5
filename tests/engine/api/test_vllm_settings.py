"""Settings of an engine under vLLM's names."""

from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import pytest

import ostinato
from ostinato import LLM, AsyncEngineArgs, AsyncLLM, EngineArgs, SamplingParams
from ostinato.engine.settings.config import EngineConfig
from ostinato.engine.settings.vllm_keywords import (
    ALIASES,
    UNSUPPORTED_CALLS,
    UNSUPPORTED_SAMPLING,
    UNSUPPORTED_SETTINGS,
)
from ostinato.errors import ConfigError, InvalidSamplingParams
from tests.support.models.checkpoints import Checkpoints


@pytest.mark.parametrize(
    ("given", "changed"),
    [
        ({"tensor_parallel_size": 1, "pipeline_parallel_size": 1}, {}),
        ({"enforce_eager": True, "disable_log_stats": False, "swap_space": 0}, {}),
        ({"trust_remote_code": False, "quantization": None, "tokenizer_mode": "auto"}, {}),
        ({"enable_chunked_prefill": True, "scheduling_policy": "priority"}, {}),
        ({"dtype": "half"}, {"dtype": "float16"}),
        (
            {"dtype": "float", "kv_cache_dtype": "int8_per_token_head"},
            {"dtype": "float32", "kv_cache_dtype": "int8"},
        ),
        ({"num_gpu_blocks_override": 7}, {"num_blocks": 7}),
        ({"num_gpu_blocks_override": None}, {}),
        ({"kv_cache_memory_bytes": 2**20}, {"kv_cache_memory": 2**20}),
        ({"long_prefill_token_threshold": 64}, {"max_chunk_tokens": 64}),
        ({"long_prefill_token_threshold": 0}, {}),
        ({"prefix_caching_hash_algo": "sha256"}, {}),
        ({"max_logprobs": -1}, {"max_logprobs": -1}),
        ({"gpu_memory_utilization": 0.9}, {}),
        ({"swap_space": 4}, {}),
        ({"enable_log_requests": False}, {}),
        ({"max_cpu_loras": 4}, {"max_loras": 4}),
        ({"max_loras": 1, "max_cpu_loras": 4}, {"max_loras": 4}),
        ({"max_loras": 2, "max_cpu_loras": None}, {"max_loras": 2}),
    ],
)
def test_settings_of_vllm_that_mean_the_same_are_taken(given, changed):
    assert EngineConfig.of("m", given) == EngineConfig(model="m", **changed)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"tensor_parallel_size": 2},
            "tensor_parallel_size=2 is not supported: a model runs in one",
        ),
        ({"gpu_memory_utilization": 90}, "gpu_memory_utilization=90: must be"),
        (
            {"gpu_memory_utilization": 0.9, "device": "cuda", "kv_cache_memory_bytes": 2**20},
            "gpu_memory_utilization=0.9 and kv_cache_memory=1048576 both size the pool",
        ),
        (
            {"gpu_memory_utilization": 0.9, "device": "cuda", "num_blocks": 7},
            "gpu_memory_utilization=0.9 and num_blocks=7 both size the pool",
        ),
        (
            {"gpu_memory_utilization": 0.9, "device": "xpu"},
            "gpu_memory_utilization=0.9 with device='xpu': only the memory of a CUDA device",
        ),
        ({"trust_remote_code": True}, "code that comes with a checkpoint is never run"),
        ({"enable_chunked_prefill": False}, "set max_num_batched_tokens to max_model_len"),
        ({"quantization": "awq_marlin"}, "quantization='awq_marlin'"),
        ({"swap_space": -4}, "blocks of preempted requests stay cached"),
        ({"tensor_paralel_size": 1}, "there is no keyword .* did you mean 'tensor_parallel_size'"),
        ({"num_gpu_blocks_override": 7, "num_blocks": 8}, "another name of num_blocks"),
        ({"revision": 5}, "revision=5: must be a branch, tag or commit"),
        ({"tokenizer": 5}, "tokenizer=5: must be a name or a directory"),
        ({"max_logprobs": -2}, "max_logprobs=-2"),
    ],
)
@pytest.mark.parametrize("face", [LLM, AsyncLLM])
def test_settings_that_cannot_be_had_are_refused_before_loading(face, given, message):
    with pytest.raises(ConfigError, match=message):
        face("/no/such/model", **given)


def test_vllms_class_of_settings_is_taken_by_both_faces(checkpoints: Checkpoints):
    args = EngineArgs(checkpoints.path("llama"), num_gpu_blocks_override=16, swap_space=4)
    assert asdict(args) == EngineConfig(model=args.model, num_blocks=16).keywords

    with LLM(**asdict(args)) as llm:
        assert llm.engine.config.num_blocks == 16
    served = AsyncLLM.from_engine_args(AsyncEngineArgs(model=args.model, num_blocks=8))
    assert served.engine.config.num_blocks == 8
    served.shutdown()
    with pytest.raises(ConfigError, match="did you mean 'max_num_seqs'"):
        EngineArgs(max_num_seq=3)


def test_programs_of_vllm_find_its_modules_here():
    """With ``vllm`` replaced by ``ostinato`` in each import."""
    from ostinato.inputs import TextPrompt, TokensPrompt
    from ostinato.lora.request import LoRARequest
    from ostinato.sampling_params import StructuredOutputsParams

    assert LoRARequest is ostinato.LoRARequest
    harmless: dict[str, Any] = {"choice": ["a"], "disable_any_whitespace": False}
    assert StructuredOutputsParams(**harmless).kind == "choice"
    other: dict[str, Any] = {"json": {}, "disable_additional_properties": True}
    with pytest.raises(InvalidSamplingParams, match="additionalProperties"):
        StructuredOutputsParams(**other)
    assert TextPrompt(prompt="a") == {"prompt": "a"}
    assert TokensPrompt(prompt_token_ids=[1]) == {"prompt_token_ids": [1]}


def test_no_keyword_is_both_known_and_unsupported():
    settings = {field.name for field in fields(EngineConfig)}
    assert not settings & (UNSUPPORTED_SETTINGS.keys() | ALIASES.keys())
    assert set(ALIASES.values()) <= settings
    assert not {field.name for field in fields(SamplingParams)} & UNSUPPORTED_SAMPLING.keys()
    assert not [name for name in UNSUPPORTED_CALLS if name in vars(LLM)]


def test_another_tokenizer_takes_the_place_of_the_models_own(checkpoints: Checkpoints, bard: LLM):
    path = checkpoints.path("llama")
    llm = LLM(path, dtype="float64", num_blocks=16, tokenizer="tiny-shakespeare")

    greedy = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    [output] = llm.generate("ROMEO", greedy, use_tqdm=False)

    assert output.prompt_token_ids == bard.get_tokenizer()("ROMEO")["input_ids"]
    assert output.outputs[0].text == bard.get_tokenizer().decode(output.outputs[0].token_ids)


def test_a_directory_without_a_tokenizer_is_refused(checkpoints: Checkpoints, tmp_path: Path):
    with pytest.raises(ConfigError, match="no tokenizer files are there"):
        LLM(checkpoints.path("llama"), tokenizer=tmp_path)


def test_a_revision_is_what_is_fetched_from_the_hub(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
):
    asked: list[Any] = []

    def fetch(name: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        asked.append((name, revision))
        return str(checkpoints.path("llama"))

    monkeypatch.setattr("huggingface_hub.snapshot_download", fetch)

    LLM("somebody/some-model", revision="v1.5", num_blocks=4)

    assert asked == [("somebody/some-model", "v1.5")]
    with pytest.raises(ConfigError, match=r"revision='v1\.5': .* is no repository of the hub"):
        LLM("tiny-shakespeare", revision="v1.5")
