"""vLLM's settings, arguments and methods of ``LLM`` that have another name here, or are refused.

A setting with the same meaning has vLLM's name in ``EngineConfig``, or is one of ``ALIASES``. One
that is not supported is refused with the reason, unless its value changes nothing.
``docs/vllm.md`` lists all of them.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from ostinato.engine.settings.keywords import NumberFrom, Unsupported, known_keywords
from ostinato.errors import ConfigError, RequestError, UnsupportedCall

ALIASES = {
    "num_gpu_blocks_override": "num_blocks",
    "kv_cache_memory_bytes": "kv_cache_memory",
    "long_prefill_token_threshold": "max_chunk_tokens",
    "prefix_caching_hash_algo": "digest",
    "max_cpu_loras": "max_loras",
}
"""vLLM's names of settings that have another name here."""

DRAFT_METHODS = ("ngram", "suffix")
"""Methods of vLLM's ``speculative_config`` that draft from text, as ``drafts="auto"`` does."""

_ONE_PROCESS = "a model runs in one process; run several engines behind a load balancer"
_NO_IMAGES = "images are processed as the checkpoint says; audio and video are not served"
_POOLING = (
    "the checkpoint says how it pools; embed(), score() and classify() work beside generate()"
)
_NO_EMBEDS = "prompts are texts or token ids, and outputs are tokens"
_GRAMMAR = "structured outputs have one backend and no options"

