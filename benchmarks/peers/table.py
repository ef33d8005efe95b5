"""Writes the results of a run into ``benchmarks/results/peers.md``.

::

    python -m benchmarks.peers.table FOUND/found.json

The text between two marks on the page is replaced by a description of machine and run, tables of
engines, servers and cache managers, a plot, the goals, and what was left out. Each checkpoint,
number of bits and kind of processor has its own marks. A figure is a median, with the smallest and
the largest sample in brackets. ``docs/benchmarks.md`` has the tables alone: copy them there.
"""

import json
from pathlib import Path
from typing import Any

from benchmarks.command_line import markdown_table, parser_of
from benchmarks.peers.report import BUSY, best_peer, goal_line, number, plot, stamp_line

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "benchmarks" / "results" / "peers.md"
BEGIN, END = "<!-- results: written by benchmarks/peers/table.py -->", "<!-- end of results -->"


def main() -> None:
    """Read the command line and rewrite the page."""
    parser = parser_of(__doc__)
    parser.add_argument("findings", type=Path, help="found.json of a run")
    parser.add_argument("--page", type=Path, default=PAGE)
    options = parser.parse_args()
    findings = json.loads(options.findings.read_text())
    picture = options.page.parent / plot_of(findings)
    if findings["quick"]:
        parser.error(f"{options.findings} is of a --quick run, whose figures mean nothing")
    rewrite(options.page, markdown(findings), *marks(findings))
    picture.parent.mkdir(exist_ok=True)
    plot(findings, picture)
    print(f"rewritten: {options.page}")


def marks(findings: dict[str, Any]) -> tuple[str, str]:
    """Return the lines between which a run's results stand."""
    words = _which(findings)
    on = f"on {_processor(findings)}"
    label = " ".join(["results", *(["of", *words] if words else []), on])
    return BEGIN.replace("results", label), END.replace("results", label)


def plot_of(findings: dict[str, Any]) -> str:
    """Return the plot's path beside the page."""
    return "-".join(["images/peers", *_which(findings), _processor(findings)]) + ".png"


def _which(findings: dict[str, Any]) -> list[str]:
    """Name what sets a run apart from one of random weights in 16 bits, such as ``int8``."""
    checkpoint, bits = findings.get("checkpoint", "random"), findings.get("weight_bits", 16)
    words = [checkpoint] if checkpoint != "random" else []
    words += [f"int{bits}"] if bits != 16 else []
    rows = findings.get("measures", [])
    kinds = {"http": "http_", "managers": "manager_"}
    return words + [name for name, kind in kinds.items() if rows and rows == _rows(findings, kind)]


def _processor(findings: dict[str, Any]) -> str:
    """Name the newest of its instruction sets that matter, such as ``avx512_bf16``."""
    return str((findings["stamp"]["flags"] or ["generic"])[-1])


def rewrite(page: Path, results: str, begin_mark: str = BEGIN, end_mark: str = END) -> None:
    """Put results between the marks of a page.

    Raises:
        ValueError: The page has not both marks, once each and in order.
    """
    text = page.read_text()
    before, begin, rest = text.partition(begin_mark)
    _, end, after = rest.partition(end_mark)
    if not begin or not end:
        raise ValueError(
            f"{page} has no place for results: it needs the lines {begin_mark} and {end_mark}"
        )
    page.write_text(f"{before}{begin}\n\n{results}\n{end}{after}")


def markdown(findings: dict[str, Any]) -> str:
    """Write what was found as a piece of a page."""
    engines, servers, managers = (_rows(findings, kind) for kind in ("", "http_", "manager_"))
    taken = [f["others"] for row in findings["measures"] for f in row["figures"].values()]
    lines = [f"{stamp_line(findings)}.", _load_line(max(taken, default=0.0), BUSY), ""]
    for rows in (engines, servers, managers):
        if any(row["figures"] for row in rows):
            lines += [_table(rows, findings), ""]
    if max(taken, default=0.0) > BUSY:
        lines += ["CPU seconds that each engine took for a sample, which the others on the machine"]
        lines += ["change less:", "", _cpu_table(engines or servers, findings), ""]
    lines += [f"![How many times as fast Ostinato is as the others]({plot_of(findings)})", ""]
    lines += [_goals(findings), "", *_versions(findings), ""]
    lines += _left_out(findings)
    return "\n".join(lines)


