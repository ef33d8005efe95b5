"""Prints a simulation's results: on a terminal, as JSON, as plots and a page."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ostinato.cli.options.trace_source import describe
from ostinato.cli.output.report_folder import write_folder
from ostinato.cli.output.tables import attributes, matrix, share
from ostinato.lab.replay.replay import ReplayedRequest
from ostinato.lab.replay.serial_replay import USUAL_POLICY
from ostinato.lab.simulate.simulation import Simulation
from ostinato.lab.simulate.timed_replay import TimedResult
from ostinato.lab.size.quantities import count, write_bytes, write_count, write_seconds

if TYPE_CHECKING:
    from ostinato.lab.simulate.report import Section


def show(simulation: Simulation) -> None:
    """Print the tables."""
    console = Console()
    title = Text("\n").append(simulation.trace.name, style="bold")
    console.print(title.append(f": {describe(simulation.trace)}."))
    console.print(_hits_table(simulation))
    console.print(_sentence(simulation))
    if simulation.replayed:
        console.print(_replayed(simulation.replayed), "\n", sep="", highlight=False)
    if simulation.timed:
        console.print(matrix(_TIMES_HEADINGS, _times_rows(simulation)))
        console.print(Text(_times_note(simulation), style="dim"))
    for note in simulation.trace.notes:
        console.print(Text(note, style="dim"))


def _hits_table(simulation: Simulation) -> Table:
    """Print one row per policy and bound, one column per size; the best policy is bold."""
    bounds = simulation.bounds
    by_policy = [
        [result.hit_ratio for result in results] for results in simulation.results.values()
    ]
    best = [max(ratios) for ratios in zip(*by_policy, strict=True)]
    rows = [
        [
            name,
            *(
                Text(share(ratio), "bold" if ratio == best_ratio and name not in bounds else "")
                for ratio, best_ratio in zip(ratios, best, strict=True)
            ),
        ]
        for name, ratios in simulation.ratios().items()
    ]
    headings = ["", *(heading.replace(" = ", "\n") for heading in _sizes(simulation))]
    return matrix(
        headings, rows, is_whole=True, style=lambda row: "dim" if row[0] in bounds else ""
    )


def _sizes(simulation: Simulation) -> list[str]:
    """Return the sizes as headings, with their memory if the size of a token is known."""
    names = [write_count(size) for size in simulation.capacities]
    memory = simulation.memory()
    if memory is None:
        return names
    return [f"{name} = {write_bytes(size)}" for name, size in zip(names, memory, strict=True)]


def _sentence(simulation: Simulation) -> str:
    return (
        f"Share of prompt tokens that hit, by blocks of the cache. A cache that never evicts, from "
        f"{count(simulation.trace.num_distinct, 'block')} on, finds "
        f"{simulation.unbounded.hit_ratio:.1%}; the rest is seen for the first time."
        f"{_cut(simulation)}{_about_states(simulation)}{_disk(simulation)}\n"
    )


def _disk(simulation: Simulation) -> str:
    """Describe the hits of a disk behind the caches, and the writes to it."""
    if simulation.disk is None:
        return ""
    first = simulation.tiered[0]
    share = first.loaded_tokens / max(1, first.total_input_tokens)
    return (
        f" A disk of {count(simulation.disk.num_blocks, 'block')} behind a pool of "
        f"{simulation.capacities[0]:,} adds {share:.1%}; {first.written_blocks:,} blocks "
        "are written to it."
    )


def _about_states(simulation: Simulation) -> str:
    """Explain the rows of a model with states."""
    if simulation.kv is None or not simulation.kv.state_bytes:
        return ""
    return (
        f" The model keeps states of {write_bytes(simulation.kv.state_bytes)} each: a row is "
        "a rule for where checkpoints are kept, with the best share of memory for them; bounds "
        "ignore the memory of states."
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


def _cut(simulation: Simulation) -> str:
    """Describe how many prompts exceed the smallest cache."""
    num_cut = max((results[0].num_cut for results in simulation.results.values()), default=0)
    if not num_cut:
        return ""
    size = count(simulation.capacities[0], "block")
    holds = "holds" if simulation.capacities[0] == 1 else "hold"
    return f" Of {count(num_cut, 'prompt')}, {size} {holds} only the beginning."


_TIMES_HEADINGS = ("", "hits", "first token, half", "9 of 10", "99 of 100", "preempted", "steps")


def _times_rows(simulation: Simulation) -> Iterator[tuple[str, ...]]:
    for name, result in simulation.timed.items():
        waits = (write_seconds(result.percentile(share)) for share in (50, 90, 99))
        preempted, steps = f"{result.num_preemptions:,}", f"{result.num_steps:,}"
        yield (name, f"{result.hit_ratio:.1%}", *waits, preempted, steps)


def _times_note(simulation: Simulation) -> str:
    result = next(iter(simulation.timed.values()))
    served = len(result.first_token_s)
    why = ", so that one engine can serve them" if simulation.is_slowed_to_fit else ""
    stretched = (
        f"; gaps between arrivals are {simulation.slowdown:.3g} times as long{why}"
        if simulation.slowdown != 1
        else ""
    )
    refused = (
        f"; {count(result.num_refused, 'prompt')} that the cache cannot hold left out"
        if result.num_refused
        else ""
    )
    return (
        f"The first {count(served, 'request')} on the real scheduler, "
        f"{count(result.num_blocks, 'block')}. "
        f"Steps are {simulation.cost_origin}{stretched}{refused}."
    )


def write(simulation: Simulation, out: Path) -> None:
    """Write plots and the report, and print their paths.

    Raises:
        ConfigError: They cannot be written there.
    """
    # Imported here: most calls draw nothing, and start faster without the library.
    from ostinato.lab.simulate.report import write_report

    trace, plots = simulation.trace, dict(_plots(simulation))
    page = write_report(trace.name, describe(trace), _sections(simulation, plots))
    write_folder(out, plots, page)


def _plots(simulation: Simulation) -> Iterator[tuple[str, Any]]:
    from ostinato.lab.simulate.plots import first_token_plot, hit_ratio_plot, occupancy_plot

    yield "hits", hit_ratio_plot(simulation)
    if simulation.timed:
        yield "first-token", first_token_plot(simulation.timed, simulation.trace.name)
        name, result = _with_usual_policy(simulation.timed)
        if result.moments:
            yield "occupancy", occupancy_plot(result, f"{simulation.trace.name}, {name}")


def _with_usual_policy(timed: dict[str, TimedResult]) -> tuple[str, TimedResult]:
    """Return the run of the default policy; else the last."""
    name = USUAL_POLICY if USUAL_POLICY in timed else list(timed)[-1]
    return name, timed[name]


def _sections(simulation: Simulation, plots: dict[str, Any]) -> "Iterator[Section]":
    from ostinato.lab.simulate.report import Section
    from ostinato.lab.simulate.report import Table as Rows

    headings = ["blocks", *_sizes(simulation)]
    rows = [[name, *(f"{r:.1%}" for r in ratios)] for name, ratios in simulation.ratios().items()]
    yield Section("Hits", (plots["hits"], _sentence(simulation), Rows(headings, rows)))
    if simulation.replayed:
        yield Section("Replay of the recorded run", (_replayed(simulation.replayed),))
    if simulation.timed:
        timed = Rows(_TIMES_HEADINGS, list(_times_rows(simulation)))
        yield Section("Times", (plots["first-token"], timed, _times_note(simulation)))
        if "occupancy" in plots:
            yield Section("Memory over time", (plots["occupancy"],))


def as_json(simulation: Simulation) -> dict[str, object]:
    """Return all results as plain values."""
    trace = simulation.trace
    return {
        "trace": trace.name,
        "num_requests": len(trace),
        "prompt_tokens": trace.total_input_tokens,
        "block_tokens": trace.block_tokens,
        "num_distinct_blocks": trace.num_distinct,
        "token_bytes": None if simulation.kv is None else simulation.kv.token_bytes,
        "memory_bytes": simulation.memory(),
        "notes": list(trace.notes),
        "lines_left_out": [line.number for line in trace.broken],
        "capacities": list(simulation.capacities),
        "hit_ratio": {str(p): [r.hit_ratio for r in rs] for p, rs in simulation.results.items()},
        "disk": None
        if simulation.disk is None
        else attributes(simulation.disk, "num_blocks", "tokens_per_s")
        | {
            name: [getattr(result, name) for result in simulation.tiered]
            for name in ("hit_ratio", "loaded_tokens", "written_blocks")
        },
        "bounds": simulation.bounds,
        "unbounded": simulation.unbounded.hit_ratio,
        "replayed": {
            "num_requests": len(simulation.replayed),
            "num_agreeing": sum(request.agrees for request in simulation.replayed),
        },
        "timed": {name: _timed_as_json(result) for name, result in simulation.timed.items()},
        "slowdown": simulation.slowdown,
        "cost": simulation.cost_origin,
    }


def _timed_as_json(result: TimedResult) -> dict[str, object]:
    return {
        **attributes(result, "num_blocks", "hit_ratio"),
        "first_token_s": {str(share): result.percentile(share) for share in (50, 90, 99)},
        "num_served": len(result.first_token_s),
        **attributes(result, "num_refused", "num_preemptions", "num_steps"),
    }
