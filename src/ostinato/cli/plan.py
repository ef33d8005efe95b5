"""``ostinato plan``: how much memory is worth buying for the cache?"""

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, cast

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ostinato.cli import _cost_options as costs
from ostinato.cli import _trace_source as source
from ostinato.cli._config_source import load_config
from ostinato.cli._quantities import write_bytes
from ostinato.core.config import CacheConfig, PolicyName, one_of
from ostinato.core.errors import ConfigError
from ostinato.lab.block_trace import BlockTrace
from ostinato.lab.cost_model import CostModel
from ostinato.lab.kv_bytes import kv_bytes
from ostinato.lab.plan import Option, Plan, Prices, in_words, make_plan, plan_capacities
from ostinato.lab.serial_replay import replay_serially
from ostinato.lab.simulation import POLICIES

_MONEY = "What things cost"
_USUAL_POLICY = CacheConfig(num_blocks=1).policy


def run(
    trace: source.TracePath,
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            "-m",
            help="Whose KV is cached: a config.json, a directory, an embedded model, or a name on "
            "the hub. A recorded trace knows its own.",
        ),
    ] = None,
    policy: Annotated[
        str, typer.Option("--policy", "-p", help="Which cached block is worth least.")
    ] = _USUAL_POLICY,
    points: Annotated[int, typer.Option(help="Sizes of the cache to look at.")] = 14,
    block_size: source.BlockTokens = None,
    skip_broken: source.SkipBroken = False,
    tokenizer: source.TokenizerName = None,
    compute_price: Annotated[
        float,
        typer.Option(help="Of an hour of the machine that computes.", rich_help_panel=_MONEY),
    ] = 2.5,
    memory_price: Annotated[
        float,
        typer.Option(help="Of a GiB of memory for an hour.", rich_help_panel=_MONEY),
    ] = 0.005,
    currency: Annotated[str, typer.Option(help="Of both.", rich_help_panel=_MONEY)] = "USD",
    step_ms: costs.StepMs = None,
    prefill_rate: costs.PrefillRate = None,
    attention_doubles: costs.AttentionDoubles = None,
    measure: costs.Measure = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="A directory for the plot (PNG, SVG) and report.html."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
) -> None:
    """Weigh memory for the cache against hits, saved prefill and money.

    The trace is replayed on the real cache at each size; the knee of the curve, the best buy and
    what no memory can find are said in words.

    Try: ostinato plan trace.jsonl --model tiny-shakespeare
    """
    one_of("policy", policy, POLICIES)
    prices = Prices(compute_price, memory_price)
    cost = costs.choose_cost(step_ms, prefill_rate, attention_doubles, measure)
    traffic = source.open_trace(trace, block_size, skip_broken, tokenizer or model)
    token_bytes = _token_bytes(traffic, model)
    sizes = plan_capacities(traffic, points)
    with source.progress_bar("Hits", len(traffic) * len(sizes)) as advance:
        name = cast("PolicyName", policy)
        results = [replay_serially(traffic, size, name, advance) for size in sizes]
    plan = make_plan(traffic, results, token_bytes, cost, prices)
    if as_json:
        typer.echo(json.dumps(_as_json(traffic, plan, cost), indent=2))
    else:
        _print(traffic, plan, cost, prices, currency)
    if out is not None:
        _write(traffic, plan, currency, out)


def _token_bytes(trace: BlockTrace, model: str | None) -> int:
    """Say what a token weighs.

    Raises:
        ConfigError: Nobody knows.
    """
    if model is not None:
        return kv_bytes(load_config(model)).token_bytes
    if trace.token_bytes is None:
        raise ConfigError(f"{trace.name} does not say what a token weighs: add --model")
    return trace.token_bytes


def _print(trace: BlockTrace, plan: Plan, cost: CostModel, prices: Prices, currency: str) -> None:
    console = Console()
    title = Text("\n").append(trace.name, style="bold")
    console.print(title.append(f": {source.describe(trace)}."))
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold")
    for heading in _headings(currency):
        table.add_column(heading, justify="right")
    for option, row in zip(plan.options, _rows(plan), strict=True):
        table.add_row(*row, style="bold" if option in (plan.knee, plan.best) else "")
    console.print(table)
    for sentence in in_words(plan, write_bytes):
        console.print(sentence, highlight=False)
    console.print(Text(_note(cost, prices, currency), style="dim"))


def _headings(currency: str) -> tuple[str, ...]:
    each = f"{currency}/h"
    return (
        "memory",
        "hits",
        "work saved",
        "s/h saved",
        f"{each} saved",
        f"{each} memory",
        "left",
        "",
    )


def _rows(plan: Plan) -> Iterator[tuple[str, ...]]:
    for option in plan.options:
        yield (
            write_bytes(option.memory_bytes),
            f"{option.hit_ratio:.1%}",
            f"{option.saved_share:.1%}",
            f"{option.saved_s:,.0f}",
            f"{option.saved_money:,.2f}",
            f"{option.memory_money:,.2f}",
            f"{option.net_money:+,.2f}",
            _remark(plan, option),
        )


def _remark(plan: Plan, option: Option) -> str:
    remarks = {
        "knee": option == plan.knee,
        "best buy": option == plan.best,
        "never evicts": option == plan.ceiling,
    }
    return ", ".join(remark for remark, holds in remarks.items() if holds)


def _note(cost: CostModel, prices: Prices, currency: str) -> str:
    return (
        f"Prefill is {cost.origin}: {1 / cost.token_s:,.0f} tokens per second before attention; "
        if cost.token_s
        else f"Prefill is {cost.origin}; "
    ) + (
        f"an hour of compute is {prices.compute_per_hour:g} {currency}, a GiB of memory "
        f"{prices.memory_per_gib_hour:g}."
    )


def _write(trace: BlockTrace, plan: Plan, currency: str, out: Path) -> None:
    """Write the plot and the page, and say where they are."""
    # Imported here: most calls draw nothing, and start faster without the library.
    from ostinato.lab.plots import plan_plot, save
    from ostinato.lab.report import Section, write_report
    from ostinato.lab.report import Table as Rows

    figure = plan_plot(plan, trace.name, currency)
    words = tuple(in_words(plan, write_bytes))
    table = Rows(_headings(currency), list(_rows(plan)))
    page = write_report(
        f"Plan: {trace.name}",
        source.describe(trace),
        [Section("What to do", words), Section("What memory buys", (figure, table))],
    )
    try:
        out.mkdir(parents=True, exist_ok=True)
        written = [*save(figure, out / "plan"), out / "report.html"]
        (out / "report.html").write_text(page, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"out={str(out)!r}: {error.strerror or error}") from error
    names = ", ".join(path.name for path in written)
    Console(stderr=True).print(f"Written to {out}: {names}", style="dim", markup=False)


def _as_json(trace: BlockTrace, plan: Plan, cost: CostModel) -> dict[str, object]:
    """Lay out all figures; per hour of the trace where they are rates."""
    return {
        "trace": trace.name,
        "cost": cost.origin,
        "prefill_s": plan.prefill_s,
        "options": [_option_as_json(option) for option in plan.options],
        "knee": _option_as_json(plan.knee),
        "best": None if plan.best is None else _option_as_json(plan.best),
        "ceiling": _option_as_json(plan.ceiling),
        "advice": list(in_words(plan, write_bytes)),
    }


def _option_as_json(option: Option) -> dict[str, object]:
    return {**asdict(option), "net_money": option.net_money}
