"""``ostinato serve``: serves a model over HTTP."""

import sys
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

import ostinato
from ostinato.cli.keys import keys_file_of, note_on_callers
from ostinato.cli.options import engine_options as options
from ostinato.cli.options.option_groups import option
from ostinato.cli.options.setting_options import SettingOptions
from ostinato.engine.settings.config import EngineConfig
from ostinato.engine.settings.settings import DEFAULT_MODEL
from ostinato.plugins.explainer import check_explainer
from ostinato.server.config import SERVER, ServerConfig

_server = partial(option, panel=SERVER)


@dataclass(frozen=True)
class ServeOptions:
    """What is served at the start, besides the settings."""

    api_key: str | None = _server(None, envvar="OSTINATO_API_KEY")
    """One key that every caller sends, in place of --keys-file."""
    prewarm: str | None = _server(None)
    """File of prompts to compute before the first request, one JSON object per line."""
    lora_modules: list[str] | None = _server(None)
    """Serve a LoRA adapter under its own model name: NAME=DIRECTORY; may be repeated."""


def run(
    model: Annotated[
        str,
        typer.Argument(help="A model's name, a directory, a GGUF file, or a name on the hub."),
    ] = DEFAULT_MODEL,
    *,
    server: Annotated[dict[str, Any], SettingOptions(ServerConfig)],
    more: ServeOptions,
    engine: options.ServedEngineOptions,
) -> None:
    """Serve a model over HTTP, to clients of OpenAI's API.

    Without keys it only serves this machine. SIGTERM or Ctrl-C lets running requests finish; a
    second one stops them.

    Try: ostinato serve tiny-shakespeare
    """
    ostinato.announce_compilation(sys.stderr)
    with keys_file_of(server.get("keys_file"), more.api_key) as keys_file:
        config = ServerConfig(**{"model_names": (model,)} | server | {"keys_file": keys_file})
        adapters = options.named_paths("--lora-modules", more.lora_modules or [])
        if adapters:
            engine["enable_lora"] = True
        if keys_file is not None:
            engine.setdefault("kv_sealed", True)
        EngineConfig.of(model, engine)
        callers = note_on_callers(server.get("keys_file"), more.api_key)
        if config.explainer is not None:
            check_explainer(config.explainer)
        _serve(model, config, engine, _Start(adapters, more.prewarm, callers))


@dataclass(frozen=True, slots=True)
class _Start:
    """What a server does before its first request."""

    adapters: dict[str, str]  # folders by name
    prewarm: str | None
    callers: str  # who may call, in words


def _serve(model: str, config: ServerConfig, engine: dict[str, Any], start: _Start) -> None:
    """Serve a model until a signal."""
    from ostinato.server.admin.prewarming import read_prewarm_file
    from ostinato.server.lifecycle import (
        listen,
        load_adapters,
        open_state,
        run_server,
        warm_up,
    )

    prompts = [] if start.prewarm is None else read_prewarm_file(start.prewarm)
    with listen(config) as listener:
        with Console(stderr=True).status(f"Loading {model} ..."):
            state = open_state(model, engine, config)
            load_adapters(state, start.adapters)
            warm_up(state, prompts)
        loaded = state.llm.engine
        notes = [
            f"Computing in {loaded.compute_path}.",
            f"Requests that do not say sample with {loaded.defaults}.",
            start.callers,
        ]
        run_server(state, listener, lambda address: _announce(model, address, notes))


def _announce(model: str, address: str, notes: list[str]) -> None:
    """Print the address, and notes such as the compute path."""
    console = Console(stderr=True, soft_wrap=True)
    line = Text("Serving ").append(model, style="bold").append(" on ")
    console.print(line.append(f"{address}/v1", style="bold"))
    for note in notes:
        console.print(note, style="dim", markup=False, highlight=False)
