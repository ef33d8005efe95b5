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