def _rows(findings: dict[str, Any], kind: str) -> list[dict[str, Any]]:
    """Return the rows whose names begin so; of no kind are those of engines alone."""
    kinds = ("http_", "manager_")
    return [r for r in findings["measures"] if r["name"].startswith(kind or kinds) == bool(kind)]


def _load_line(taken: float, limit: float) -> str:
    if taken <= limit:
        return f"Nothing else ran: others took at most {taken:.2f} cores during any sample."
    return (
        f"Other programs were running, and took up to {taken:.1f} cores during a sample: "
        f"figures with a star had more than {limit} cores taken from them, "
        "and, as not all lost the same, say little."
    )


def _table(rows: list[dict[str, Any]], findings: dict[str, Any]) -> str:
    names, titles = _columns(rows, findings)
    lines = []
    for row in rows:
        best = best_peer(row)
        ratio = row["ratios"].get(best) if best else None
        cells = [*(_cell(row["figures"].get(name)) for name in names), _or_dash(ratio, " ×")]
        lines.append([f"{row['title']}, {row['unit']}", *cells])
    return markdown_table(["", *titles, "against the best"], lines)


def _cpu_table(rows: list[dict[str, Any]], findings: dict[str, Any]) -> str:
    names, titles = _columns(rows, findings)
    lines = [
        [row["title"], *(_or_dash(row["figures"].get(name, {}).get("cpu_s")) for name in names)]
        for row in rows
    ]
    return markdown_table(["", *titles], lines)


def _columns(rows: list[dict[str, Any]], findings: dict[str, Any]) -> tuple[list[str], list[str]]:
    """Return the names of the engines of some rows, and their titles."""
    names = list(dict.fromkeys(name for row in rows for name in row["figures"]))
    return names, [findings["titles"].get(name, name) for name in names]


def _or_dash(value: float | None, unit: str = "") -> str:
    return "–" if value is None else f"{number(value)}{unit}"


def _cell(figure: dict[str, float] | None) -> str:
    if figure is None:
        return "–"
    star = "\\*" if figure["others"] > BUSY else ""
    spread = ""
    if figure["samples"] > 1:
        spread = f" ({number(figure['lowest'])}–{number(figure['highest'])})"
    return f"{number(figure['median'])}{star}{spread}"


def _goals(findings: dict[str, Any]) -> str:
    """Return a row per goal: how many times as fast ours was to be, and whether it is."""
    goals = [(row["title"], goal_line(row, findings)) for row in findings["measures"]]
    rows = [[title, *goal] for title, goal in goals if goal is not None]
    return markdown_table(["Goal", "", ""], rows) if rows else "There are no goals for such a run."


def _versions(findings: dict[str, Any]) -> list[str]:
    parts = [
        f"{e['title']} {e['version']}"
        + (f" (blocks of {e['settings']['block_size']})" if "block_size" in e["settings"] else "")
        for e in findings["engines"].values()
    ]
    shares = [f"{name} {share:.0%}" for name, share in findings["agreement"].items()]
    lines = [f"Versions: {', '.join(dict.fromkeys(parts))}."]
    if shares:
        lines.append(f"Greedy tokens in common with the yardstick: {', '.join(shares)}.")
    return lines


def _left_out(findings: dict[str, Any]) -> list[str]:
    lines = [f"- {name}: not installed" for name in findings["absent"]]
    lines += [f"- {word}" for word in findings.get("warnings", [])]
    for row in findings["measures"]:
        by_reason: dict[str, list[str]] = {}
        for name, why in row["left_out"].items():
            by_reason.setdefault(why, []).append(name)
        lines += [f"- {row['title']}, {', '.join(who)}: {why}" for why, who in by_reason.items()]
    return ["Left out:", "", *lines, ""] if lines else []


if __name__ == "__main__":
    main()
