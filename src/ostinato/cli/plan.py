"""``ostinato plan``: the replicas and the cache memory that some traffic needs."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import cast

import numpy as np
from rich.console import Console
from rich.text import Text

from ostinato.cli.options import trace_source as source
from ostinato.cli.options.config_source import load_config
from ostinato.cli.options.cost_options import CostOptions, MachineOptions
from ostinato.cli.options.option_groups import option
from ostinato.cli.output.report_folder import open_folder, write_folder
from ostinato.cli.output.tables import FigureTable, print_json, progress_bar
from ostinato.core.errors import ConfigError
from ostinato.hybrid.pool_sizes import TOKENS_PER_CHECKPOINT
from ostinato.lab.plan.plan import (
    CapacityPlan,
    HourlyRates,
    Option,
    ReplicaFleet,
    ReplicaSetup,
    make_plan,
)
from ostinato.lab.plan.plan_words import in_words, money
from ostinato.lab.replay.serial_replay import USUAL_POLICY
from ostinato.lab.size.image_tokens import encoder_weights
from ostinato.lab.size.kv_bytes import kv_bytes
from ostinato.lab.size.kv_config import Config
from ostinato.lab.size.quantities import count, write_bytes
from ostinato.lab.size.weights import WEIGHT_BYTES, adapter_bytes
from ostinato.lab.traces.block_trace import BlockTrace
from ostinato.lab.work.cost_model import StepCost
from ostinato.lab.work.kv_groups import KVGroups, kv_groups
from ostinato.lab.work.roofline import RooflineCost
from ostinato.settings import PolicyName, check_policy

_MONEY = "What things cost"


@dataclass(frozen=True, slots=True)
class PlanReport:
    """A plan, and what is said about it.

    Attributes:
        trace: The traffic.
        plan: The plan.
        currency: Currency of all prices.
    """

    trace: BlockTrace
    plan: CapacityPlan
    currency: str

    def advice(self) -> tuple[str, ...]:
        """The advice."""
        return tuple(in_words(self.plan, self.currency))

    def notes(self) -> tuple[str, ...]:
        """The assumptions."""
        return (*_notes(self.plan.setup, self.currency), *self.trace.notes)


def run(
    trace: source.TracePath,
    model: str | None = option(
        None,
        "The model: a config.json, a directory, a bundled model, or a name on the hub. A "
        "recorded trace knows what a token takes.",
        "--model",
        "-m",
    ),
    policy: str = option(USUAL_POLICY, "Eviction policy.", "--policy", "-p"),
    points: int = option(8, "Number of cache sizes."),
    utilisation: float = option(0.7, "Maximum average utilisation of replicas."),
    compute_price: float = option(2.5, "Price of an hour of one GPU.", panel=_MONEY),
    memory_price: float = option(
        0.005,
        "Price of an hour of one GiB, beyond the GPU memory that the weights leave.",
        panel=_MONEY,
    ),
    lora: list[str] | None = option(
        None, "Directory of a LoRA adapter in the GPUs' memory; may be repeated."
    ),
    currency: str = option("USD", "Currency of both prices.", panel=_MONEY),
    out: Path | None = option(
        None, "A directory for the plot (PNG, SVG) and report.html.", "--out", "-o"
    ),
    as_json: bool = option(False, "Print the results as JSON.", "--json"),
    *,
    reading: source.TraceOptions,
    machine: MachineOptions,
    steps: CostOptions,
) -> None:
    """Find how many replicas serve this traffic, and how much memory for the cache pays.

    For each size the trace is replayed on the engine's own caches, one per replica, with
    prefix-aware and with round-robin routing.

    Try: ostinato plan trace.jsonl --model tiny-shakespeare
    """
    check_policy("policy", policy)
    prices = HourlyRates(compute_price, memory_price)
    steps.check(machine)
    traffic, recording = reading.open(trace, model), reading.recording(trace)
    config = None if model is None else load_config(model)
    cost = steps.choose(machine, recording, config)
    other_bytes = adapter_bytes(lora or [])
    if reading.image and config is not None:
        other_bytes += WEIGHT_BYTES * encoder_weights(config)
    setup = ReplicaSetup(
        cost,
        _groups(traffic, cost, config),
        prices,
        *_gpus(cost, other_bytes),
        utilisation,
        cast("PolicyName", policy),
    )
    open_folder(out)
    with progress_bar("Sizes", points) as advance:
        plan = make_plan(traffic, setup, points, advance)
    report = PlanReport(traffic, plan, currency)
    if as_json:
        print_json(_as_json(report))
    else:
        _print(report)
    if out is not None:
        _write(report, out)


def _groups(trace: BlockTrace, cost: StepCost, config: Config | None) -> KVGroups:
    """Return the KV of a token.

    Raises:
        ConfigError: Neither the trace nor a model defines it.
    """
    if isinstance(cost, RooflineCost):
        context = float(np.mean(trace.input_tokens + trace.output_tokens / 2))
        return kv_groups(cost.model.kv, cost.num_running(context), cost.kv_copies)
    if config is not None:
        return kv_groups(kv_bytes(config))
    if trace.token_bytes is None:
        raise ConfigError(f"{trace.name} does not have the size of a token: add --model")
    return KVGroups(trace.token_bytes)


def _gpus(cost: StepCost, num_other_bytes: int) -> tuple[int, int]:
    """Return the GPUs of a replica, and their memory beyond all weights.

    Raises:
        ConfigError: Adapters and encoder do not fit next to the weights.
    """
    if not isinstance(cost, RooflineCost):
        return 1, 0
    left_bytes = cost.kv_memory_bytes - num_other_bytes
    if left_bytes < 0:
        raise ConfigError(
            f"--lora and --image: adapters and encoder take {write_bytes(num_other_bytes)}, "
            f"more than the {write_bytes(cost.kv_memory_bytes)} that the weights leave of "
            f"{count(cost.machine.num_gpus, 'GPU')}: raise --gpus"
        )
    return cost.machine.num_gpus, left_bytes


def _print(report: PlanReport) -> None:
    console = Console()
    title = Text("\n").append(report.trace.name, style="bold")
    console.print(title.append(f": {source.describe(report.trace)}."))
    table = FigureTable(has_rule=True)
    for heading in _headings(report):
        is_figure = bool(heading)
        table.add_column(heading, justify="right" if is_figure else "left", no_wrap=is_figure)
    plan = report.plan
    for choice, row in zip((None, *plan.options), _rows(report), strict=True):
        style = "bold" if choice is not None and choice in (plan.knee, plan.best) else ""
        table.add_row(*row, style=style)
    console.print(table)
    for sentence in report.advice():
        console.print(Text(sentence), "", sep="\n")
    for note in report.notes():
        console.print(Text(note, style="dim"))


def _headings(report: PlanReport) -> tuple[str, ...]:
    bill = f"{report.currency}/h"
    others = "hits,\nround robin", "replicas,\nround robin"
    return "memory\neach", "hits", "replicas", bill, *others, ""


def _rows(report: PlanReport) -> Iterator[tuple[str, ...]]:
    """Print the row without a cache, then one per size."""
    plan = report.plan
    yield _row("no cache", plan.without, plan.without, "")
    for choice in plan.options:
        memory, remark = write_bytes(choice.memory_bytes), _remark(plan, choice)
        yield _row(memory, choice.affinity, choice.round_robin, remark)


def _row(
    memory: str, routed: ReplicaFleet, round_robin: ReplicaFleet, remark: str
) -> tuple[str, ...]:
    return (
        memory,
        f"{routed.hit_ratio:.1%}",
        f"{routed.num_replicas:,}",
        money(routed.money),
        f"{round_robin.hit_ratio:.1%}",
        f"{round_robin.num_replicas:,}",
        remark,
    )


def _remark(plan: CapacityPlan, option: Option) -> str:
    is_partial = plan.setup.kv.windows or plan.setup.kv.state_bytes
    keeps_all = "full attention evicts nothing" if is_partial else "evicts nothing"
    remarks = {
        "the GPUs' own": option.memory_bytes == plan.setup.own_bytes,
        "knee": option == plan.knee,
        "lowest bill": option == plan.best,
        keeps_all: not option.affinity.evicts,
    }
    return ", ".join(remark for remark, holds in remarks.items() if holds)


def _notes(setup: ReplicaSetup, currency: str) -> Iterator[str]:
    """Return the plan's assumptions."""
    yield f"Steps: {setup.cost.origin}."
    if setup.own_bytes:
        yield (
            f"Beside the weights, the {count(setup.num_gpus, 'GPU')} of a replica can hold "
            f"{write_bytes(setup.own_bytes)} of KV."
        )
    if setup.kv.windows:
        yield (
            f"A token takes {setup.kv.token_bytes:,} bytes while it is in every window, and "
            f"{setup.kv.full_bytes:,} in a long cached prefix; the windows of "
            f"{count(setup.kv.num_running, 'running sequence')} have memory of their own."
        )
    else:
        yield f"A token takes {setup.kv.token_bytes:,} bytes."
    if setup.kv.state_bytes:
        yield (
            f"A state takes {write_bytes(setup.kv.state_bytes)}: "
            f"{count(setup.kv.num_running, 'running sequence')} have two each, and a checkpoint is "
            f"kept per {TOKENS_PER_CHECKPOINT:,} new tokens."
        )
    yield (
        f"An hour of a GPU is {setup.prices.gpu:g} {currency}, a GiB of further memory "
        f"{setup.prices.memory_gib:g}. Replicas are busy at most {setup.utilisation:.0%} of the "
        f"time on average; blocks are evicted by {setup.policy}."
    )


