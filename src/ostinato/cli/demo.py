"""``ostinato demo``: shows what prefix caching does, in figures measured on the spot.

Four small tests after the article "Adding Prefix Caching to NanoGPT", then a thousand calls with
one system prompt, without a cache and with one, on the model inside the package.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
from rich.table import Table
from rich.text import Text

from ostinato.cli.demonstration.demo_examples import Outcome, draw_examples, run_examples
from ostinato.cli.demonstration.demo_waves import (
    MAX_CALLS,
    OUTPUT_TOKENS,
    Calls,
    Wave,
    calls,
    calls_in_words,
    first_tokens,
    run_wave,
)
from ostinato.cli.options import engine_options as options
from ostinato.cli.options.option_groups import option
from ostinato.cli.output.demo_tables import Figures, as_json, calls_table, first_token_table, notes
from ostinato.cli.output.tables import print_json, progress_at
from ostinato.core.errors import ConfigError
from ostinato.engine.settings.config import EngineConfig
from ostinato.engine.settings.settings import DEFAULT_MODEL
from ostinato.lab.size.quantities import count, write_seconds

if TYPE_CHECKING:
    from ostinato.engine.loop.engine import Engine

_WIDEST = 100
"""Maximum width of prose, in columns."""

_OPENING = (
    "\nA prefix that prompts share need not be computed twice: the keys and values of its tokens "
    "are cached in blocks and reused.\n\n"
    "This takes less than a minute, on a small model of Shakespeare's plays whose tokens are "
    "letters. Every figure below is measured now.\n"
)
_NEXT = {
    "ostinato models get smollm2": "fetch a real model, for ostinato chat smollm2",
    "ostinato chat": "chat with it; each turn prints what it reused",
    'ostinato generate "ROMEO:"': "continue a text, with any model",
    "ostinato savings --help": "the same calculation for your own prompts",
    f"ostinato size {DEFAULT_MODEL}": "the size of a model's cache in bytes",
    "ostinato labs": "build such a cache yourself, in eight labs",
    "ostinato demo --index hash": "this demo with other settings",
}


def run(
    num_calls: int = option(1000, "Calls with one system prompt.", "--calls", "-n"),
    model: options.Model = DEFAULT_MODEL,
    block_size: int = options.engine_option("block_size"),
    index: str = options.engine_option("index"),
    patience: float = option(
        20.0, "Time limit of the run without a cache, whose time is then extrapolated."
    ),
    record: Path | None = option(
        None,
        "New file to record the cached calls to, for 'ostinato simulate': times, "
        "lengths and pseudonyms, no content.",
        dir_okay=False,
    ),
    as_json_: bool = option(False, "Print the results as JSON only.", "--json"),
) -> None:
    """Show in a minute what prefix caching does: start here.

    Runs on the small model inside the package, without a download. Four tests of a few letters,
    then 1,000 calls that share a system prompt of 512 tokens: without a cache, on an empty cache,
    and once more. At the end a table of tokens computed and saved, and of the time to the first
    token. With --model smollm2, or another, the calls are questions in words.
    """
    _check(model, num_calls, block_size, index, patience)
    _check_record(record)
    console = _console(as_json_)
    console.print(_OPENING)
    results = _small_tests(console, index)
    plain, cached = _engines(console, model, block_size, index)
    with _recording(console, cached, record):
        calls = _calls(model, num_calls, cached)
        figures = _many_calls(console, plain, cached, calls, patience)
    if as_json_:
        print_json(as_json(results, figures))
    _show_next(console)


def _check(model: str, num_calls: int, block_size: int, index: str, patience: float) -> None:
    """Check the options before anything is loaded."""
    if not 2 <= num_calls <= MAX_CALLS:
        raise ConfigError(f"calls={num_calls}: must be from 2 to {MAX_CALLS:,}")
    if not patience >= 0:  # nor NaN
        raise ConfigError(f"patience={patience:g}: must be a number of seconds, at least 0")
    EngineConfig.of(model, {"block_size": block_size, "index": index})
    from ostinato.runner.checkpoints.model_resolver import resolve_model

    resolve_model(model)


def _check_record(path: Path | None) -> None:
    """Check the path of a recording before anything is shown."""
    if path is None:
        return
    if path.exists():
        raise ConfigError(f"record={path}: it exists already, and a trace never overwrites a file")
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"record={path}: there is no such folder; choose another path")


def _console(quiet: bool) -> Console:
    """Return a console of limited width."""
    console = Console(quiet=quiet, highlight=False)
    console.width = min(console.width, _WIDEST)
    return console


def _small_tests(console: Console, index: str) -> list[list[Outcome]]:
    """Run the four tests and show them."""
    with console.status("Loading the model ..."):
        results = run_examples(index)
    console.print(draw_examples(results))
    return results


@contextmanager
def _recording(console: Console, engine: "Engine", path: Path | None) -> Iterator[None]:
    """Record a trace of the engine, if a path is given."""
    if path is None:
        yield
        return
    from ostinato.engine.api.admin_api import AdminApi

    recording = AdminApi(engine)
    recording.start_recording(path)
    try:
        yield
    finally:
        recording.stop_recording()
    console.print("Recorded; replay it with:", Text(f"ostinato simulate {path}", style="cyan"))


def _calls(model: str, num_calls: int, engine: "Engine") -> Calls:
    """Return calls in the model's tokens."""
    if model == DEFAULT_MODEL:
        return Calls(calls(num_calls))
    tokenizer = engine.loaded.require_tokenizer()
    return calls_in_words(num_calls, lambda text: list(tokenizer(text)["input_ids"]))