_BY_REASON: Mapping[str, Sequence[tuple[str, tuple[object, ...]]]] = {
    _ONE_PROCESS: [
        (
            "tensor_parallel_size pipeline_parallel_size prefill_context_parallel_size "
            "decode_context_parallel_size data_parallel_size data_parallel_size_local nnodes",
            (1,),
        ),
        (
            "data_parallel_rank data_parallel_start_rank data_parallel_address "
            "data_parallel_rpc_port master_addr master_port all2all_backend "
            "dbo_decode_token_threshold dbo_prefill_token_threshold max_parallel_loading_workers",
            (),
        ),
        ("data_parallel_backend", ("mp",)),
        (
            "data_parallel_hybrid_lb data_parallel_external_lb enable_expert_parallel "
            "enable_eplb enable_dbo ray_workers_use_nsight",
            (False,),
        ),
        ("distributed_executor_backend", ("uni", "mp")),
        ("node_rank ubatch_size", (0,)),
        ("expert_placement_strategy", ("linear",)),
        ("eplb_config", ({},)),
        ("disable_nccl_for_dp_synchronization disable_custom_all_reduce", (False, True)),
    ],
    "nothing is compiled, and which steps are captured in CUDA graphs is decided here": [
        ("enforce_eager", (False, True)),
        ("compilation_config", (0, {})),
        ("optimization_level", (0,)),
        (
            "cuda_graph_sizes cudagraph_capture_sizes max_cudagraph_capture_size "
            "max_seq_len_to_capture attention_backend override_attention_dtype",
            (),
        ),
        ("attention_config kernel_config", ({},)),
        ("moe_backend", ("auto",)),
        ("model_impl", ("auto", "transformers")),
        ("kv_sharing_fast_prefill", (False,)),
    ],
    "there is no swap space: blocks of preempted requests stay cached": [
        ("swap_space", (NumberFrom(0),)),
    ],
    "nothing is moved between memories; blocks of preempted requests stay cached": [
        ("cpu_offload_gb", (0, 0.0)),
        ("cpu_offload_params kv_offloading_size kv_offloading_backend kv_transfer_config", ()),
        ("offload_backend", ("auto",)),
        ("offload_config", ({},)),
        ("enable_sleep_mode", (False,)),
    ],
    "code that comes with a checkpoint is never run": [
        ("trust_remote_code", (False,)),
        ("code_revision", ()),
    ],
    "the tokenizer is transformers' own choice; give a directory as tokenizer=": [
        ("tokenizer_mode", ("auto", "hf", "fast")),
        ("tokenizer_revision", ()),
    ],
    "prompts of token ids with detokenize=False do not use the tokenizer": [
        ("skip_tokenizer_init", (False,)),
    ],
    "keys and values are kept in the format of kv_cache_dtype in all layers, and int8 has a scale "
    "for each token and head": [
        ("calculate_kv_scales", (False,)),
        ("kv_cache_dtype_skip_layers", ([],)),
    ],
    "prompts are always computed in chunks; to compute each in one step, set "
    "max_num_batched_tokens to max_model_len": [
        ("enable_chunked_prefill", (True,)),
        ("max_num_partial_prefills max_long_partial_prefills scheduler_reserve_full_isl", ()),
    ],
    "set order; priority is always respected": [("scheduling_policy", ("fcfs", "priority"))],
    "steps are planned one at a time": [("async_scheduling", (False,))],
    "log-probabilities are those of the model's own logits": [("logprobs_mode", ("raw_logprobs",))],
    "no Python code runs between logits and token; use SamplingParams": [
        ("logits_processors", ([],)),
        ("logits_processor_pattern", ()),
    ],
    "give chat_template to chat()": [("chat_template", ())],
    "sliding windows are always respected": [
        ("disable_sliding_window disable_hybrid_kv_cache_manager", (False,)),
    ],
    "set read_once='never'": [("disable_cascade_attn", (False,))],
    "set kv_events_endpoint and its neighbours": [("kv_events_config", ())],
    "the server's option --served-model-name": [("served_model_name", ())],
    "fetch the files with `hf download` and give the directory": [
        ("download_dir ignore_patterns", ()),
        ("hf_token", (False,)),
        ("load_format", ("auto", "safetensors", "hf")),
        ("config_format", ("auto", "hf")),
        ("model_loader_extra_config", ({},)),
        ("safetensors_load_strategy", ("lazy",)),
        ("pt_load_map_location", ("cpu",)),
        ("use_tqdm_on_load", (False, True)),
    ],
    "edit config.json in a copy of the checkpoint": [
        ("hf_overrides rope_scaling", ({},)),
        ("hf_config_path rope_theta", ()),
    ],
    _POOLING: [
        ("task", ("auto", "generate", "embed", "embedding", "score", "classify")),
        ("runner", ("auto", "generate", "pooling")),
        ("convert", ("auto", "none", "embed", "classify")),
        ("pooler_config override_pooler_config", ()),
    ],
    _NO_EMBEDS: [
        ("enable_prompt_embeds enable_return_routed_experts", (False,)),
        ("io_processor_plugin", ()),
    ],
    _NO_IMAGES: [
        ("mm_processor_kwargs media_io_kwargs", ({},)),
        ("mm_processor_cache_gb video_pruning_rate", (0, 0.0)),
        (
            "mm_processor_cache_type mm_shm_cache_max_object_size_mb mm_encoder_tp_mode "
            "mm_encoder_attn_backend",
            (),
        ),
        (
            "interleave_mm_strings enable_mm_embeds disable_chunked_mm_input language_model_only",
            (False,),
        ),
        ("skip_mm_profiling disable_mm_preprocessor_cache", (False, True)),
    ],
    "LoRA adapters are kept whole, in the model's dtype; max_loras counts all loaded ones": [
        ("lora_dtype", ("auto",)),
        ("lora_extra_vocab_size default_mm_loras", ()),
        ("fully_sharded_loras", (False,)),
    ],
    "drafts come from text already seen, and their number from measured prices; set drafts": [
        ("speculative_config", ()),
        ("num_lookahead_slots", (0,)),
    ],
    _GRAMMAR: [
        ("structured_outputs_config", ({},)),
        ("reasoning_parser", ("",)),
        ("guided_decoding_backend", ("auto",)),
    ],
    "states have the formats that the model computes, and are kept where prompts part": [
        ("mamba_cache_dtype mamba_ssm_cache_dtype", ("auto",)),
        ("mamba_block_size mamba_cache_mode", ()),
    ],
    "nothing is logged per step; RequestOutput.metrics is always there": [
        ("disable_log_stats disable_log_requests", (False, True)),
        ("aggregate_engine_logging enable_log_requests", (False,)),
    ],
    "the server has metrics and traces of its own: `ostinato serve --help`": [
        ("otlp_traces_endpoint collect_detailed_traces show_hidden_metrics_for_version", ()),
        ("kv_cache_metrics", (False,)),
        ("profiler_config", ({},)),
    ],
    "vLLM's workers, schedulers and plugins do not run here": [
        ("worker_cls", ("auto",)),
        ("worker_extension_cls", ("",)),
        ("scheduler_cls weight_transfer_config ec_transfer_config", ()),
        ("additional_config", ({},)),
    ],
}
"""By the reason: names, and their values that change nothing here."""

