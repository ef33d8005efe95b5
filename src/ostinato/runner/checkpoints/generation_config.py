"""Reads a checkpoint's own sampling: ``generation_config.json``, or keys of a GGUF file."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ostinato.errors import ConfigError
from ostinato.runner.checkpoints.fetched_models import published_sampling
from ostinato.runner.checkpoints.gguf_file import fields_of

GENERATION_FILE = "generation_config.json"

_GGUF_KEYS = {
    "general.sampling.temp": "temperature",
    "general.sampling.top_k": "top_k",
    "general.sampling.top_p": "top_p",
    "general.sampling.min_p": "min_p",
    "general.sampling.penalty_repeat": "repetition_penalty",
}
"""llama.cpp's keys of a GGUF file, and the names that transformers gives them."""


def read_generation_config(checkpoint: Path) -> tuple[Mapping[str, Any], str]:
    """Return what a checkpoint says about generation, and where it says so.

    Args:
        checkpoint: Directory with a ``generation_config.json``, which may be missing, that file
            itself, or a GGUF file.

    Returns:
        Values by the names of transformers' ``GenerationConfig``, and the name of their source;
        both are empty where nothing is said.

    Raises:
        ConfigError: The file is no JSON object.
    """
    if checkpoint.suffix == ".gguf":
        return _read_gguf(checkpoint)
    file = checkpoint if checkpoint.is_file() else checkpoint / GENERATION_FILE
    if not file.is_file():
        return {}, ""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(_refusal(file, f"is not valid JSON ({error})")) from error
    if not isinstance(content, dict):
        raise ConfigError(_refusal(file, "is not a JSON object"))
    return content, file.name


def _read_gguf(file: Path) -> tuple[Mapping[str, Any], str]:
    published = published_sampling(file)
    if published:
        return published, "the model's page"
    fields = fields_of(file)
    values = {
        name: fields[key].contents() for key, name in _GGUF_KEYS.items() if key in fields
    }  # fmt: skip
    return values, "general.sampling of the GGUF file" if values else ""


def _refusal(file: Path, problem: str) -> str:
    return f"{file} {problem}: mend it, or set generation_config='vllm', which does not read it"