def _many_calls(
    console: Console, plain: "Engine", cached: "Engine", calls: Calls, patience: float
) -> Figures:
    """Run the three waves of calls, with progress and results."""
    console.print(
        f"[bold]{count(len(calls.prompts), 'call')} at once[/]: {calls.system_tokens} tokens of "
        f"system prompt, {calls.suffix_tokens} of their own, {OUTPUT_TOKENS} of answer"
    )
    prompts = calls.prompts
    no_cache = _show_wave(console, "no cache", plain, prompts, patience)
    cold = _show_wave(console, "cold cache", cached, prompts)
    warm = _show_wave(console, "same again", cached, prompts)
    with console.status("Measuring the time to the first token ..."):
        cold_call, warm_call = first_tokens(cached, prompts[0], prompts[-1])
    figures = Figures(cached.cache.block_size, calls, no_cache, cold, warm, cold_call, warm_call)
    console.print(calls_table(figures), first_token_table(figures), sep="")
    for note in notes(figures):
        console.print(Text(note, style="dim"))
    return figures


def _engines(console: Console, model: str, block_size: int, index: str) -> "tuple[Engine, Engine]":
    """Load the model without and with a cache, in float32, which is fast on most machines."""
    from ostinato.engine.loop.engine import Engine

    settings = {"dtype": "float32", "block_size": block_size, "index": index}
    with console.status(f"Loading {model} ..."):
        return (
            Engine(EngineConfig.of(model, settings | {"enable_prefix_caching": False})),
            Engine(EngineConfig.of(model, settings)),
        )


def _show_wave(
    console: Console,
    name: str,
    engine: "Engine",
    prompts: list[str],
    limit_s: float | None = None,
) -> Wave:
    """Run a wave with a progress bar, and print one line at its end."""
    columns = (
        TextColumn("   {task.description:<10}"),
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        TextColumn("calls, {task.fields[computed]:,} tokens computed"),
    )
    with progress_at(console, *columns) as progress:
        task = progress.add_task(name, total=len(prompts), computed=0)

        def watch(answered: int, computed: int) -> None:
            progress.update(task, completed=answered, computed=computed)

        wave = run_wave(engine, prompts, watch, limit_s)
    console.print(_wave_line(name, wave))
    return wave


def _wave_line(name: str, wave: Wave) -> str:
    """Return a wave's line."""
    line = (
        f"   {name:<10}{write_seconds(wave.seconds):>9}{wave.computed_tokens:>12,} tokens computed"
    )
    if wave.complete:
        return line
    return f"{line}, {len(wave.answers):,} calls answered"


def _show_next(console: Console) -> None:
    """List the next commands to try."""
    table = Table.grid(padding=(0, 2))
    for command, purpose in _NEXT.items():
        table.add_row(Text(f"   {command}", style="cyan", overflow="fold"), purpose)
    console.print("\n[bold]What to try next[/]", table, sep="\n")