UNSUPPORTED_SETTINGS: Mapping[str, Unsupported] = {
    name: Unsupported(reason, (None, *harmless))
    for reason, rows in _BY_REASON.items()
    for names, harmless in rows
    for name in names.split()
}
"""Settings of vLLM's ``LLM`` that have no counterpart here."""

_STRUCTURED = "use structured_outputs=StructuredOutputs(...)"

UNSUPPORTED_SAMPLING = {
    "best_of": Unsupported(
        "candidates are not ranked; set n and logprobs=0, and keep the output with the highest "
        "cumulative_logprob",
        (None, 1),
    ),
    "logits_processors": Unsupported(
        "no Python code runs between logits and token; use logit_bias, allowed_token_ids, "
        "bad_words or structured_outputs",
        (None, []),
    ),
    "extra_args": Unsupported("there are no sampling plugins that would read it", (None, {})),
    "spaces_between_special_tokens": Unsupported(
        "the tokenizer's decoder sets the spaces; read token_ids to find special tokens",
        (True,),
    ),
    "flat_logprobs": Unsupported("log-probabilities come as one dict per token", (False,)),
    "logprob_token_ids": Unsupported("set logprobs=-1 and pick the ids from the result"),
    "prompt_logprob_token_ids": Unsupported("set prompt_logprobs=-1 and pick the ids"),
    "skip_clone": Unsupported("a request samples with a copy of its own", (False, True)),
    "thinking_token_budget": Unsupported(
        "use thinking_budget=ThinkingBudget(...), which names the marks", (None, -1)
    ),
    "repetition_detection": Unsupported("use repetition_penalty or frequency_penalty"),
    "routed_experts_prompt_start": Unsupported("routed experts are not returned", (0,)),
    "trace_decode_token_ids": Unsupported(
        "put the tokens into the prompt and ask for prompt_logprobs"
    ),
    "guided_decoding": Unsupported(_STRUCTURED),
    "response_format": Unsupported(_STRUCTURED),
    "use_beam_search": Unsupported("call beam_search(), or set beams=Beams(...)", (False,)),
    "length_penalty": Unsupported("call beam_search(), or set beams=Beams(...)", (1.0, 1)),
    "early_stopping": Unsupported("call beam_search(), or set beams=Beams(...)", (False,)),
}
"""Keywords of vLLM's ``SamplingParams`` that have no counterpart here."""

UNSUPPORTED_ARGUMENTS: Mapping[str, Unsupported] = {
    "prompt_adapter_request": Unsupported("prompt adapters are not served; LoRA adapters are"),
    "prompt_token_ids": Unsupported("give a list of ids as the prompt"),
    "guided_options_request": Unsupported("use SamplingParams(structured_outputs=...)"),
    "mm_processor_kwargs": Unsupported(_NO_IMAGES, (None, {})),
    "tokenization_kwargs": Unsupported(
        "give token ids as the prompt, or set truncate_prompt_tokens in SamplingParams", (None, {})
    ),
    "chat_template_content_format": Unsupported(
        "content goes to the template as it is given", ("auto", "openai", "string")
    ),
    "trace_headers": Unsupported("the server traces requests"),
    "data_parallel_rank": Unsupported(_ONE_PROCESS, (None, 0)),
    "reasoning_ended": Unsupported(_GRAMMAR),
}
"""Arguments of vLLM's ``generate`` and ``chat`` that have no counterpart here."""

_ARGUMENTS = (
    "prompts", "messages", "sampling_params", "use_tqdm", "priority", "request_id", "chat_template",
    "add_generation_prompt", "continue_final_message", "tools", "chat_template_kwargs",
)  # fmt: skip

