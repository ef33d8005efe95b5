"""Draws plots.

Each function returns a ``matplotlib`` figure of its own, drawn without a display and without any
state that is shared with other figures.
"""

from collections.abc import Callable, Mapping, Sequence
from io import BytesIO
from itertools import cycle
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import (
    FixedLocator,
    FuncFormatter,
    NullFormatter,
    NullLocator,
    PercentFormatter,
)

from ostinato.lab.plan.plan import CapacityPlan, Option
from ostinato.lab.simulate.simulation import Simulation
from ostinato.lab.simulate.timed_replay import TimedResult
from ostinato.lab.size.quantities import write_bytes, write_count, write_seconds

NO_CACHE = "no cache"
"""Name of the run without a cache, which is drawn in grey."""

MAX_TICKS = 9
"""Sizes that have room below a plot, evenly spread."""

_MIN_DECADES = 30
"""Ratio of an axis's ends from which on its powers of ten say enough."""

_INK, _FAINT, _GRID = "#22223b", "#8d8d9b", "#e3e3ea"
_COLOURS = ("#5e35b1", "#00897b", "#e8590c", "#1c7ed6", "#c2255c", "#74972a", "#b08900", "#495057")
_MARKERS = "osD^vPX*"
_ORANGE = "#e8590c"
_HELD, _EVICTABLE, _UNUSED = "#5e35b1", "#b39ddb", "#f1eef8"


def hit_ratio_plot(simulation: Simulation) -> Figure:
    """Plot hits against memory or blocks: a line per policy, a dashed one per bound."""
    figure, axes = _canvas(f"Hits against memory: {simulation.trace.name}")
    memory = simulation.memory()
    sizes = list(memory or simulation.capacities)
    styles = zip(simulation.results.items(), cycle(_COLOURS), cycle(_MARKERS), strict=False)
    for (policy, results), colour, marker in styles:
        ratios = [result.hit_ratio for result in results]
        axes.plot(sizes, ratios, color=colour, marker=marker, markersize=5, label=str(policy))
    for (name, ratios), dashes in zip(simulation.bounds.items(), cycle(("--", ":")), strict=False):
        axes.plot(sizes, ratios, color=_INK, linestyle=dashes, linewidth=1.4, label=name)
    ceiling = simulation.unbounded.hit_ratio
    axes.axhline(ceiling, color=_FAINT, linewidth=1, zorder=1)
    axes.annotate(
        f"a cache that never evicts: {ceiling:.1%}",
        (0.01, ceiling),
        xycoords=("axes fraction", "data"),
        xytext=(0, 4),
        textcoords="offset points",
        color=_FAINT,
        fontsize=9,
    )
    axes.set_xscale("log")
    axes.set_ylim(0, min(1.04, ceiling * 1.15 + 0.02))
    axes.set_xlabel(
        f"cache, in blocks of {simulation.trace.block_tokens:,} tokens"
        if memory is None
        else "memory for the cache"
    )
    _tick_at(axes, sizes, write_count if memory is None else write_bytes)
    axes.set_ylabel("prompt tokens that hit")
    axes.legend(frameon=False, loc="lower right", fontsize=9)
    return figure


def first_token_plot(timed: Mapping[str, TimedResult], title: str) -> Figure:
    """Plot the distribution of times to first token, a line per run."""
    figure, axes = _canvas(f"Time to the first token: {title}")
    colours = cycle(_COLOURS)  # those of the policies in the plot of hits
    for name, result in timed.items():
        colour = _FAINT if name == NO_CACHE else next(colours)
        waits = np.sort(np.array(result.first_token_s))
        if len(waits):
            shares = np.arange(1, len(waits) + 1) / len(waits)
            label = f"{name}: half within {write_seconds(result.percentile(50))}"
            axes.plot(waits, shares, color=colour, drawstyle="steps-post", label=label)
    axes.set_xscale("log")
    axes.set_ylim(0, 1.02)
    axes.set_xlabel("seconds from arrival")
    _shorten(axes)
    axes.set_ylabel("requests with a first token")
    axes.legend(frameon=False, loc="upper left", fontsize=9)
    return figure


