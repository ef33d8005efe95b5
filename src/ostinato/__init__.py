"""Ostinato: an LLM inference engine in which no prefix is computed twice.

The packages that need torch are imported on first use, so that ``ostinato.core``,
``ostinato.cache`` and ``ostinato.sched`` can be embedded without it.
"""

import gc
import os
import sys
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from ostinato.core.sampling_params import Beams
    from ostinato.engine.api.async_llm import AsyncLLM
    from ostinato.engine.api.beam_api import BeamSearchOutput, BeamSearchParams
    from ostinato.engine.api.llm import LLM
    from ostinato.engine.grammar.structured_outputs import (
        StructuredOutputs,
        StructuredOutputsParams,
    )
    from ostinato.engine.grammar.thinking_budget import ThinkingBudget
    from ostinato.engine.loop.adapters import LoRARequest
    from ostinato.engine.requests.outputs import CompletionOutput, RequestOutput
    from ostinato.engine.requests.prompts import PromptType, TextPrompt, TokensPrompt
    from ostinato.engine.requests.sampling_params import RequestOutputKind, SamplingParams
    from ostinato.engine.scoring.choices import ChoiceOutput
    from ostinato.engine.scoring.outputs import (
        ClassificationRequestOutput,
        EmbeddingRequestOutput,
        ScoringRequestOutput,
    )
    from ostinato.engine.scoring.pooling_params import PoolingParams
    from ostinato.engine.settings.config import AsyncEngineArgs, EngineArgs
    from ostinato.observe.explanation import Explanation, MissReason, SpanOutcome
    from ostinato.settings import TenantShare
    from ostinato.tenants.terms import (
        ANTHROPIC_1H,
        ANTHROPIC_5M,
        OPENAI_24H,
        PINNED,
        EraseReceipt,
        LeaseReceipt,
        LeaseStatus,
        LeaseTerms,
    )

__version__ = "0.1.0"

_NAMES = {
    "core.sampling_params": ("Beams",),
    "engine.api.async_llm": ("AsyncLLM",),
    "engine.api.beam_api": ("BeamSearchOutput", "BeamSearchParams"),
    "engine.api.llm": ("LLM",),
    "engine.grammar.structured_outputs": ("StructuredOutputs", "StructuredOutputsParams"),
    "engine.grammar.thinking_budget": ("ThinkingBudget",),
    "engine.loop.adapters": ("LoRARequest",),
    "engine.requests.outputs": ("CompletionOutput", "RequestOutput"),
    "engine.requests.prompts": ("PromptType", "TextPrompt", "TokensPrompt"),
    "engine.requests.sampling_params": ("RequestOutputKind", "SamplingParams"),
    "engine.scoring.choices": ("ChoiceOutput",),
    "engine.scoring.outputs": (
        "ClassificationRequestOutput", "EmbeddingRequestOutput", "ScoringRequestOutput",
    ),
    "engine.scoring.pooling_params": ("PoolingParams",),
    "engine.settings.config": ("AsyncEngineArgs", "EngineArgs"),
    "observe.explanation": ("Explanation", "MissReason", "SpanOutcome"),
    "settings": ("TenantShare",),
    "tenants.terms": (
        "ANTHROPIC_1H", "ANTHROPIC_5M", "OPENAI_24H", "PINNED", "EraseReceipt", "LeaseReceipt",
        "LeaseStatus", "LeaseTerms",
    ),
}  # fmt: skip
_HOMES = {name: f"ostinato.{home}" for home, names in _NAMES.items() for name in names}

__all__ = [
    "ANTHROPIC_1H", "ANTHROPIC_5M", "LLM", "OPENAI_24H", "PINNED", "AsyncEngineArgs", "AsyncLLM",
    "BeamSearchOutput", "BeamSearchParams", "Beams", "ChoiceOutput",
    "ClassificationRequestOutput", "CompletionOutput", "EmbeddingRequestOutput",
    "EngineArgs", "EraseReceipt", "Explanation", "LeaseReceipt", "LeaseStatus", "LeaseTerms",
    "LoRARequest", "MissReason", "PoolingParams", "PromptType", "RequestOutput",
    "RequestOutputKind", "SamplingParams", "ScoringRequestOutput", "SpanOutcome",
    "StructuredOutputs", "StructuredOutputsParams", "TenantShare", "TextPrompt", "ThinkingBudget",
    "TokensPrompt", "__version__",
]  # fmt: skip


SPINS = "2000"
"""Rounds that an OpenMP thread spins before it sleeps. By default it spins for milliseconds, on the
core that Python and the event loop need between two steps: see docs/experiments.md."""


def limit_spinning(environment: MutableMapping[str, str]) -> None:
    """Let OpenMP's threads sleep soon, unless the environment says how they wait.

    OpenMP reads this when torch is imported, and only then.
    """
    if "OMP_WAIT_POLICY" not in environment:
        environment.setdefault("GOMP_SPINCOUNT", SPINS)


def announce_compilation(stderr: TextIO) -> None:
    """Say in a terminal that Python has yet to compile torch, which takes many seconds."""
    if "torch" in sys.modules or not stderr.isatty():
        return
    spec = find_spec("torch")
    if spec is not None and spec.cached is not None and not Path(spec.cached).exists():
        line = "ostinato: first start: Python compiles torch and transformers, for some 10 seconds"
        print(line, file=stderr, flush=True)


@contextmanager
def paused_collections() -> Iterator[None]:
    """Import without garbage collections, each of which walks all of torch and frees nothing.

    What was imported is then as old as can be, or the first collection would walk all of it.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if not gc.get_freeze_count():  # else frozen objects of the embedder would thaw
            gc.freeze()
            gc.unfreeze()
        if was_enabled:
            gc.enable()


def __getattr__(name: str) -> Any:
    """Import a public name on first use; torch's threads then sleep soon when they have no work."""
    if name not in _HOMES:
        raise AttributeError(f"module 'ostinato' has no attribute {name!r}")
    limit_spinning(os.environ)
    announce_compilation(sys.stderr)
    try:
        with paused_collections():
            home = import_module(_HOMES[name])
    except ModuleNotFoundError as error:
        if find_spec("ostinato.engine") is None:
            message = f"ostinato-core has no {name}: pip install ostinato, in place of it"
            raise ImportError(message) from error
        raise
    return getattr(home, name)


def __dir__() -> list[str]:
    """List what is public, loaded or not."""
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
