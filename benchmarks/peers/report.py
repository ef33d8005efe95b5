"""Writes figures as a table, as JSON, and as a plot.

A ratio says how many times as fast ours is as the other: above 1 we are ahead, for rates and for
times alike.
"""

from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from benchmarks.peers.measures import Measure, goal_of
from benchmarks.peers.protocol import common
from benchmarks.peers.session import Findings, Plan

BUSY = 0.1
"""Cores that others took during a sample, above which it stands with a mark."""

_ENGINE = 16
_COLUMNS = {
    "median": 7,
    "range": 15,
    "n": 2,
    "CPU s": 6,
    "cached": 7,
    "others": 6,
    "ratio": 5,
}
"""Columns of a table of figures, and the letters that they take."""

OURS = ("ours", "ours-server", "ours-manager")
"""Names of ours without a variant, in the measures of each kind."""

FindingsJson = dict[str, Any]
Row = dict[str, Any]


def as_json(plan: Plan, findings: Findings) -> FindingsJson:
    """Put what was found into plain lists and dicts, measure by measure."""
    titles = {engine.name: engine.title for engine in plan.engines}
    rows = [_row(each, findings) for each in plan.measures if each.name in findings.samples]
    return {
        "settings": plan.settings,
        "repetitions": plan.repetitions,
        "titles": titles,
        "engines": findings.engines,
        "agreement": agreement(findings),
        "measures": rows,
    }


def _row(measure: Measure, findings: Findings) -> Row:
    samples = findings.samples[measure.name]
    row: Row = {
        "name": measure.name,
        "title": measure.title,
        "unit": measure.unit,
        "more_is_better": measure.more_is_better,
        "figures": {name: _figure(taken) for name, taken in samples.items()},
        "left_out": findings.left_out[measure.name],
        "samples": samples,
    }
    row["ratios"] = ratios(row)
    return row


def _figure(samples: list[dict[str, Any]]) -> dict[str, Any]:
    values = [sample["value"] for sample in samples]
    return {
        "median": median(values),
        "lowest": min(values),
        "highest": max(values),
        "samples": len(values),
        "others": max(sample["others"] for sample in samples),
        "cpu_s": median(sample["cpu_s"] for sample in samples),
        "cached": samples[-1]["cached"],
    }


def is_ours(name: str) -> bool:
    """Whether an engine of this name is this project, in whichever variant."""
    return name.partition("-")[0].partition(":")[0] == "ours"


def ours_of(row: Row) -> str | None:
    """Return the name under which ours, without a variant, is in a row; None if it is not."""
    return next((name for name in OURS if name in row["figures"]), None)


def ratios(row: Row) -> dict[str, float]:
    """How many times as fast ours is as each other engine of a row."""
    ours = ours_of(row)
    if ours is None:
        return {}
    speeds = {name: _speed(row, name) for name in row["figures"]}
    return {name: speeds[ours] / speed for name, speed in speeds.items() if name != ours}


def _speed(row: Row, name: str) -> float:
    value: float = row["figures"][name]["median"]
    return value if row["more_is_better"] else 1 / value


def best_peer(row: Row) -> str | None:
    """The quickest engine of a row that is not ours."""
    peers = [name for name in row["figures"] if not is_ours(name)]
    return max(peers, key=lambda name: _speed(row, name), default=None)


def goal_line(row: Row, findings: FindingsJson) -> tuple[str, str] | None:
    """Say a row's goal and whether it is met; None where it has none."""
    factor, best = goal_of(row["name"], findings), best_peer(row)
    if factor is None:
        return None
    ratio = row["ratios"].get(best) if best else None
    word = "could not be compared" if ratio is None else "met" if ratio >= factor else "missed"
    return f"≥ {factor:.2f} × the best", word


def agreement(findings: Findings) -> dict[str, float]:
    """Which share of the first prompts' greedy tokens each engine has in common with a yardstick.

    The yardstick is ``transformers`` if it is there, else ours. An engine that rounds otherwise
    may leave the common path and not come back, so only tokens before the first difference count.
    """
    yardstick = next((name for name in ("transformers", "ours") if name in findings.engines), None)
    if yardstick is None:
        return {}
    wanted = findings.engines[yardstick]["first_outputs"]
    shares = {}
    for name, engine in findings.engines.items():
        if any(engine["first_outputs"]):
            pairs = zip(engine["first_outputs"], wanted, strict=True)
            same = [common([one, other]) / len(other) for one, other in pairs]
            shares[name] = sum(same) / len(same)
    return shares