def occupancy_plot(result: TimedResult, title: str) -> Figure:
    """Plot occupancy over time, and the numbers of running and waiting sequences."""
    figure, axes = _canvas(f"Occupancy: {title}")
    unit, scale = _time_unit(result.moments[-1].at_s)
    times = [moment.at_s / scale for moment in result.moments]
    held = np.array([moment.held_blocks for moment in result.moments], float)
    evictable = np.array([moment.evictable_blocks for moment in result.moments], float)
    unused = result.num_blocks - held - evictable
    axes.stackplot(
        times,
        held / result.num_blocks,
        evictable / result.num_blocks,
        unused / result.num_blocks,
        colors=(_HELD, _EVICTABLE, _UNUSED),
        labels=("held by running requests", "cached, free to evict", "empty"),
        step="post",
    )
    axes.set_ylim(0, 1)
    axes.set_xlim(times[0], max(times[-1], times[0] + 1e-6))
    axes.set_xlabel(unit)
    axes.set_ylabel("share of the cache")
    queue: Axes = axes.twinx()
    running = [moment.num_running for moment in result.moments]
    waiting = [moment.num_waiting for moment in result.moments]
    for label, counts, colour in (("running", running, _ORANGE), ("waiting", waiting, _INK)):
        queue.plot(times, counts, color=colour, linewidth=1.1, drawstyle="steps-post", label=label)
    _finish_right(axes, queue, "requests", _INK, 5)
    return figure


def plan_plot(plan: CapacityPlan, title: str, currency: str) -> Figure:
    """Plot hits and the bill against a replica's memory, with the points that matter."""
    figure, axes = _canvas(f"Hits and bill by memory: {title}")
    memory = [option.memory_bytes for option in plan.options]
    routed = [option.affinity for option in plan.options]
    in_turn = [option.round_robin for option in plan.options]
    axes.set_xscale("log")
    for label, fleets, colour in (
        ("hits, routed by prefix", routed, _COLOURS[0]),
        ("hits, round robin", in_turn, _COLOURS[1]),
    ):
        ratios = [fleet.hit_ratio for fleet in fleets]
        axes.plot(memory, ratios, color=colour, marker="o", markersize=4, label=label)
    if plan.best is None or plan.best == plan.knee:
        name = "the knee" if plan.best is None else "the knee and the lowest bill"
        _mark(axes, name, plan.knee, 0.04)
    else:
        _mark(axes, "the knee", plan.knee, 0.12)
        _mark(axes, "the lowest bill", plan.best, 0.04)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("memory of each replica's cache")
    _tick_at(axes, memory, write_bytes)
    axes.set_ylabel("prompt tokens that hit")
    bill: Axes = axes.twinx()
    for fleets, dashes in ((routed, "--"), (in_turn, ":")):
        bills = [fleet.money for fleet in fleets]
        bill.plot(memory, bills, color=_ORANGE, linewidth=1.2, linestyle=dashes)
    bill.axhline(plan.without.money, color=_FAINT, linewidth=1, linestyle="-.")
    bill.plot([], [], color=_ORANGE, linestyle="--", label="bill, routed by prefix")
    bill.plot([], [], color=_ORANGE, linestyle=":", label="bill, round robin")
    bill.plot([], [], color=_FAINT, linestyle="-.", label="bill without a cache")
    _finish_right(axes, bill, f"{currency} per hour", _ORANGE, 3)
    return figure


def _finish_right(left: Axes, right: Axes, label: str, colour: str, num_columns: int) -> None:
    """Label the axis on the right, and put the legend of both below, where it hides no curve."""
    right.set_ylim(bottom=0)
    right.set_ylabel(label, color=colour)
    right.tick_params(axis="y", colors=colour, labelsize=9)
    right.spines[["top", "left"]].set_visible(False)
    handles = [*left.get_legend_handles_labels()[0], *right.get_legend_handles_labels()[0]]
    left.legend(
        handles=handles,
        frameon=False,
        ncols=num_columns,
        loc="upper center",
        bbox_to_anchor=(0.5, -0.14),
        fontsize=8.5,
    )


