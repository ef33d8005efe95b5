"""Reads what requests sample with where they do not say: of the checkpoint and the operator.

``generation_config`` names the source, as in vLLM: ``auto`` is the checkpoint's own file, ``vllm``
reads none, anything else is another file or its directory. ``override_generation_config`` replaces
single values. A value that a request gives always wins.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ostinato.engine.requests.sampling_params import GenerationDefaults, SamplingParams
from ostinato.engine.settings.settings import EngineSettings
from ostinato.errors import ConfigError, InvalidSamplingParams
from ostinato.runner.checkpoints.generation_config import read_generation_config

_NAMES = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}
"""Names in a generation config, and in ``SamplingParams``; vLLM takes the same."""


def read_defaults(settings: EngineSettings, checkpoint: Path) -> GenerationDefaults:
    """Return the defaults that settings and checkpoint give.

    Args:
        settings: Of the engine.
        checkpoint: Directory or GGUF file of its model.

    Raises:
        ConfigError: The file is missing or broken, or a value is out of range.
    """
    content, source = _read(settings, checkpoint)
    override = settings.override_generation_config
    merged = {**content, **override}
    if override:
        source = " and ".join(filter(None, (source, "override_generation_config")))
    values = {ours: merged[name] for name, ours in _NAMES.items() if merged.get(name) is not None}
    try:
        SamplingParams(**values)
    except InvalidSamplingParams as error:
        raise ConfigError(
            f"{source} of {settings.model!r}: {error}; set override_generation_config, or "
            "generation_config='vllm'"
        ) from error
    own_ids = settings.generation_config in ("auto", "vllm") and "eos_token_id" not in override
    return GenerationDefaults(
        values,
        source if values else "",
        override.get("max_new_tokens"),
        None if own_ids else _ids(merged.get("eos_token_id"), source),
    )


def _read(settings: EngineSettings, checkpoint: Path) -> tuple[Mapping[str, Any], str]:
    name = settings.generation_config
    if name == "vllm":
        return {}, ""
    if name == "auto":
        return read_generation_config(checkpoint)
    path = Path(name).expanduser()
    content, source = read_generation_config(path)
    if not source:
        raise ConfigError(
            f"generation_config={str(name)!r}: must be 'auto', 'vllm', a generation_config.json or "
            "its directory"
        )
    return content, source


def _ids(ids: object, source: str) -> frozenset[int] | None:
    """Return one id or several; None if none is given."""
    if ids is None:
        return None
    listed = ids if isinstance(ids, list) else [ids]
    for token in listed:
        if not isinstance(token, int) or isinstance(token, bool) or token < 0:
            raise ConfigError(f"{source}: eos_token_id={ids!r:.80} must be an id, or a list of ids")
    return frozenset(listed)
