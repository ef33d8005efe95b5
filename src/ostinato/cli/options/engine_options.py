"""Options of the engine and of sampling that commands share.

Ranges are checked by ``EngineConfig`` and ``SamplingParams``, before anything is loaded.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Annotated, Any

import typer

from ostinato.cli.options.option_groups import option
from ostinato.cli.options.setting_options import SettingOptions, setting_option
from ostinato.core.errors import ConfigError
from ostinato.engine.requests.sampling_params import GenerationDefaults, SamplingParams
from ostinato.engine.settings.settings import COMPUTING, LORA, MODEL, EngineSettings

EngineOptions = Annotated[dict[str, Any], SettingOptions(EngineSettings, (MODEL, COMPUTING, LORA))]
"""Settings of any engine, as ``EngineConfig`` names them."""

ServedEngineOptions = Annotated[dict[str, Any], SettingOptions(EngineSettings)]
"""Settings of an engine that serves concurrent requests."""

engine_option = partial(setting_option, EngineSettings)
"""Returns the default of a parameter that is one setting of an engine."""

Model = Annotated[
    str,
    typer.Option(
        "--model",
        "-m",
        help="A model's name, a checkpoint's directory, a GGUF file, or a name on the hub.",
        rich_help_panel=MODEL,
    ),
]

_sampling = partial(option, panel="Sampling")


MAX_TOKENS = 200
TEMPERATURE = 0.8
"""What a terminal shows of a model that says nothing about generation."""


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
class SamplingOptions:
    """How the next token is chosen, as ``SamplingParams`` names it."""

    max_tokens: int | None = _sampling(
        None, f"Maximum tokens to generate; by default the model's own number, or {MAX_TOKENS}."
    )
    temperature: float | None = _sampling(
        None,
        "0 is greedy; higher is more random; by default the model's own temperature, or "
        f"{TEMPERATURE}.",
        "--temperature",
        "-t",
    )
    top_p: float | None = _sampling(None)
    """Sample from the likeliest tokens that together have this probability; 1 is off; by default
    the model's own, or 1.
    """
    top_k: int | None = _sampling(None)
    """Sample from this many of the likeliest tokens; 0 is off; by default the model's own, or 0."""
    min_p: float | None = _sampling(None)
    """Drop tokens less likely than this share of the likeliest; 0 is off; by default the model's
    own, or 0.
    """
    presence_penalty: float = _sampling(0.0)
    """Lower the logit of every token generated so far, once."""
    frequency_penalty: float = _sampling(0.0)
    """Lower it for each time that it was generated."""
    repetition_penalty: float | None = _sampling(None)
    """Divide logits of tokens seen so far, prompt included; 1 is off; by default the model's own,
    or 1.
    """
    seed: int | None = _sampling(None)
    """The same seed gives the same text."""
    stop: list[str] | None = _sampling(
        None, "Stop before this text; may be repeated. In most shells $'\\n' is a line break."
    )

    def params(self, stop: Sequence[str] = (), **more: Any) -> SamplingParams:
        """Return the parameters, with default stop strings and those that one command adds.

        What is not given has the model's own value once ``fill`` was called.

        Raises:
            InvalidSamplingParams: One is out of range.
        """
        return SamplingParams(**{**self._given, "stop": self.stop or tuple(stop), **more})

    def fill(self, params: SamplingParams, defaults: GenerationDefaults) -> SamplingParams:
        """Return parameters with the model's values for those that are not given, or this shell's.

        ``TEMPERATURE`` and ``MAX_TOKENS`` apply where neither says anything.
        """
        own = {"temperature": TEMPERATURE, "max_tokens": MAX_TOKENS, **defaults.values}
        if params.max_tokens is not None and "max_tokens" not in self._given:
            params = replace(params, max_tokens=None)
        return replace(defaults, values=own).fill(params, self._given)

    @property
    def _given(self) -> dict[str, Any]:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if value is not None}
