"""Options of the engine and of sampling that commands share.

Ranges are checked by ``EngineConfig`` and ``SamplingParams``, before anything is loaded.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Annotated, Any

import typer

from ostinato.cli.options.option_groups import option
from ostinato.core.errors import ConfigError
from ostinato.engine.requests.sampling_params import SamplingParams
from ostinato.engine.settings.config import EngineConfig
from ostinato.lab.size.quantities import read_bytes

_CACHE = "Model and cache"
_cache = partial(option, panel=_CACHE)
_computing = partial(option, panel="Computing")
_lora = partial(option, panel="LoRA adapters")
_scheduling = partial(option, panel="Scheduling")
_caching = partial(option, panel="What stays cached")
_events = partial(option, panel="KV events")
_images = partial(option, panel="Images")
_tiers = partial(option, panel="What outlives the pool")
_sampling = partial(option, panel="Sampling")

Model = Annotated[
    str,
    typer.Option(
        "--model",
        "-m",
        help="A model's name, a checkpoint's directory, a GGUF file, or a name on the hub.",
        rich_help_panel=_CACHE,
    ),
]
Index = Annotated[
    str,
    typer.Option(
        help="Prefix index: radix (a tree) or hash (chained digests).",
        rich_help_panel=_CACHE,
    ),
]
BlockSize = Annotated[
    int, typer.Option(help="Tokens per block of the cache.", rich_help_panel=_CACHE)
]
NumBlocks = Annotated[
    int | None,
    typer.Option(
        help="Blocks in the pool, or give --kv-cache-memory; else a share of free memory.",
        rich_help_panel=_CACHE,
    ),
]


def named_paths(option_name: str, given: Sequence[str]) -> dict[str, str]:
    """Return paths by name.

    Raises:
        ConfigError: One is not NAME=DIRECTORY.
    """
    pairs = [entry.partition("=") for entry in given]
    for name, _, path in pairs:
        if not name or not path:
            raise ConfigError(f"{option_name}={name + path!r}: must be NAME=DIRECTORY")
    return {name: path for name, _, path in pairs}


@dataclass(frozen=True)
class EngineOptions:
    """Settings of any engine, as ``EngineConfig`` names them."""

    revision: str | None = _cache(None, "Branch, tag or commit of a model on the hub.")
    tokenizer: str | None = _cache(
        None, "Directory or hub name of a tokenizer other than the model's own."
    )
    dtype: str = _computing(
        "auto", "float32, bfloat16, float16 or float64; auto is the model's own."
    )
    kv_cache_dtype: str = _computing(
        "auto",
        "Format of cached keys and values: one of --dtype, or int8, which keeps about 1.9 times "
        "as many tokens as bfloat16 in the same memory; auto is the model's own.",
    )
    device: str = _computing("cpu", "Device to compute on, as in torch.")
    attention: str = _computing(
        "auto", "Attention backend: native, torch, or auto, which prefers the native library."
    )
    forward: str = _computing("auto", "How steps are computed on a CPU: auto, packed or plain.")
    quantization: str | None = _computing(
        None, "Keep the weights of linear layers in fewer bits: int8, int4, w8a8 or w4a8."
    )
    read_once: str = _computing(
        "auto",
        "Whether a step reads blocks shared by its sequences only once: auto, "
        "where that is cheaper, always or never.",
    )
    index: Index = "radix"
    block_size: BlockSize = 16
    num_blocks: NumBlocks = None
    num_state_slots: int | None = _cache(
        None, "State slots, for models with Mamba or linear attention; else by memory."
    )
    kv_cache_memory: str | None = _cache(None, "Memory for the pool, such as 512MiB or 4GB.")
    max_model_len: int | None = _cache(
        None, "Maximum tokens of prompt and answer together; else the model's own limit."
    )
    enable_prefix_caching: bool = _cache(True, "Cache and reuse prefixes.", "--cache/--no-cache")
    enable_lora: bool = _lora(False, "Allow LoRA adapters.", "--enable-lora")
    max_loras: int = _lora(16, "Maximum number of loaded adapters.")
    max_lora_rank: int = _lora(64, "Maximum rank of an adapter, at most 512.")
    max_lora_bytes: int = _lora(2**30, "Memory for the weights of all adapters.")
    keep_tokens: bool = _cache(
        True,
        "Keep the tokens of earlier answers as they were generated; off, every prompt is "
        "tokenized as a whole.",
        "--keep-tokens/--no-keep-tokens",
    )

    def settings(self, model: str, **vllm: Any) -> dict[str, Any]:
        """Return the keywords of ``AsyncLLM``, checked as far as possible without the model.

        Args:
            model: As given.
            **vllm: Settings of vLLM's that have no option of their own here.

        Raises:
            ConfigError: A setting is out of range, or two contradict each other.
        """
        settings = {field.name: getattr(self, field.name) for field in fields(self)}
        if (limits := settings.get("limit_mm_per_prompt")) is not None:
            settings["limit_mm_per_prompt"] = _read_json("limit_mm_per_prompt", limits)
            settings["allowed_media_domains"] = settings["allowed_media_domains"] or ()
        for name in ("kv_cache_memory", "kv_host_bytes", "kv_disk_bytes", "kv_disk_bytes_per_day"):
            if isinstance(text := settings.get(name), str):
                settings[name] = read_bytes(name, text)
        if self.kv_cache_memory is None:
            del settings["kv_cache_memory"]
        EngineConfig.of(model, settings | vllm)
        return settings


@dataclass(frozen=True)
class ServedEngineOptions(EngineOptions):
    """Settings of an engine that serves concurrent requests."""

    max_num_batched_tokens: int = _scheduling(
        2048, "Maximum tokens computed per step; longer prompts are chunked."
    )
    max_chunk_tokens: int | None = _scheduling(
        None, "Maximum tokens of one prompt per step; else as many as max_step_ms allows."
    )
    max_step_ms: int = _scheduling(
        250, "Milliseconds per step while others wait, unless that wastes a tenth of the speed."
    )
    max_num_seqs: int = _scheduling(256, "Maximum number of running sequences.")
    max_logprobs: int = _scheduling(
        20, "Maximum alternatives per token in log-probabilities; -1 is the whole vocabulary."
    )
    stream_interval: int = _scheduling(
        1, "Tokens per chunk of a stream; more cost less time around the model."
    )
    order: str = _scheduling(
        "shortest_first",
        "Waiting order: shortest_first, fcfs, longest_prefix, depth_first or fair_share.",
    )
    max_overtakes: int = _scheduling(64, "How often a request may be overtaken, except with fcfs.")
    free_order: str = _caching(
        "unused_first", "Which free block is taken first: unused_first or classic."
    )
    eviction_policy: str = _caching("reuse_hazard", "Eviction policy.")
    digest: str = _caching("sha256", "Digest of the hash index: sha256 or xxh3_128.")
    seal_tails: bool = _caching(
        True,
        "Keep the last, partial block of an ended sequence.",
        "--seal-tails/--no-seal-tails",
    )
    keep_explanations: int = _caching(1000, "Sequences remembered to explain misses; 0 is none.")
    keep_texts_bytes: int = _caching(
        64 * 2**20, "Memory for known texts and their tokens, for all tenants."
    )
    ledger_bytes: int = _caching(
        64 * 2**20, "Memory for written turns that later prompts continue, for all tenants."
    )
    keep_reasoning: str = _caching(
        "template",
        "Reasoning of earlier turns: template drops it where the chat template does; always keeps "
        "it.",
    )
    ghost_blocks: int | None = _caching(
        None,
        "Maximum blocks of the caches that estimate other sizes and policies; 0 is none.",
    )
    ghost_share: float = _caching(0.01, "Processor time for them, as a share of the cache's.")
    audit_share: float = _caching(
        0.0, "Share of hits that are recomputed when idle and compared bit by bit."
    )
    audit_quarantine: bool = _caching(
        True,
        "Remove a prefix from the cache if an audit finds it wrong.",
        "--audit-quarantine/--no-quarantine",
    )
    kv_host_bytes: str | None = _tiers(
        None, "Host memory for prefixes that the pool of a GPU evicts, such as 32GiB."
    )
    kv_disk: str | None = _tiers(
        None, "Folder for prefixes on disk, which survive eviction and restarts."
    )
    kv_disk_bytes: str = _tiers("16GiB", "Maximum size of that folder.")
    kv_disk_bytes_per_day: str | None = _tiers(
        None,
        "Maximum written to it per day, such as 200GiB; else unlimited.",
    )
    kv_remote: str | None = _tiers(
        None, "Server for prefixes shared by several engines, such as redis://HOST:6379/0."
    )
    kv_sealed: bool | None = _tiers(
        None,
        "Encrypt with a key per tenant; else where there are keys, see --keys.",
        "--kv-sealed/--no-kv-sealed",
    )
    kv_secret_file: str | None = _tiers(
        None, "File of 16 random bytes or more, the same for all engines of a --kv-remote."
    )
    keep_event_batches: int | None = _events(
        None, "Batches of KV events kept for consumers that missed some."
    )
    kv_events_endpoint: str | None = _events(
        None, "Publish KV events there, such as tcp://127.0.0.1:5557; they contain token ids."
    )
    kv_events_replay_endpoint: str | None = _events(None, "Replay missed KV events there.")
    kv_events_topic: str = _events("", "First frame of every message with KV events.")
    limit_mm_per_prompt: str = _images(
        "{}", """Maximum images per prompt, as '{"image": 4}'; 0 serves only text."""
    )
    mm_encoder_cache_bytes: int = _images(
        256 * 2**20, "Memory for cached outputs of the image encoder."
    )
    max_image_pixels: int = _images(2**25, "Maximum pixels of an image.")
    max_prompt_pixels: int = _images(2**26, "Maximum pixels of a prompt's images together.")
    max_image_bytes: int = _images(20 * 2**20, "Maximum bytes of an image file.")
    media_timeout_s: float = _images(5.0, "Seconds to fetch an image, redirects included.")
    allowed_local_media_path: str = _images(
        "", "Directory below which file:// URLs may be read; else none."
    )
    allowed_media_domains: list[str] | None = _images(
        None, "Host that images may be fetched from; may be repeated, * is every public one."
    )
    seed: int = _scheduling(0, "Seed of the generator of seeds, for requests without one.")


def _read_json(name: str, text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{name}={text!r}: must be JSON ({error})") from error


@dataclass(frozen=True)
class SamplingOptions:
    """How the next token is chosen, as ``SamplingParams`` names it."""

    max_tokens: int = _sampling(200, "Maximum tokens to generate.")
    temperature: float = _sampling(
        0.8, "0 is greedy; higher is more random.", "--temperature", "-t"
    )
    top_p: float = _sampling(
        1.0, "Sample from the likeliest tokens that together have this probability; 1 is off."
    )
    top_k: int = _sampling(0, "Sample from this many of the likeliest tokens; 0 is off.")
    min_p: float = _sampling(
        0.0, "Drop tokens less likely than this share of the likeliest; 0 is off."
    )
    presence_penalty: float = _sampling(
        0.0, "Lower the logit of every token generated so far, once."
    )
    frequency_penalty: float = _sampling(0.0, "Lower it for each time that it was generated.")
    repetition_penalty: float = _sampling(
        1.0, "Divide logits of tokens seen so far, prompt included; 1 is off."
    )
    seed: int | None = _sampling(None, "The same seed gives the same text.")
    stop: list[str] | None = _sampling(
        None, "Stop before this text; may be repeated. In most shells $'\\n' is a line break."
    )

    def params(self, stop: Sequence[str] = (), **more: Any) -> SamplingParams:
        """Return the parameters, with default stop strings and those that one command adds.

        Raises:
            InvalidSamplingParams: One is out of range.
        """
        given = {field.name: getattr(self, field.name) for field in fields(self)}
        return SamplingParams(**{**given, "stop": self.stop or tuple(stop), **more})
