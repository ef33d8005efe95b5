"""The page for those who come from vLLM says what the code does with each keyword."""

from collections.abc import Mapping
from dataclasses import fields

import pytest

from ostinato.engine.requests.sampling_params import SamplingParams
from ostinato.engine.settings.config import EngineConfig
from ostinato.engine.settings.keywords import Unsupported
from ostinato.engine.settings.vllm_keywords import (
    ALIASES,
    UNSUPPORTED_ARGUMENTS,
    UNSUPPORTED_CALLS,
    UNSUPPORTED_SAMPLING,
    UNSUPPORTED_SETTINGS,
)
from tests.docs.reading import ROOT

PAGE = (ROOT / "docs/vllm.md").read_text(encoding="utf-8")

SAME_SETTINGS = [
    "model", "revision", "tokenizer", "generation_config", "override_generation_config", "dtype",
    "kv_cache_dtype", "seed", "block_size", "max_model_len", "max_logprobs", "stream_interval",
    "max_num_seqs", "max_num_batched_tokens", "enable_prefix_caching", "enable_lora", "max_loras",
    "max_lora_rank",
]  # fmt: skip
NEW_SAMPLING = (
    "bad_words_ids",
    "truncate_prompt_tokens",
    "readout",
    "pooling",
    "beams",
    "drafts",
    "thinking_budget",
)
"""Parameters that vLLM's ``SamplingParams`` does not have, or no longer."""


def rows(table: Mapping[str, Unsupported]) -> str:
    """One row per reason, with all its keywords and the values that they may have."""
    by_reason: dict[str, list[str]] = {}
    for name, entry in table.items():
        accepted = ", ".join(f"`{one!r}`" for one in entry.harmless)
        by_reason.setdefault(entry.instead, []).append(f"`{name}` ({accepted})")
    return "\n".join(f"| {', '.join(names)} | {reason} |" for reason, names in by_reason.items())


TABLES = {
    "sampling": rows(UNSUPPORTED_SAMPLING),
    "settings": rows(UNSUPPORTED_SETTINGS),
    "arguments": rows(UNSUPPORTED_ARGUMENTS),
    "aliases": "\n".join(f"| `{alias}` | `{name}` |" for alias, name in ALIASES.items()),
    "calls": "\n".join(f"| `{name}` | {instead} |" for name, instead in UNSUPPORTED_CALLS.items()),
    "same settings": ", ".join(f"`{name}`" for name in SAME_SETTINGS),
    "same sampling": ", ".join(
        f"`{field.name}`" for field in fields(SamplingParams) if field.name not in NEW_SAMPLING
    ),
}


@pytest.mark.parametrize("table", TABLES)
def test_a_table_of_the_page_holds_what_the_code_holds(table: str):
    assert TABLES[table] in PAGE


def test_settings_that_are_said_to_be_the_same_are_there():
    assert set(SAME_SETTINGS) <= {field.name for field in fields(EngineConfig)}
