"""``ostinato lint``: finds what breaks the prefixes of requests."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated, get_args

import typer
from rich.console import Console
from rich.text import Text

from ostinato.cli.options import engine_options as options
from ostinato.cli.options.option_groups import option
from ostinato.cli.options.tokenizer import (
    IgnoredFields,
    TokenizerModel,
    load_tokenizer,
    model_tokenizer,
)
from ostinato.cli.options.trace_source import SkipBroken, list_broken
from ostinato.cli.output.tables import print_json, progress_bar
from ostinato.cli.output.template_table import print_template
from ostinato.core.errors import ConfigError
from ostinato.lab.lint.lint import Finding, LintReport, lint
from ostinato.lab.lint.slots import SlotKind, shortened
from ostinato.lab.log.request_log import LogOptions, read_request_log
from ostinato.lab.size.quantities import count, read_bytes

_FEW_HITS = 0.1
"""Hit ratio below which prompts share next to nothing."""


def run(
    requests: Annotated[
        Path | None,
        typer.Argument(
            help="Log of requests to an OpenAI or Anthropic API: JSON lines or a JSON array, "
            "also gzipped.",
            show_default=False,
        ),
    ] = None,
    template: str | None = option(
        None, "Check this model's chat template instead: which turns it rewrites.", metavar="MODEL"
    ),
    model: TokenizerModel = None,
    block_size: int = options.engine_option("block_size"),
    skip_broken: SkipBroken = False,
    ignore: IgnoredFields = None,
    max_text: str = option("64MiB", "Check only this much prompt text."),
    as_json: bool = option(False, "Print the findings as JSON.", "--json"),
    fix: bool = option(
        False,
        "Print rules for 'ostinato serve --stabilise' that set aside the times, dates, ids and "
        "counters among the findings.",
        "--fix",
    ),
    strict: bool = option(False, "Exit with code 1 if anything is found.", "--strict"),
) -> None:
    """Find what breaks prefixes early, and what fixing it would save.

    Requests are grouped by template; each fix is tried on the real cache, and reported only if it
    saves tokens. No model is run: only the tokenizer of --model is loaded. Without it, a token is a
    word or a piece of one.

    --template reads no log: the chat template of a model renders synthetic dialogues, and each
    prompt is compared with the one before and its answer.
    """
    if (requests is None) == (template is None):
        raise ConfigError("requests: give a log of requests, or --template with a model")
    if template is not None:
        _check_template(template, as_json, strict)
        return
    assert requests is not None
    max_text_bytes = read_bytes("max_text", max_text)
    read = LogOptions("skip" if skip_broken else "refuse", ignore or ())
    log = read_request_log(requests, read, max_text_bytes)
    list_broken(log.broken)
    tokenizer = load_tokenizer(model)
    with progress_bar("Checking requests", 2 * len(log.requests)) as advance:
        report = lint(log.requests, tokenizer, block_size, advance)
    if log.is_cut:
        first = f"Only the first {count(report.num_requests, 'request')} were checked"
        typer.echo(f"{first} ({max_text} of prompts; --max-text sets the limit).", err=True)
    if fix:
        _print_rules(report)
    elif as_json:
        print_json(report, is_ascii=False)
    else:
        _print(report, model)
    if strict and report.findings:
        raise typer.Exit(1)


def _check_template(model: str, as_json: bool, strict: bool) -> None:
    """Print what a model's chat template loses of earlier turns; no weights are loaded."""
    from ostinato.engine.prompts.template_report import report_template

    report = report_template(model_tokenizer(model), takes_images=True)
    if report is None:
        raise ConfigError(f"template={model!r}: its tokenizer has no chat template")
    if as_json:
        print_json({"model": model, **report.as_dict()}, is_ascii=False)
    else:
        print_template(report, model)
    if strict and not report.is_append_only:
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
    unit = "words and pieces of words" if model is None else f"those of {model}"
    console.print(Text(f"Tokens are {unit}.", style="dim"))


def _print_rules(report: LintReport) -> None:
    """Print the rules of all findings, each once, as a file of rules."""
    rules = {rule: finding for finding in report.findings for rule in finding.rules}
    typer.echo(f"# {count(len(rules), 'rule')} for 'ostinato serve --stabilise FILE'.")
    typer.echo("# What a pattern has in parentheses is replaced by put, for each request.")
    names: dict[str, int] = {}
    for rule, finding in rules.items():
        names[rule.name] = number = names.get(rule.name, 0) + 1
        name = rule.name if number == 1 else f"{rule.name}-of-template-{number}"
        values = ", ".join(repr(shortened(example)) for example in finding.examples)
        typer.echo(f"\n# {values}: {finding.saved_tokens:,} tokens of the log")
        typer.echo(replace(rule, name=name).as_toml(), nl=False)


def _title(report: LintReport) -> str:
    requests = f"{count(report.num_requests, 'request')}, {count(report.num_groups, 'template')}"
    if not report.findings and report.hit_ratio < _FEW_HITS:
        return f"{requests}: few tokens hit, and no fix was found."
    if not report.findings:
        return f"{requests}: nothing breaks their prefixes early."
    return f"{requests}: {count(len(report.findings), 'finding')}."


def _lines(place: int, finding: Finding, report: LintReport) -> list[Text]:
    """Format a finding."""
    saved = f"{finding.saved_tokens_per_hour:,.0f} tokens per hour"
    if not report.has_times:
        saved = f"{finding.saved_tokens:,} tokens"
    lines = [
        Text.assemble(f"{place}. ", (finding.kind, "bold red"), f" costs {saved}"),
        Text(f"   in {count(finding.num_requests, 'request')}: {finding.group}"),
    ]
    if there := _place(finding):
        shown = ", ".join(repr(shortened(example)) for example in finding.examples)
        lines.append(Text(f"   {there}{': ' if shown else ''}{shown}"))
    first = f", with {' and '.join(finding.fixed_before)} fixed" if finding.fixed_before else ""
    ratios = f"{finding.before:.1%} -> {finding.after:.1%}"
    lines += [
        Text(f"   hit ratio {ratios}{first}", style="green"),
        Text(f"   {finding.advice}", style="cyan"),
    ]
    return lines


def _place(finding: Finding) -> str:
    """Return the location: a field, or the words before it; may be empty."""
    if finding.kind == "cache_control":
        return "sent on" if finding.examples else ""
    if finding.kind not in get_args(SlotKind):
        return f"in {finding.where}" if finding.where else ""
    return f"after {finding.where[-40:]!r}" if finding.where else "at the beginning"


def _end(report: LintReport) -> str:
    """Summarize the replays."""
    prompts, computed = report.prompt_tokens, report.computed_tokens
    if not report.findings:
        line = f"{report.hit_ratio:.1%} of {prompts:,} prompt tokens hit in a replay."
        hint = " 'ostinato explain' says where each of them differs from the nearest one."
        return line if report.hit_ratio >= _FEW_HITS else line + hint
    return (
        f"In a replay, {computed:,} of {prompts:,} prompt tokens are computed; with all findings "
        f"fixed, {report.fixed_tokens:,}."
    )
