"""``ostinato explain``: why a prompt missed."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated, cast
from urllib.parse import quote

import typer
from rich.console import Console
from rich.text import Text

from ostinato.cli._admin_client import AdminClient, AdministrationFailed
from ostinato.cli.cache import URL
from ostinato.cli.options import engine_options as options
from ostinato.cli.options.option_groups import option
from ostinato.cli.options.tokenizer import IgnoredFields, TokenizerModel, load_tokenizer
from ostinato.cli.options.trace_source import SkipBroken, list_broken
from ostinato.core.errors import ConfigError, RequestError
from ostinato.engine.settings.config import EngineConfig
from ostinato.engine.settings.settings import DEFAULT_MODEL
from ostinato.lab.log.request_log import LogOptions, iter_requests
from ostinato.lab.replay.explain_log import explain_log, explain_recording
from ostinato.lab.size.quantities import count
from ostinato.lab.traces.recording import read_recording
from ostinato.lab.traces.traces import is_recording
from ostinato.observe.explanation import Explanation, SpanOutcome
from ostinato.settings import IndexName, PrefixCacheConfig

_COLOURS = {
    SpanOutcome.HIT: "green",
    SpanOutcome.WAITED: "green",
    SpanOutcome.LOADED: "green",
    SpanOutcome.COPIED: "cyan",
    SpanOutcome.COMPUTED: "red",
}

_BLOCKS_OF_A_LOG = 65_536
"""Default number of blocks of the cache for a log: a million tokens."""

_LOGS = (".jsonl", ".ndjson", ".json", ".gz")
"""Suffixes of log files; other files are prompts."""

_SERVER = "A running server"

_LAST: list[str] = []
"""Explain only the last request of a log."""

_PSEUDONYMS = (
    "A recorded trace has pseudonyms instead of tokens, so it shows where prompts differ, but no "
    "text. Explain the requests themselves to see both sides."
)


def run(
    files: Annotated[
        list[Path] | None,
        typer.Argument(
            help="Text files, one prompt each; or one log (.jsonl, .json, .gz): requests to an "
            "OpenAI or Anthropic API, or a trace that an engine recorded.",
            show_default=False,
        ),
    ] = None,
    prompt: list[str] | None = option(None, "A prompt; may be repeated.", "--prompt", "-p"),
    request: list[str] | None = option(
        None,
        "Explain this request: in a log its line or number, otherwise the id of a running "
        "server's answer; may be repeated.",
        "--request",
        "-r",
    ),
    every: bool = option(False, "Explain every prompt, not only the last.", "--all", "-a"),
    as_json: bool = option(False, "Print explanations as JSON, one per line.", "--json"),
    model: TokenizerModel = None,
    index: str = options.engine_option("index"),
    block_size: int = options.engine_option("block_size"),
    num_blocks: int | None = options.engine_option("num_blocks"),
    skip_broken: SkipBroken = False,
    ignore: IgnoredFields = None,
    url: str = option(URL, "URL of the server.", panel=_SERVER, envvar="OSTINATO_URL"),
    key: str | None = option(
        None,
        "API key with which the request was sent.",
        panel=_SERVER,
        envvar=["OSTINATO_KEY", "OSTINATO_ADMIN_KEY"],
    ),
) -> None:
    """Explain why each part of a prompt hit or missed the cache.

    Prompts are run one after the other, and the last one is explained. For a log no model is run:
    its requests only go through the cache, and without --model a token is a word. For a
    running server, --request names one of its answers.

    Try: ostinato explain -p "One two three" -p "One too three"
    """
    files, texts, names, note = files or [], prompt or [], request or [], ""
    logs = [path for path in files if path.suffix in _LOGS]
    if not files and not texts and not names:
        raise ConfigError(
            "nothing to explain: give files, --prompt with a text, or --request with the id of a "
            "server's answer"
        )
    if logs and (len(files) > 1 or texts):
        raise ConfigError(f"{logs[0]} is a log: explain it without other files and prompts")
    if names and not logs and (files or texts):
        raise ConfigError(
            f"request={names[0]!r} is in a log or on a server: do not give prompts as well"
        )
    if logs:
        cache = PrefixCacheConfig(
            num_blocks or _BLOCKS_OF_A_LOG, block_size, index=cast(IndexName, index)
        )
        chosen = None if every else names or _LAST
        options_of_log = LogOptions("skip" if skip_broken else "refuse", ignore or ())
        explanations, note = _explain_log(logs[0], model, cache, chosen, options_of_log)
        every = True
    elif names:
        every, explanations = True, [_ask(name, AdminClient(url, key)) for name in names]
    else:
        model = model or DEFAULT_MODEL
        settings = {"index": index, "block_size": block_size, "num_blocks": num_blocks}
        EngineConfig.of(model, settings)
        explanations = _explain_prompts([*map(_read, files), *texts], model, settings)
    _print(explanations if every else explanations[-1:], as_json, note)


def _read(path: Path) -> str:
    """Return a file's text, without one line break at its end.

    Raises:
        RequestError: It cannot be read, or is not text.
    """
    try:
        return path.read_text(encoding="utf-8").removesuffix("\n")
    except (OSError, UnicodeError) as error:
        raise RequestError(f"{path}: {error}") from error


def _explain_prompts(
    prompts: list[str], model: str, settings: dict[str, object]
) -> list[Explanation]:
    """Run prompts one after the other."""
    from ostinato import LLM, SamplingParams

    one = SamplingParams(max_tokens=1, temperature=0)
    with Console(stderr=True).status("Running ..."), LLM(model, **settings) as llm:
        outputs = [llm.generate(text, one, use_tqdm=False)[0] for text in prompts]
        return [llm.explain(output, administrator=True) for output in outputs]


def _ask(name: str, server: AdminClient) -> Explanation:
    """Ask a running server.

    Raises:
        AdministrationFailed: The request is unknown, or another tenant's.
    """
    answer = server.call("GET", f"v1/explain/{quote(name, safe='')}")
    try:
        return Explanation.from_dict(answer)
    except ValueError as error:
        raise AdministrationFailed(
            f"{server.url} did not answer with an explanation: {error!r}"
        ) from error


def _explain_log(
    path: Path,
    model: str | None,
    cache: PrefixCacheConfig,
    requested: list[str] | None,
    read: LogOptions,
) -> tuple[list[Explanation], str]:
    """Run a log through the cache, or replay a recording; return explanations and a note.

    ``requested`` has lines or numbers of requests; it is empty for the last, and None for all.
    """
    if is_recording(path):
        recording = read_recording(path, read.on_broken)
        list_broken(recording.broken)
        by_name = {each.request_id: each for each in explain_recording(recording)}
        names = _chosen(requested, list(by_name), "request", path)
        return [by_name[name] for name in names], _PSEUDONYMS
    lines = {f"line {request.line}": request.line for request in iter_requests(path, read)}
    list_broken(read.broken)
    chosen = _chosen(requested, list(lines), "line", path)
    explanations = explain_log(
        iter_requests(path, replace(read, broken=[])),
        load_tokenizer(model),
        cache,
        {lines[name] for name in chosen},
    )
    with Console(stderr=True).status(f"Serving {count(len(lines), 'request')} ..."):
        by_name = {each.request_id: each for each in explanations}
    return [by_name[name] for name in chosen if name in by_name], ""  # empty prompts have none


def _chosen(requested: list[str] | None, known: list[str], kind: str, path: Path) -> list[str]:
    """Return the names of the requests to explain; by default the last.

    Raises:
        RequestError: There is no such request.
    """
    if not known:
        raise RequestError(f"{path}: none of its requests was admitted")
    names, all_names = known if requested is None else requested or known[-1:], set(known)
    chosen = [name if name in all_names else f"{kind} {name}" for name in names]
    for name, whole in zip(names, chosen, strict=True):
        if whole not in all_names:
            raise RequestError(f"request={name!r}: {path.name} has {known[0]} to {known[-1]}")
    return chosen


def _print(explanations: list[Explanation], as_json: bool, note: str) -> None:
    if as_json:
        for explanation in explanations:
            typer.echo(json.dumps(explanation.as_dict(), ensure_ascii=False))
        return
    console = Console(soft_wrap=True, highlight=False)
    for place, explanation in enumerate(explanations):
        if place:
            console.print()
        for line in _page(explanation):
            console.print(line)
    if note:
        Console(highlight=False).print("", note, sep="\n", style="dim")


def _page(explanation: Explanation) -> list[Text]:
    """Format an explanation for a terminal."""
    lines = [Text(explanation.title, style="bold"), Text()]
    width = len(str(explanation.num_tokens))
    for span in explanation.spans:
        tokens = f"{span.start:>{width}}..{span.stop - 1:<{width}}"
        outcome = (f"{span.outcome:<8}", _COLOURS[span.outcome])
        lines.append(Text.assemble(tokens, "  ", outcome, "  ", span.sentence))
    if explanation.difference is not None:
        nearest, prompt, caret = explanation.difference.lines
        lines += [Text(), Text(nearest), Text(prompt), Text(caret, style="bold red")]
    if explanation.notes:
        lines.append(Text())
        lines += [Text(note, style="dim") for note in explanation.notes]
    return lines
