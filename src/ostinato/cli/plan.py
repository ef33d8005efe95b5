"""``ostinato plan``: how much memory is worth buying for the cache?"""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
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
from ostinato.cli._option_groups import grouped
from ostinato.cli._quantities import write_bytes
from ostinato.cli._report_folder import open_folder, say_written, unwritable
from ostinato.core.config import PolicyName, one_of
from ostinato.core.errors import ConfigError
from ostinato.lab.block_trace import BlockTrace
from ostinato.lab.cost_model import CostModel
from ostinato.lab.kv_bytes import kv_bytes
from ostinato.lab.plan import Option, Plan, Prices, in_words, make_plan, money, plan_capacities
from ostinato.lab.policies import ENGINE_POLICIES
from ostinato.lab.serial_replay import replay_serially
from ostinato.lab.simulation import USUAL_POLICY

_MONEY = "What things cost"
_SECONDS = "s/h saved"
"""A column for the page alone; a terminal has no room for it."""


@dataclass(frozen=True, slots=True)
class Paper:
    """A plan, and what is said around it.

    Attributes:
        trace: The traffic.
        plan: The curve.
        currency: Of all prices.
        note: What it assumes.
    """

    trace: BlockTrace
    plan: Plan
    currency: str
    note: str

    def words(self) -> tuple[str, ...]:
        """What to do."""
        return tuple(in_words(self.plan, write_bytes, self.currency))


@grouped
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
    ] = USUAL_POLICY,
    points: Annotated[int, typer.Option(help="Sizes of the cache to look at.")] = 14,
    compute_price: Annotated[
        float,
        typer.Option(help="Of an hour of the machine that computes.", rich_help_panel=_MONEY),
    ] = 2.5,
    memory_price: Annotated[
        float,
        typer.Option(help="Of a GiB of memory for an hour.", rich_help_panel=_MONEY),
    ] = 0.005,
    currency: Annotated[str, typer.Option(help="Of both.", rich_help_panel=_MONEY)] = "USD",
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="A directory for the plot (PNG, SVG) and report.html."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
    *,
    reading: source.TraceOptions,
    steps: costs.CostOptions,
) -> None:
    """Weigh memory for the cache against hits, saved prefill and money.

    The trace is replayed on the real cache at each size; the knee of the curve, the best buy and
    what no memory can find are said in words.

    Try: ostinato plan trace.jsonl --model tiny-shakespeare
    """
    one_of("policy", policy, ENGINE_POLICIES)
    prices = Prices(compute_price, memory_price)
    steps.check()
    traffic, recording = reading.open(trace, model), reading.recording(trace)
    cost = steps.choose(recording)
    token_bytes = _token_bytes(traffic, model)
    sizes = plan_capacities(traffic, points)
    open_folder(out)
    with source.progress_bar("Hits", len(traffic) * len(sizes)) as advance:
        name = cast("PolicyName", policy)
        results = [replay_serially(traffic, size, name, advance) for size in sizes]
    plan = make_plan(traffic, results, token_bytes, cost, prices)
    paper = Paper(traffic, plan, currency, _note(cost, prices, currency, policy))
    if as_json:
        typer.echo(json.dumps(_as_json(paper, cost), indent=2))
    else:
        _print(paper)
    if out is not None:
        _write(paper, out)


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


def _print(paper: Paper) -> None:
    console = Console()
    title = Text("\n").append(paper.trace.name, style="bold")
    console.print(title.append(f": {source.describe(paper.trace)}."))
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold")
    rows = list(_rows(paper))
    shown = [heading for heading in rows[0] if heading != _SECONDS]
    for heading in shown:
        table.add_column(heading, justify="right", no_wrap=not heading)
    plan = paper.plan
    for option, row in zip(plan.options, rows, strict=True):
        style = "bold" if option in (plan.knee, plan.best) else ""
        table.add_row(*(row[heading] for heading in shown), style=style)
    console.print(table)
    for sentence in paper.words():
        console.print(Text(sentence), "", sep="\n")
    console.print(Text(paper.note, style="dim"))


def _rows(paper: Paper) -> Iterator[dict[str, str]]:
    """Write each size's figures, by the heading of their column."""
    currency = paper.currency
    for option in paper.plan.options:
        yield {
            "memory": write_bytes(option.memory_bytes),
            "hits": f"{option.hit_ratio:.1%}",
            "work saved": f"{option.saved_share:.1%}",
            _SECONDS: f"{option.saved_s:,.0f}",
            f"{currency}/h saved": money(option.saved_money),
            f"{currency}/h of memory": money(option.memory_money),
            f"{currency}/h left": f"{'+' if option.net_money > 0 else ''}{money(option.net_money)}",
            "": _remark(paper.plan, option),
        }


def _remark(plan: Plan, option: Option) -> str:
    remarks = {
        "knee": option == plan.knee,
        "best buy": option == plan.best,
        "all fits": option == plan.ceiling,
    }
    return ", ".join(remark for remark, holds in remarks.items() if holds)


def _note(cost: CostModel, prices: Prices, currency: str, policy: str) -> str:
    """Say what the figures assume."""
    return (
        f"Prefill is {cost.origin}: {1 / cost.token_s:,.0f} tokens per second before attention; "
        if cost.token_s
        else f"Prefill is {cost.origin}; "
    ) + (
        f"an hour of compute is {prices.compute_per_hour:g} {currency}, a GiB of memory "
        f"{prices.memory_per_gib_hour:g}. Blocks are evicted by {policy}."
    )


def _write(paper: Paper, out: Path) -> None:
    """Write the plot and the page, and say where they are.

    Raises:
        ConfigError: They cannot be written there.
    """
    # Imported here: most calls draw nothing, and start faster without the library.
    from ostinato.lab.plots import plan_plot, save
    from ostinato.lab.report import Section, write_report
    from ostinato.lab.report import Table as Rows

    figure = plan_plot(paper.plan, paper.trace.name, paper.currency)
    rows = list(_rows(paper))
    table = Rows(tuple(rows[0]), [tuple(row.values()) for row in rows])
    page = write_report(
        f"Plan: {paper.trace.name}",
        source.describe(paper.trace),
        [
            Section("What to do", paper.words()),
            Section("What memory buys", (figure, table, paper.note)),
        ],
    )
    try:
        written = [*save(figure, out / "plan"), out / "report.html"]
        (out / "report.html").write_text(page, encoding="utf-8")
    except OSError as error:
        raise unwritable(out, error) from error
    say_written(out, written)


def _as_json(paper: Paper, cost: CostModel) -> dict[str, object]:
    """Lay out all figures; per hour of the trace where they are rates."""
    plan = paper.plan
    return {
        "trace": paper.trace.name,
        "cost": cost.origin,
        "currency": paper.currency,
        "prefill_s": plan.prefill_s,
        "options": [_option_as_json(option) for option in plan.options],
        "knee": _option_as_json(plan.knee),
        "best": None if plan.best is None else _option_as_json(plan.best),
        "ceiling": _option_as_json(plan.ceiling),
        "advice": list(paper.words()),
    }


def _option_as_json(option: Option) -> dict[str, object]:
    return {**asdict(option), "net_money": option.net_money}