def _write(report: PlanReport, out: Path) -> None:
    """Write the plot and the page, and print their paths.

    Raises:
        ConfigError: They cannot be written there.
    """
    # Imported here: most calls draw nothing, and start faster without the library.
    from ostinato.lab.simulate.plots import plan_plot
    from ostinato.lab.simulate.report import Section, write_report
    from ostinato.lab.simulate.report import Table as Rows

    figure = plan_plot(report.plan, report.trace.name, report.currency)
    headings = [heading.replace("\n", " ") for heading in _headings(report)]
    sections = (
        Section("What to do", report.advice()),
        Section("What memory buys", (figure, Rows(headings, list(_rows(report))), *report.notes())),
    )
    trace = report.trace
    page = write_report(f"Plan: {trace.name}", source.describe(trace), sections)
    write_folder(out, {"plan": figure}, page)


def _as_json(report: PlanReport) -> dict[str, object]:
    """Return all results as plain values; prices are per hour of the trace."""
    plan, setup = report.plan, report.plan.setup
    return {
        "trace": report.trace.name,
        "cost": setup.cost.origin,
        "currency": report.currency,
        "gpus_per_replica": setup.num_gpus,
        "own_bytes": setup.own_bytes,
        "token_bytes": setup.kv.token_bytes,
        "without_cache": asdict(plan.without),
        "options": [asdict(option) for option in plan.options],
        "knee": asdict(plan.knee),
        "best": None if plan.best is None else asdict(plan.best),
        "advice": list(report.advice()),
    }
