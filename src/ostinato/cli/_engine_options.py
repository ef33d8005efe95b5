"""Which settings of an engine do commands share?

Ranges are checked where they are known, by ``EngineConfig``, before anything is loaded.
"""

from dataclasses import dataclass, fields
from typing import Annotated, Any

import typer

from ostinato.engine.config import EngineConfig
from ostinato.lab.quantities import read_bytes

_CACHE = "Model and cache"
_COMPUTING = "Computing"
_SCHEDULING = "Scheduling"
_KEEPING = "What stays cached"
_EVENTS = "KV events"

Model = Annotated[
    str,
    typer.Option(
        "--model",
        "-m",
        help="A model's name, a checkpoint's directory, a GGUF file, or a name on the hub.",
        rich_help_panel=_CACHE,
    ),
]
Revision = Annotated[
    str | None,
    typer.Option(help="Branch, tag or commit of a model on the hub.", rich_help_panel=_CACHE),
]
OtherTokenizer = Annotated[
    str | None,
    typer.Option(
        "--tokenizer",
        help="Directory or hub name of another tokenizer than the model's own.",
        rich_help_panel=_CACHE,
    ),
]
Dtype = Annotated[
    str,
    typer.Option(
        help="In which to compute: float32, bfloat16, float16 or float64; auto is the model's own.",
        rich_help_panel=_COMPUTING,
    ),
]
Index = Annotated[
    str,
    typer.Option(
        help="How prefixes are found: radix walks a tree, hash looks up chained digests.",
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
KVCacheMemory = Annotated[
    str | None,
    typer.Option(help="Memory for the pool, such as 512MiB or 4GB.", rich_help_panel=_CACHE),
]
MaxModelLen = Annotated[
    int | None,
    typer.Option(
        help="Most tokens of prompt and answer together; else the model's own limit.",
        rich_help_panel=_CACHE,
    ),
]
MaxLogprobs = Annotated[
    int,
    typer.Option(
        help="Most alternatives per token in log-probabilities; -1 allows the whole vocabulary.",
        rich_help_panel=_SCHEDULING,
    ),
]
Caching = Annotated[
    bool,
    typer.Option("--cache/--no-cache", help="Keep and reuse prefixes.", rich_help_panel=_CACHE),
]

KVCacheDtype = Annotated[
    str,
    typer.Option(
        help="In which keys and values are kept; auto is the model's own.",
        rich_help_panel=_COMPUTING,
    ),
]
Device = Annotated[
    str,
    typer.Option(
        help="Where to compute, as torch names it.",
        rich_help_panel=_COMPUTING,
    ),
]
Attention = Annotated[
    str,
    typer.Option(
        help="Who computes attention: native, torch, or auto, the native library where it can.",
        rich_help_panel=_COMPUTING,
    ),
]
QuantizationOption = Annotated[
    str | None,
    typer.Option(
        "--quantization",
        help="Keep the weights of linear layers in fewer bits: int8 or int4.",
        rich_help_panel=_COMPUTING,
    ),
]
Forward = Annotated[
    str,
    typer.Option(
        help="How steps are computed on a CPU: auto, packed or plain.",
        rich_help_panel=_COMPUTING,
    ),
]
MaxNumBatchedTokens = Annotated[
    int,
    typer.Option(
        help="Most tokens that one step computes; longer prompts come in chunks.",
        rich_help_panel=_SCHEDULING,
    ),
]
MaxChunkTokens = Annotated[
    int | None,
    typer.Option(
        help="Most tokens of one prompt in a step; else it may take all of them.",
        rich_help_panel=_SCHEDULING,
    ),
]
MaxNumSeqs = Annotated[
    int,
    typer.Option(
        help="Most sequences that run at once.",
        rich_help_panel=_SCHEDULING,
    ),
]
Order = Annotated[
    str,
    typer.Option(
        help="Who is next: fcfs, longest_prefix, depth_first or fair_share.",
        rich_help_panel=_SCHEDULING,
    ),
]
MaxOvertakes = Annotated[
    int,
    typer.Option(
        help="How often a request may be overtaken, except with fcfs.",
        rich_help_panel=_SCHEDULING,
    ),
]
FreeOrder = Annotated[
    str,
    typer.Option(
        help="Which free block is taken first: scratch_first or classic.",
        rich_help_panel=_KEEPING,
    ),
]
EvictionPolicy = Annotated[
    str,
    typer.Option(
        help="Which cached block is worth least.",
        rich_help_panel=_KEEPING,
    ),
]
Digest = Annotated[
    str,
    typer.Option(
        help="Of the hash index: sha256 or xxh3_128.",
        rich_help_panel=_KEEPING,
    ),
]
SealTails = Annotated[
    bool,
    typer.Option(
        "--seal-tails/--no-seal-tails",
        help="Keep the last, partial block of an ended sequence.",
        rich_help_panel=_KEEPING,
    ),
]
ReadOnceWhen = Annotated[
    str,
    typer.Option(
        "--read-once",
        help="Whether a step reads blocks that its sequences share once for all of them: auto, "
        "where that is cheaper, always or never.",
        rich_help_panel=_COMPUTING,
    ),
]
KeepTokens = Annotated[
    bool,
    typer.Option(
        "--keep-tokens/--no-keep-tokens",
        help="Whether earlier answers keep the tokens that were generated; off, every prompt is "
        "tokenized as a whole.",
        rich_help_panel=_CACHE,
    ),
]
KeepTextsBytes = Annotated[
    int,
    typer.Option(
        min=0,
        help="Memory for texts with their tokens, of all tenants together.",
        rich_help_panel=_KEEPING,
    ),
]
KeepExplanations = Annotated[
    int,
    typer.Option(
        help="Sequences that are remembered so that misses can be explained; 0 is none.",
        rich_help_panel=_KEEPING,
    ),
]
GhostBlocks = Annotated[
    int | None,
    typer.Option(
        help="Most blocks of the small caches that estimate other sizes and policies; 0 is none.",
        rich_help_panel=_KEEPING,
    ),
]
GhostShare = Annotated[
    float,
    typer.Option(
        help="Processor time for them, as a share of what the cache takes.",
        rich_help_panel=_KEEPING,
    ),
]
KeepEventBatches = Annotated[
    int | None,
    typer.Option(
        help="Batches of KV events kept for those who missed some.",
        rich_help_panel=_EVENTS,
    ),
]
KVEventsEndpoint = Annotated[
    str | None,
    typer.Option(
        help="Publish KV events there, such as tcp://127.0.0.1:5557; they carry token ids.",
        rich_help_panel=_EVENTS,
    ),
]
KVEventsReplayEndpoint = Annotated[
    str | None,
    typer.Option(
        help="Answer there who missed some.",
        rich_help_panel=_EVENTS,
    ),
]
KVEventsTopic = Annotated[
    str,
    typer.Option(
        help="First frame of every message with KV events.",
        rich_help_panel=_EVENTS,
    ),
]
EngineSeed = Annotated[
    int,
    typer.Option(
        help="Of the seeds of requests that bring none.",
        rich_help_panel=_SCHEDULING,
    ),
]


@dataclass(frozen=True)
class EngineOptions:
    """Settings of any engine, as ``EngineConfig`` names them."""

    revision: Revision = None
    tokenizer: OtherTokenizer = None
    dtype: Dtype = "auto"
    kv_cache_dtype: KVCacheDtype = "auto"
    device: Device = "cpu"
    attention: Attention = "auto"
    forward: Forward = "auto"
    quantization: QuantizationOption = None
    read_once: ReadOnceWhen = "auto"
    index: Index = "radix"
    block_size: BlockSize = 16
    num_blocks: NumBlocks = None
    kv_cache_memory: KVCacheMemory = None
    max_model_len: MaxModelLen = None
    enable_prefix_caching: Caching = True
    keep_tokens: KeepTokens = True

    def settings(self, model: str) -> dict[str, Any]:
        """Return the keywords of ``AsyncLLM``, checked as far as that goes without the model.

        Args:
            model: For the check alone.

        Raises:
            ConfigError: A setting is out of range, or two contradict each other.
        """
        given = {field.name: getattr(self, field.name) for field in fields(self)}
        return engine_settings(model, given.pop("kv_cache_memory"), **given)


@dataclass(frozen=True)
class ServedEngineOptions(EngineOptions):
    """Settings of an engine that serves many."""

    max_num_batched_tokens: MaxNumBatchedTokens = 2048
    max_chunk_tokens: MaxChunkTokens = None
    max_num_seqs: MaxNumSeqs = 256
    max_logprobs: MaxLogprobs = 20
    order: Order = "fcfs"
    max_overtakes: MaxOvertakes = 64
    free_order: FreeOrder = "scratch_first"
    eviction_policy: EvictionPolicy = "reuse_hazard"
    digest: Digest = "sha256"
    seal_tails: SealTails = True
    keep_explanations: KeepExplanations = 1000
    keep_texts_bytes: KeepTextsBytes = 64 * 2**20
    ghost_blocks: GhostBlocks = None
    ghost_share: GhostShare = 0.01
    keep_event_batches: KeepEventBatches = None
    kv_events_endpoint: KVEventsEndpoint = None
    kv_events_replay_endpoint: KVEventsReplayEndpoint = None
    kv_events_topic: KVEventsTopic = ""
    seed: EngineSeed = 0


def engine_settings(model: str, kv_cache_memory: str | None, **settings: Any) -> dict[str, Any]:
    """Return the keywords of ``AsyncLLM``, checked as far as that goes without the model.

    Args:
        model: For the check alone.
        kv_cache_memory: An amount with a unit, as the user wrote it.
        **settings: As ``EngineConfig`` names them.

    Raises:
        ConfigError: A setting is out of range, or two contradict each other.
    """
    if kv_cache_memory is not None:
        settings["kv_cache_memory"] = read_bytes("kv_cache_memory", kv_cache_memory)
    EngineConfig.of(model, settings)
    return settings
