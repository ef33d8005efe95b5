"""Prints a simulation's results: on a terminal, as JSON, as plots and a page."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ostinato.cli.options.trace_source import describe
from ostinato.cli.output.report_folder import list_written, unwritable
from ostinato.cli.output.tables import FigureTable
from ostinato.lab.replay.replay import ReplayedRequest
from ostinato.lab.replay.serial_replay import USUAL_POLICY
from ostinato.lab.simulate.simulation import Simulation
from ostinato.lab.simulate.timed_replay import TimedResult
from ostinato.lab.size.quantities import count, write_bytes, write_count, write_seconds

if TYPE_CHECKING:
    from ostinato.lab.simulate.report import Section


def show(found: Simulation) -> None:
    """Print the tables."""
    console = Console()
    title = Text("\n").append(found.trace.name, style="bold")
    console.print(title.append(f": {describe(found.trace)}."))
    console.print(_hits_table(found))
    console.print(_sentence(found))
    if found.replayed:
        console.print(_replayed(found.replayed), "\n", sep="", highlight=False)
    if found.timed:
        console.print(_times_table(found))
        console.print(Text(_times_note(found), style="dim"))
    for note in found.trace.notes:
        console.print(Text(note, style="dim"))


def _hits_table(found: Simulation) -> Table:
    """Print one row per policy and bound, one column per size; the best policy is bold."""
    table = FigureTable(has_rule=True)
    table.add_column("", no_wrap=True)
    for heading in _sizes(found):
        table.add_column(heading.replace(" = ", "\n"), justify="right")
    by_policy = [[result.hit_ratio for result in results] for results in found.results.values()]
    best = [max(ratios) for ratios in zip(*by_policy, strict=True)]
    for name, ratios in found.ratios().items():
        is_policy = name not in found.bounds
        cells = [
            Text(f"{ratio:.1%}", style="bold" if is_policy and ratio == most else "")
            for ratio, most in zip(ratios, best, strict=True)
        ]
        table.add_row(name, *cells, style="" if is_policy else "dim")
    return table


def _sizes(found: Simulation) -> list[str]:
    """Return the sizes as headings, with their memory if the size of a token is known."""
    names = [write_count(size) for size in found.capacities]
    memory = found.memory()
    if memory is None:
        return names
    return [f"{name} = {write_bytes(size)}" for name, size in zip(names, memory, strict=True)]


def _sentence(found: Simulation) -> str:
    return (
        f"Share of prompt tokens that hit, by blocks of the cache. A cache that never evicts, from "
        f"{count(found.trace.num_distinct, 'block')} on, finds {found.unbounded.hit_ratio:.1%}; "
        f"the rest is seen for the first time.{_cut(found)}{_about_states(found)}{_disk(found)}\n"
    )


def _disk(found: Simulation) -> str:
    """Describe the hits of a disk behind the caches, and the writes to it."""
    if found.disk is None:
        return ""
    first = found.tiered[0]
    share = first.loaded_tokens / max(1, first.total_input_tokens)
    return (
        f" A disk of {count(found.disk.num_blocks, 'block')} behind a pool of "
        f"{found.capacities[0]:,} adds {share:.1%}; {first.written_blocks:,} blocks are written to "
        "it."
    )


def _about_states(found: Simulation) -> str:
    """Explain the rows of a model with states."""
    if found.kv is None or not found.kv.state_bytes:
        return ""
    return (
        f" The model keeps states of {write_bytes(found.kv.state_bytes)} each: a row is a rule for "
        "where checkpoints are kept, with the best share of memory for them; bounds ignore the "
        "memory of states."
    )


def _replayed(requests: list[ReplayedRequest]) -> str:
    """Describe whether a replay of a recorded run with its settings hit the same."""
    agreeing = sum(request.agrees for request in requests)
    tokens = sum(request.replayed.cached for request in requests if request.replayed)
    if agreeing == len(requests):
        return (
            f"Replayed with its own settings, step by step: each of the {len(requests):,} requests "
            f"found what it had found, {count(tokens, 'token')} in all."
        )
    return (
        f"Replayed with its own settings, {agreeing:,} of {count(len(requests), 'request')} found "
        "what they had found: the recording is incomplete, or began with a warm cache."
    )


def _cut(found: Simulation) -> str:
    """Describe how many prompts exceed the smallest cache."""
    num_cut = max((results[0].num_cut for results in found.results.values()), default=0)
    if not num_cut:
        return ""
    size = count(found.capacities[0], "block")
    holds = "holds" if found.capacities[0] == 1 else "hold"
    return f" Of {count(num_cut, 'prompt')}, {size} {holds} only the beginning."


_TIMES_HEADINGS = ("", "hits", "first token, half", "9 of 10", "99 of 100", "preempted", "steps")


def _times_table(found: Simulation) -> Table:
    """Print one row per timed run."""
    table = FigureTable(has_rule=True)
    table.add_column("")
    for heading in _TIMES_HEADINGS[1:]:
        table.add_column(heading, justify="right")
    for row in _times_rows(found):
        table.add_row(*row)
    return table


def _times_rows(found: Simulation) -> Iterator[tuple[str, ...]]:
    for name, result in found.timed.items():
        waits = (write_seconds(result.percentile(share)) for share in (50, 90, 99))
        preempted, steps = f"{result.num_preemptions:,}", f"{result.num_steps:,}"
        yield (name, f"{result.hit_ratio:.1%}", *waits, preempted, steps)


def _times_note(found: Simulation) -> str:
    result = next(iter(found.timed.values()))
    served = len(result.first_token_s)
    why = ", so that one engine can serve them" if found.is_slowed_to_fit else ""
    stretched = (
        f"; gaps between arrivals are {found.slowdown:.3g} times as long{why}"
        if found.slowdown != 1
        else ""
    )
    refused = (
        f"; {count(result.num_refused, 'prompt')} that the cache cannot hold left out"
        if result.num_refused
        else ""
    )
    return (
        f"The first {count(served, 'request')} on the real scheduler, "
        f"{count(result.num_blocks, 'block')}. Steps are {found.cost_origin}{stretched}{refused}."
    )


def write(found: Simulation, out: Path) -> None:
    """Write plots and the report, and print their paths.

    Raises:
        ConfigError: They cannot be written there.
    """
    # Imported here: most calls draw nothing, and start faster without the library.
    from ostinato.lab.simulate.plots import save
    from ostinato.lab.simulate.report import write_report

    plots = dict(_plots(found))
    try:
        written = [path for name, figure in plots.items() for path in save(figure, out / name)]
        page = write_report(found.trace.name, describe(found.trace), _sections(found, plots))
        (out / "report.html").write_text(page, encoding="utf-8")
    except OSError as error:
        raise unwritable(out, error) from error
    list_written(out, [*written, out / "report.html"])


def _plots(found: Simulation) -> Iterator[tuple[str, Any]]:
    from ostinato.lab.simulate.plots import first_token_plot, hit_ratio_plot, occupancy_plot

    yield "hits", hit_ratio_plot(found)
    if found.timed:
        yield "first-token", first_token_plot(found.timed, found.trace.name)
        name, result = _with_usual_policy(found.timed)
        if result.moments:
            yield "occupancy", occupancy_plot(result, f"{found.trace.name}, {name}")


def _with_usual_policy(timed: dict[str, TimedResult]) -> tuple[str, TimedResult]:
    """Return the run of the default policy; else the last."""
    name = USUAL_POLICY if USUAL_POLICY in timed else list(timed)[-1]
    return name, timed[name]


def _sections(found: Simulation, plots: dict[str, Any]) -> "Iterator[Section]":
    from ostinato.lab.simulate.report import Section
    from ostinato.lab.simulate.report import Table as Rows

    headings = ["blocks", *_sizes(found)]
    rows = [[name, *(f"{r:.1%}" for r in ratios)] for name, ratios in found.ratios().items()]
    yield Section("Hits", (plots["hits"], _sentence(found), Rows(headings, rows)))
    if found.replayed:
        yield Section("Replay of the recorded run", (_replayed(found.replayed),))
    if found.timed:
        timed = Rows(_TIMES_HEADINGS, list(_times_rows(found)))
        yield Section("Times", (plots["first-token"], timed, _times_note(found)))
        if "occupancy" in plots:
            yield Section("Memory over time", (plots["occupancy"],))


def as_json(found: Simulation) -> dict[str, object]:
    """Return all results as plain values."""
    trace = found.trace
    return {
        "trace": trace.name,
        "num_requests": len(trace),
        "prompt_tokens": trace.total_input_tokens,
        "block_tokens": trace.block_tokens,
        "num_distinct_blocks": trace.num_distinct,
        "token_bytes": None if found.kv is None else found.kv.token_bytes,
        "memory_bytes": found.memory(),
        "notes": list(trace.notes),
        "lines_left_out": [line.number for line in trace.broken],
        "capacities": list(found.capacities),
        "hit_ratio": {str(p): [r.hit_ratio for r in rs] for p, rs in found.results.items()},
        "disk": None
        if found.disk is None
        else {
            "num_blocks": found.disk.num_blocks,
            "tokens_per_s": found.disk.tokens_per_s,
            "hit_ratio": [result.hit_ratio for result in found.tiered],
            "loaded_tokens": [result.loaded_tokens for result in found.tiered],
            "written_blocks": [result.written_blocks for result in found.tiered],
        },
        "bounds": found.bounds,
        "unbounded": found.unbounded.hit_ratio,
        "replayed": {
            "num_requests": len(found.replayed),
            "num_agreeing": sum(request.agrees for request in found.replayed),
        },
        "timed": {name: _timed_as_json(result) for name, result in found.timed.items()},
        "slowdown": found.slowdown,
        "cost": found.cost_origin,
    }


def _timed_as_json(result: TimedResult) -> dict[str, object]:
    return {
        "num_blocks": result.num_blocks,
        "hit_ratio": result.hit_ratio,
        "first_token_s": {str(share): result.percentile(share) for share in (50, 90, 99)},
        "num_served": len(result.first_token_s),
        "num_refused": result.num_refused,
        "num_preemptions": result.num_preemptions,
        "num_steps": result.num_steps,
    }
