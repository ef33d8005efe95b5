"""``ostinato lint``: what breaks the prefixes of these requests?"""

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from ostinato.cli import _engine_options as options
from ostinato.cli._quantities import count
from ostinato.cli._tokenizer import ModelOfTokens, load_tokenizer
from ostinato.cli._trace_source import SkipBroken, name_broken, progress_bar
from ostinato.lab.lint import Finding, LintReport, lint
from ostinato.lab.request_log import read_request_log


def run(
    requests: Annotated[
        Path,
        typer.Argument(
            help="Requests to an OpenAI-compatible server, one JSON object per line.",
            show_default=False,
        ),
    ],
    model: ModelOfTokens = None,
    block_size: options.BlockSize = 16,
    skip_broken: SkipBroken = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
    strict: Annotated[
        bool, typer.Option("--strict", help="Leave with exit code 1 if there is a finding.")
    ] = False,
) -> None:
    """Find what breaks prefixes early, and what mending it would save.

    Requests are grouped by template; each remedy is tried on the real cache, and what saves
    nothing is not reported. No model is run: of --model only the tokenizer is loaded. Without it,
    a token is a word or a piece of one.
    """
    log = read_request_log(requests, "skip" if skip_broken else "refuse")
    name_broken(log.broken)
    tokenizer = load_tokenizer(model)
    with progress_bar("Requests, grouped and mended", 2 * len(log.requests)) as advance:
        report = lint(log.requests, tokenizer, block_size, advance)
    if as_json:
        typer.echo(json.dumps(report.as_dict(), indent=2, ensure_ascii=False))
    else:
        _print(report, model)
    if strict and report.findings:
        raise typer.Exit(1)


def _print(report: LintReport, model: str | None) -> None:
    console = Console(highlight=False)
    console.print(Text(_title(report), style="bold"))
    for place, finding in enumerate(report.findings, 1):
        console.print()
        for line_ in _lines(place, finding, report):
            console.print(line_)
    console.print()
    console.print(Text(_end(report)))
    whose = "words and pieces of words" if model is None else f"those of {model}"
    console.print(Text(f"Tokens are {whose}.", style="dim"))


def _title(report: LintReport) -> str:
    requests = f"{count(report.num_requests, 'request')}, {count(report.num_groups, 'template')}"
    if not report.findings:
        return f"{requests}: nothing breaks their prefixes early."
    return f"{requests}: {count(len(report.findings), 'finding')}."


def _lines(place: int, finding: Finding, report: LintReport) -> list[Text]:
    """Lay a finding out."""
    saved = f"{finding.saved_tokens_per_hour:,.0f} tokens per hour"
    if not report.has_times:
        saved = f"{finding.saved_tokens:,} tokens"
    lines = [
        Text.assemble(f"{place}. ", (finding.kind, "bold red"), f" costs {saved}"),
        Text(f"   in {count(finding.num_requests, 'request')}: {finding.group}"),
    ]
    if finding.examples:
        shown = ", ".join(repr(example[:40]) for example in finding.examples)
        lines.append(Text(f"   {_place(finding)}: {shown}"))
    behind = f", with {' and '.join(finding.behind)} mended" if finding.behind else ""
    ratios = f"{finding.before:.1%} -> {finding.after:.1%}"
    lines += [
        Text(f"   hit ratio {ratios}{behind}", style="green"),
        Text(f"   {finding.advice}", style="cyan"),
    ]
    return lines


def _place(finding: Finding) -> str:
    """Say where it stands."""
    if finding.kind.startswith("message_"):
        return f"in {finding.where}"
    return f"behind {finding.where[-40:]!r}" if finding.where else "at the beginning"


def _end(report: LintReport) -> str:
    """Sum up what the replays found."""
    if not report.findings:
        hits = 1 - report.computed_tokens / max(1, report.prompt_tokens)
        return f"{hits:.1%} of {report.prompt_tokens:,} prompt tokens hit, replayed one by one."
    return (
        f"Replayed one by one, {report.computed_tokens:,} of {report.prompt_tokens:,} prompt "
        f"tokens are computed; with all findings mended, {report.mended_tokens:,}."
    )
