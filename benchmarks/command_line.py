"""What the command lines of benchmarks share; it imports nothing of what is measured.

Options, rounds in which all take turns, tables in Markdown, and figures as JSON.
"""

import argparse
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")


def parser_of(
    description: str | None,
    *,
    rounds: int | None = None,
    threads: int | None = None,
    has_json: bool = False,
) -> argparse.ArgumentParser:
    """Return a parser whose help has a module's docstring as it is written.

    Args:
        description: The docstring.
        rounds: Default of ``--rounds``; None leaves the option out.
        threads: Default of ``--threads``, likewise.
        has_json: Whether there is ``--json``, for ``write_json``.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default in (("--rounds", rounds), ("--threads", threads)):
        if default is not None:
            parser.add_argument(name, type=int, default=default)
    if has_json:
        parser.add_argument("--json", type=Path, help="write the figures there as well")
    return parser


def by_turns(calls: Mapping[str, Callable[[], T]], rounds: int) -> dict[str, list[T]]:
    """Call all in turn, round by round; returns what each gave.

    A first round, which touches fresh memory and compiles, counts for nothing.
    """
    results: dict[str, list[T]] = {name: [] for name in calls}
    for number in range(rounds + 1):
        for name, call in calls.items():
            result = call()
            if number:
                results[name].append(result)
    return results


def markdown_table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table in Markdown, its first column to the left and the others to the right."""
    lines = [heads, ["---", *["--:"] * (len(heads) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def write_json(path: Path | None, figures: object) -> None:
    """Write figures where ``--json`` says, if it was given."""
    if path is not None:
        path.write_text(json.dumps(figures, indent=1))
