"""Which settings of an engine and of sampling do commands share?

Ranges are checked where they are known: by ``SamplingParams`` and ``EngineConfig``, before
anything is loaded.
"""

from typing import Annotated, Any

import typer

from ostinato.cli._quantities import read_bytes
from ostinato.engine.config import EngineConfig

_CACHE = "Model and cache"
_SAMPLING = "Sampling"
_ENGINE = "Engine"

Model = Annotated[
    str,
    typer.Option(
        "--model",
        "-m",
        help="The embedded model, a checkpoint directory, or a name on the Hugging Face hub.",
        rich_help_panel=_CACHE,
    ),
]
Dtype = Annotated[
    str,
    typer.Option(
        help="In which to compute: float32, bfloat16, float16 or float64; auto is the model's own.",
        rich_help_panel=_CACHE,
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
Caching = Annotated[
    bool,
    typer.Option("--cache/--no-cache", help="Keep and reuse prefixes.", rich_help_panel=_CACHE),
]

KVCacheDtype = Annotated[
    str,
    typer.Option(
        help="In which keys and values are kept; auto is the model's own.",
        rich_help_panel=_ENGINE,
    ),
]
Device = Annotated[
    str,
    typer.Option(
        help="Where to compute, as torch names it.",
        rich_help_panel=_ENGINE,
    ),
]
Attention = Annotated[
    str,
    typer.Option(
        help="Who computes attention: native, torch, or auto, the native library where it can.",
        rich_help_panel=_ENGINE,
    ),
]
Forward = Annotated[
    str,
    typer.Option(
        help="How steps are computed on a CPU: auto, packed or plain.",
        rich_help_panel=_ENGINE,
    ),
]
MaxNumBatchedTokens = Annotated[
    int,
    typer.Option(
        help="Most tokens that one step computes; longer prompts come in chunks.",
        rich_help_panel=_ENGINE,
    ),
]
MaxChunkTokens = Annotated[
    int | None,
    typer.Option(
        help="Most tokens of one prompt in a step; else it may take all of them.",
        rich_help_panel=_ENGINE,
    ),
]
MaxNumSeqs = Annotated[
    int,
    typer.Option(
        help="Most sequences that run at once.",
        rich_help_panel=_ENGINE,
    ),
]
Order = Annotated[
    str,
    typer.Option(
        help="Who is next: fcfs, longest_prefix, depth_first or fair_share.",
        rich_help_panel=_ENGINE,
    ),
]
MaxOvertakes = Annotated[
    int,
    typer.Option(
        help="How often a request may be overtaken, except with fcfs.",
        rich_help_panel=_ENGINE,
    ),
]
FreeOrder = Annotated[
    str,
    typer.Option(
        help="Which free block is taken first: scratch_first or classic.",
        rich_help_panel=_ENGINE,
    ),
]
EvictionPolicy = Annotated[
    str,
    typer.Option(
        help="Which cached block is worth least.",
        rich_help_panel=_ENGINE,
    ),
]
Digest = Annotated[
    str,
    typer.Option(
        help="Of the hash index: sha256 or xxh3_128.",
        rich_help_panel=_ENGINE,
    ),
]
SealTails = Annotated[
    bool,
    typer.Option(
        "--seal-tails/--no-seal-tails",
        help="Keep the last, partial block of an ended sequence.",
        rich_help_panel=_ENGINE,
    ),
]
KeepEventBatches = Annotated[
    int | None,
    typer.Option(
        help="Batches of KV events kept for those who missed some.",
        rich_help_panel=_ENGINE,
    ),
]
KVEventsEndpoint = Annotated[
    str | None,
    typer.Option(
        help="Publish KV events there, such as tcp://127.0.0.1:5557; they carry token ids.",
        rich_help_panel=_ENGINE,
    ),
]
KVEventsReplayEndpoint = Annotated[
    str | None,
    typer.Option(
        help="Answer there who missed some.",
        rich_help_panel=_ENGINE,
    ),
]
KVEventsTopic = Annotated[
    str,
    typer.Option(
        help="First frame of every message with KV events.",
        rich_help_panel=_ENGINE,
    ),
]
EngineSeed = Annotated[
    int,
    typer.Option(
        help="Of the seeds of requests that bring none.",
        rich_help_panel=_ENGINE,
    ),
]

MaxTokens = Annotated[int, typer.Option(help="Most tokens to generate.", rich_help_panel=_SAMPLING)]
Temperature = Annotated[
    float,
    typer.Option(
        "--temperature",
        "-t",
        help="0 always takes the likeliest token; higher is bolder.",
        rich_help_panel=_SAMPLING,
    ),
]
TopP = Annotated[
    float,
    typer.Option(
        help="Draw from the likeliest tokens that together have this probability; 1 is off.",
        rich_help_panel=_SAMPLING,
    ),
]
TopK = Annotated[
    int,
    typer.Option(
        help="Draw from this many of the likeliest tokens; 0 is off.", rich_help_panel=_SAMPLING
    ),
]
MinP = Annotated[
    float,
    typer.Option(
        help="Drop tokens less likely than this share of the likeliest; 0 is off.",
        rich_help_panel=_SAMPLING,
    ),
]
PresencePenalty = Annotated[
    float,
    typer.Option(
        help="Lower the logit of every token generated so far, once.", rich_help_panel=_SAMPLING
    ),
]
FrequencyPenalty = Annotated[
    float,
    typer.Option(help="Lower it for each time that it was generated.", rich_help_panel=_SAMPLING),
]
RepetitionPenalty = Annotated[
    float,
    typer.Option(
        help="Divide logits of tokens seen so far, prompt included; 1 is off.",
        rich_help_panel=_SAMPLING,
    ),
]
Seed = Annotated[
    int | None,
    typer.Option(help="The same seed gives the same text.", rich_help_panel=_SAMPLING),
]
Stop = Annotated[
    list[str] | None,
    typer.Option(
        help="Stop before this text; may be repeated. In most shells $'\\n' is a line break.",
        rich_help_panel=_SAMPLING,
    ),
]
IgnoreEos = Annotated[
    bool,
    typer.Option(
        "--ignore-eos",
        help="Go on after the model says that the text has ended.",
        rich_help_panel=_SAMPLING,
    ),
]


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