def show(findings: FindingsJson, console: Console) -> None:
    """Print the stamp, a table for every measure, no wider than 80 columns, and what was left out.

    A ratio says how many times as fast ours is; ``others`` are the cores that other programs took.
    """
    console.print(stamp_line(findings), highlight=False)
    for name, engine in findings.get("engines", {}).items():
        console.print(f"{name}: {settings_line(engine['settings'])}", highlight=False)
    for row in findings["measures"]:
        title = Text(f"\n{row['title']}, {row['unit']}", style="bold")
        console.print(title, _row_table(row), sep="\n")
        if goal := goal_line(row, findings):
            console.print(f"goal {': '.join(goal)}", highlight=False)
        for name, reason in row["left_out"].items():
            console.print(f"without {name}: {reason}", highlight=False)
    shares = ", ".join(f"{name} {share:.0%}" for name, share in findings["agreement"].items())
    console.print(f"\nGreedy tokens in common with the yardstick: {shares}", highlight=False)


def settings_line(settings: dict[str, Any]) -> str:
    """Write an engine's own settings, block size and weights among them."""
    return ", ".join(f"{name} {str(value)[:40]}" for name, value in settings.items())


def _row_table(row: Row) -> Table:
    """Draw an engine per line; tables below one another have the same columns."""
    table = Table(box=None, pad_edge=False, padding=(0, 1), header_style="dim")
    table.add_column("", min_width=_ENGINE, max_width=_ENGINE, overflow="fold")
    for name, width in _COLUMNS.items():
        table.add_column(name, justify="right", min_width=width, no_wrap=True)
    for name, figure in row["figures"].items():
        ratio = row["ratios"].get(name)
        table.add_row(
            name,
            number(figure["median"]),
            f"{number(figure['lowest'])} .. {number(figure['highest'])}",
            str(figure["samples"]),
            number(figure["cpu_s"]),
            "" if figure["cached"] is None else f"{figure['cached']:,}",
            f"{figure['others']:.2f}",
            "" if ratio is None else number(ratio),
        )
    return table


def number(value: float) -> str:
    """Three digits that count."""
    if value == 0:
        return "0"
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def stamp_line(findings: FindingsJson) -> str:
    """One sentence about machine and run."""
    stamp = findings["stamp"]
    flags = ", ".join(stamp["flags"]) or "no vector extension of note"
    return (
        f"{stamp['processor']} ({flags}), {stamp['cores']} cores, {stamp['memory_gib']} GiB, "
        f"{stamp['system']}; threads: {stamp['threads']}, reads {stamp['bandwidth_gb_s']} GB/s; "
        f"commit {stamp['commit']}, {stamp['date']}: {stamp['command']}"
    )


def plot(findings: FindingsJson, path: Path) -> None:
    """Draw how many times as fast ours is as each other engine, one group per measure."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = [row for row in findings["measures"] if row["ratios"]]
    titles = {name: findings["titles"].get(name, name) for row in rows for name in row["ratios"]}
    names = list(dict.fromkeys(titles.values()))  # an engine and its manager have one colour
    figure, axes = pyplot.subplots(
        figsize=(9, 1.5 + 0.18 * sum(len(r["ratios"]) + 1 for r in rows))
    )
    place, ticks = 0.0, []
    for row in rows:
        first = place
        for name, ratio in row["ratios"].items():
            color = f"C{names.index(titles[name])}"
            axes.barh(place, ratio - 1, left=1, color=color, height=0.85)
            axes.annotate(f" {number(ratio)}", (max(ratio, 1), place), va="center", fontsize=7)
            place += 1
        ticks.append(((first + place - 1) / 2, row["title"]))
        place += 1
    for place_of, title in enumerate(names):
        axes.barh(0, 0, left=1, color=f"C{place_of}", label=title)
    axes.set_yticks([tick for tick, _ in ticks], [title for _, title in ticks], fontsize=8)
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_xlabel("times as fast as the other (right of the line: ours is ahead)")
    if names:
        axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