UNSUPPORTED_CALLS: Mapping[str, str] = {
    "encode": "call embed() or classify(); for token ids, get_tokenizer()(text)",
    "reward": "call classify() on a checkpoint with one class, use_activation=False",
    "sleep": "close() the LLM, and make another one when it is needed",
    "wake_up": "an LLM does not sleep; make another one after close()",
    "collective_rpc": f"{_ONE_PROCESS}; the model is llm.engine.loaded.model",
    "apply_model": "the model is llm.engine.loaded.model; change it with update_weights()",
    "start_profile": "use py-spy or torch.profiler around the call",
    "stop_profile": "use py-spy or torch.profiler around the call",
    "get_metrics": "read cache_stats, or RequestOutput.metrics",
    "set_tokenizer": "give tokenizer= to LLM()",
    "reset_mm_cache": _NO_IMAGES,
    "get_world_size": _ONE_PROCESS,
    "llm_engine": "the loop is llm.engine",
    "enqueue": "generate() takes all prompts at once; AsyncLLM takes them one by one",
    "wait_for_completion": "generate() waits; AsyncLLM streams",
    "init_weight_transfer_engine": "give new weights to update_weights()",
    "add_request": "AsyncLLM.generate() adds one request and streams its output",
    "pause_generation": "abort() the requests, and send them again",
    "resume_generation": "send the requests again",
    "pin_lora": "adapters stay until remove_lora() is called",
}
"""Attributes of vLLM's ``LLM`` and ``AsyncLLM`` that have no counterpart here."""


def translate_settings(given: Mapping[str, Any], known: list[str]) -> dict[str, Any]:
    """Return settings by the names of ``EngineConfig``.

    Raises:
        ConfigError: One is unknown, not supported, or given under two names.
    """
    settings = dict(given)
    _take_memory_share(settings)
    _take_cpu_loras(settings)
    _take_drafts(settings)
    for alias, name in ALIASES.items():
        if alias in settings:
            value = settings.pop(alias)
            if name in settings:
                raise ConfigError(f"{alias} is another name of {name}: give one of them")
            if alias == "long_prefill_token_threshold" and value == 0:
                value = None
            if value is not None or name == "max_chunk_tokens":
                settings[name] = value
    return known_keywords(settings, known, UNSUPPORTED_SETTINGS, ConfigError)


def _take_memory_share(settings: dict[str, Any]) -> None:
    """Drop a share of a GPU's memory where the engine computes on a CPU."""
    share = settings.get("gpu_memory_utilization")
    is_share = isinstance(share, (int, float)) and not isinstance(share, bool) and 0 < share <= 1
    if is_share and settings.get("device", "cpu") == "cpu":
        del settings["gpu_memory_utilization"]


def _take_cpu_loras(settings: dict[str, Any]) -> None:
    """Count all loaded adapters, as ``max_loras`` does here; vLLM's counts those of one step."""
    other = "max_cpu_loras" if settings.get("max_cpu_loras") is None else "max_loras"
    settings.pop(other, None)


def _take_drafts(settings: dict[str, Any]) -> None:
    """Read vLLM's drafts from text: how many there are is decided here by their price."""
    given = settings.get("speculative_config")
    if isinstance(given, Mapping) and given.get("method") in DRAFT_METHODS:
        if "drafts" in settings:
            raise ConfigError("speculative_config is another name of drafts: give one of them")
        del settings["speculative_config"]
        settings["drafts"] = "auto"


def refuse_arguments(given: Mapping[str, Any]) -> None:
    """Refuse unsupported arguments of ``generate`` or ``chat``.

    Raises:
        RequestError: One is unknown or not supported.
    """
    known_keywords(given, _ARGUMENTS, UNSUPPORTED_ARGUMENTS, RequestError)


def refuse_call(owner: object, name: str) -> NoReturn:
    """Raise an error that says what to use instead of a missing attribute.

    Raises:
        UnsupportedCall: vLLM's class has it.
        AttributeError: No engine has it.
    """
    kind = type(owner).__name__
    if name in UNSUPPORTED_CALLS:
        raise UnsupportedCall(f"{kind}.{name} is not served: {UNSUPPORTED_CALLS[name]}")
    raise AttributeError(f"{kind!r} object has no attribute {name!r}", name=name, obj=owner)