def _mark(axes: Axes, name: str, point: Option, height: float) -> None:
    """Circle a point of a plan's curve, and name it below, where a rising curve leaves room."""
    memory, ratio = point.memory_bytes, point.affinity.hit_ratio
    axes.plot(memory, ratio, marker="o", markersize=11, fillstyle="none", color=_INK, linewidth=0)
    axes.plot([memory] * 2, [0, ratio], color=_INK, linewidth=0.8, linestyle=":")
    is_right = axes.transData.transform((memory, 0))[0] > axes.transAxes.transform((0.55, 0))[0]
    axes.annotate(
        f"{name}: {write_bytes(memory)}, {ratio:.1%}",
        (memory, height),
        xycoords=("data", "axes fraction"),
        xytext=(-5 if is_right else 5, 0),
        textcoords="offset points",
        horizontalalignment="right" if is_right else "left",
        fontsize=9,
        color=_INK,
        bbox={"facecolor": "white", "edgecolor": "none", "pad": 1},
    )


def save(figure: Figure, stem: Path) -> tuple[Path, Path]:
    """Write a figure as PNG and SVG; returns both paths."""
    paths = stem.with_suffix(".png"), stem.with_suffix(".svg")
    figure.savefig(paths[0], format="png")
    paths[1].write_text(as_svg(figure), encoding="utf-8")
    return paths


def as_svg(figure: Figure) -> str:
    """Return a figure as an ``<svg>`` element; the same figures give the same text."""
    out = BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": "ostinato", "svg.fonttype": "path"}):
        figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None})
    text = out.getvalue().decode()
    return text[text.index("<svg") :]


def _canvas(title: str) -> tuple[Figure, Any]:
    """Make an empty figure with one pair of axes, shares of 1 on the vertical one."""
    figure = Figure(figsize=(8.4, 4.9), dpi=130, layout="constrained", facecolor="white")
    axes = figure.add_subplot()
    axes.set_title(title, loc="left", fontsize=12, color=_INK, pad=12)
    axes.grid(True, color=_GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(_FAINT)
    axes.tick_params(colors=_INK, labelsize=9)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    for axis in (axes.xaxis, axes.yaxis):
        axis.label.set_color(_INK)
    return figure, axes


def _tick_at(axes: Axes, sizes: Sequence[int], write: Callable[[int], str]) -> None:
    """Mark the sizes that were looked at, as tables write them; fewer where they crowd."""
    low, high = np.log(sizes[0]), np.log(sizes[-1])
    min_gap = (high - low) / MAX_TICKS
    marked = [sizes[-1]]
    for size in reversed(sizes[:-1]):
        if np.log(marked[-1]) - np.log(size) >= min_gap:
            marked.append(size)
    axes.xaxis.set_major_locator(FixedLocator(marked))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda size, _: write(round(size))))


def _shorten(axes: Axes) -> None:
    """Write the powers of a logarithmic axis as people do, and label nothing between them."""
    axes.xaxis.set_major_formatter(FuncFormatter(_short))
    low, high = axes.get_xlim()
    if high / low > _MIN_DECADES:
        axes.xaxis.set_minor_formatter(NullFormatter())
    else:
        axes.xaxis.set_minor_formatter(FuncFormatter(_short))


def _time_unit(longest_s: float) -> tuple[str, float]:
    """Return the unit that a time is read in, and its seconds."""
    units = (("hours", 3600.0), ("minutes", 60.0), ("seconds", 1.0))
    return next(((n, s) for n, s in units if longest_s >= 3 * s), ("milliseconds", 0.001))


def _short(value: float, _place: float) -> str:
    """Write 20000 as 20k, and 0.5 as it is."""
    for size, unit in ((1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.3g}{unit}"
    return f"{value:.3g}"
